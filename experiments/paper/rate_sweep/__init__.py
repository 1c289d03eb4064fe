"""Rate sweeps: how many requests/s a system takes within a limit of latency."""
