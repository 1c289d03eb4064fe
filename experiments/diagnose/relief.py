"""What helps a server without a restart, and what each change costs.

    limit at the gateway   at most as many requests in flight as fit into the KV cache: to the engine that is --max-num-seqs, as
                           requests wait in front of it in place of within it
    fewer requests         a share goes to another replica or is refused: the same draws at a lower rate, or of fewer users

Both are simulated on the requests of the draws, as flags are (``diagnosis``). Latencies are those of the requests that are served,
from their arrival at the gateway.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from ...sim.spec.gpu import GIB
from ...sim.types.optional import not_none
from ..vllm_serve.start import OwnPool
from .causes import WAITS, Case, pressure
from .server import Change, Server

#: Limits at the gateway, relative to the sequences of mean final length that fit; and shares of the requests that stay.
_FITTING, _STAYING = (1.0, 0.75), (0.9, 0.75, 0.5)


#: Flags of the share of a GPU's memory.
_SHARES = {"gpu-memory-utilization", "mem-fraction-static"}


@dataclass(frozen=True)
class Measure:
    """A change in front of the server.

    Attributes:
        text: What to do.
        costs: What it costs.
        change: Flags with which the engine serves as with it.
        share: Share of the requests that the server still gets.
    """

    text: str
    costs: str
    change: Change
    share: float = 1.0


def measures(case: Case, *, behind: bool) -> list[list[Measure]]:
    """The measures against what the runs show, by kind; of each kind the best goes on.

    Args:
        behind: Whether the server does not keep up.
    """
    full = pressure(case) is not None
    waits = behind or case.seen.wait_seqs >= WAITS or case.seen.wait_steps >= WAITS
    kinds = [list(_limits(case))] if full else []
    return [*kinds, list(_fewer())] if full or waits else kinds


def _limits(case: Case) -> Iterator[Measure]:
    launch = case.server.launch
    for value in dict.fromkeys(max(1, round(case.fitting * factor)) for factor in _FITTING):
        if value < launch.max_num_seqs:
            yield Measure(
                f"at most {value:,} requests in flight, by a limit at the gateway",
                "requests wait at the gateway",
                {"max-num-seqs": str(value)},
            )


def _fewer() -> Iterator[Measure]:
    for share in _STAYING:
        yield Measure(
            f"{1 - share:.0%} of the requests to another replica, or refused",
            f"room for {1 - share:.0%} of the load elsewhere, or as many errors",
            {},
            share,
        )


def costs_of(change: Change, server: Server, other: Server) -> str:
    """What flags cost: all take a restart.

    Args:
        server, other: The server without and with them.
    """
    found = ["a restart, which empties the prefix cache" if server.launch.enable_prefix_caching else "a restart"]
    if _SHARES & change.keys():
        (less, *_), (more, *_) = (each.started.stages() for each in (server, other))
        found.append(f"{(more.requested_bytes - less.requested_bytes) / GIB:.1f} GiB less of each GPU stay free")
    elif other.started.own_pool() != (own := server.started.own_pool()) and own is not None:
        found.append(_moved(server, other, own))
    elif other.pool.num_tokens > server.pool.num_tokens and "kv-cache-dtype" not in change:
        found.append(f"memory for {other.pool.num_tokens - server.pool.num_tokens:,} more tokens")
    if "kv-offloading-size" in change:
        found.append(f"{change['kv-offloading-size']} GiB of host memory")
    if "kv-cache-dtype" in change:
        found.append("other answers of the model")
    if change.get("enable-prefix-caching") is False:
        found.append("prefixes are computed again")
    if "max-num-seqs" in change and other.launch.max_num_seqs < server.launch.max_num_seqs:
        found.append("requests wait longer for their start")
    return "; ".join(found)


def _moved(server: Server, other: Server, own: OwnPool) -> str:
    """What a change of the pool of windows or states takes from the KV cache, or gives it."""
    more = not_none(other.started.own_pool()).slots - own.slots
    tokens = other.pool.num_tokens - server.pool.num_tokens
    what = "tokens of windows" if own.kind == "windows" else own.kind
    return f"{tokens:+,} tokens of KV cache, {more:+,} {what}"
