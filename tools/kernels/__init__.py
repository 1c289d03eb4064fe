"""The kernels under sanitizers, and the instructions that they compile to."""
