"""What a server costs beside its engine: `python -m benchmarks.server`."""
