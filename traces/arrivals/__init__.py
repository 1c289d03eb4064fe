"""Arrival times of requests: from the trace, from a random process, or along a rate curve."""
