"""Devices that run recorded plans and models: the CPU, the kernels' CPU build, a GPU."""
