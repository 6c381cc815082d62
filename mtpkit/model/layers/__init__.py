"""mtpkit's own layers, with Megatron's parameter names."""
