"""Rate sweeps: the request rate at which a system reaches a limit of latency."""
