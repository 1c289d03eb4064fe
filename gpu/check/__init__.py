"""Whether the kernels are right: correctness grid, replays, sanitizers, compile gate."""
