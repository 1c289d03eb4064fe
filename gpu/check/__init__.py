"""Correctness checks of the kernels: correctness grid, replays, sanitizers, compile gate."""
