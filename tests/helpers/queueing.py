"""Queues with known laws."""

from __future__ import annotations

from math import factorial

TOKEN_TICKS, MEAN_TOKENS = 1000, 1000


def erlang_c_wait(servers: int, load: float) -> float:
    """Mean wait of M/M/k in mean services: one queue, from which the first free server takes the next request."""
    offered = servers * load
    busy = offered**servers / factorial(servers) / (1 - load)
    return busy / (sum(offered**k / factorial(k) for k in range(servers)) + busy) / (servers * (1 - load))


def erlang_arrivals_wait(servers: int, load: float) -> float:
    """Mean wait of a server that gets every k-th request, E_k/M/1, in mean services: s / (1 - s), with s the root of the
    transform of the time between two of its arrivals."""
    root = 0.0
    for _ in range(10_000):
        root = (servers * load / (servers * load + 1 - root)) ** servers
    return root / (1 - root)
