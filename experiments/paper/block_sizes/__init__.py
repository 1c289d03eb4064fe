"""Latency by block size, and by the handling of preempted requests."""
