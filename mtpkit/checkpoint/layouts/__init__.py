"""The two checkpoint layouts: Megatron's names, shapes, settings and files, and Hugging Face's
files."""
