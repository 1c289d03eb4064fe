"""Runs the PTX that NVRTC makes of the kernels, on the CPU: each register is a numpy array over the threads of a block."""
