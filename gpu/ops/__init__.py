"""The kernels behind Python functions, and how they are built."""
