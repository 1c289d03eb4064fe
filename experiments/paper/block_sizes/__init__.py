"""Latency by block size, and by what is done with preempted requests."""
