"""The kernels as Python functions, and their build."""
