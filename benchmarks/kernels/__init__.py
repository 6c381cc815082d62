"""The benchmark of kernels, each on its own: `python -m benchmarks.kernels`."""
