"""Prefill and decode servers that run apart: which side is short, by their readings alone.

1. An engine is of the prefill side if its requests have one token of output, and of the decode side if at least a half of its prompt tokens
   come from another server. Readings with engines of both sides are of a server whose prefill and decode run apart.
2. A side is short if requests wait there, as many as are a queue, or its KV cache is full. It has room if neither is so and ``_ROOM`` of
   its KV cache is free.
3. They are out of balance if one is short and the other has room.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum

from ..measured.scrapes import (
    KV_USAGE,
    OUTPUTS,
    RUNNING,
    SOURCES,
    TRANSFERRED,
    WAITING,
    Samples,
    Scrape,
    engines_of,
    in_flight,
    of_engine,
    total,
)

#: Mean output of prefill servers at most, and share of prompt tokens that decode servers get from others at least.
_ONE_TOKEN, _GIVEN = 1.01, 0.5
#: Waiting requests of a side that are a queue, at least and relative to those that run; use of the KV cache that is full; free share
#: of it that is room.
_QUEUE, _QUEUE_SHARE, _FULL, _ROOM = 1.0, 0.05, 0.95, 0.25


@dataclass(frozen=True)
class Side:
    """The engines of a side, while any request is in flight.

    Attributes:
        name: "prefill" or "decode".
        engines: Their number.
        running, waiting: Mean requests of all of them.
        usage: Mean use of their KV caches; None where it is not known.
    """

    name: str
    engines: int
    running: float
    waiting: float
    usage: float | None

    @property
    def is_short(self) -> bool:
        """Whether requests wait for this side."""
        return self.waiting >= max(_QUEUE, _QUEUE_SHARE * self.running) or (self.usage or 0.0) >= _FULL

    @property
    def has_room(self) -> bool:
        """Whether it could serve more."""
        return not self.is_short and (self.usage or 0.0) <= 1 - _ROOM


@dataclass(frozen=True)
class Sides:
    """Both sides of a server whose prefill and decode run apart."""

    prefill: Side
    decode: Side

    @property
    def short(self) -> Side | None:
        """The side that is short while the other has room; None where they are in balance."""
        for side, other in ((self.prefill, self.decode), (self.decode, self.prefill)):
            if side.is_short and other.has_room:
                return side
        return None


def sides_of(scrapes: Sequence[Scrape]) -> Sides | None:
    """The sides by their readings; None where the engines are not of both."""
    named: dict[str, list[str]] = {"prefill": [], "decode": []}
    last = scrapes[-1]
    for engine in engines_of(last.samples):
        role = _role(of_engine(last, engine).samples)
        if role is not None:
            named[role].append(engine)
    if not all(named.values()):
        return None
    return Sides(*(_side(role, engines, scrapes) for role, engines in named.items()))


def _role(samples: Samples) -> str | None:
    tokens, requests = (total(samples, tuple(f"{name}_{part}" for name in OUTPUTS)) for part in ("sum", "count"))
    if requests and (tokens or 0.0) <= _ONE_TOKEN * requests:
        return "prefill"
    by_source = {dict(labels).get("source"): value for (name, labels), value in samples.items() if name == SOURCES}
    given, whole = by_source.get(TRANSFERRED, 0.0), fsum(by_source.values())
    return "decode" if whole and given >= _GIVEN * whole else None


def _side(name: str, engines: Sequence[str], scrapes: Sequence[Scrape]) -> Side:
    """Means over the readings at which the side has a request."""
    busy = [own for each in scrapes if any(map(in_flight, own := [of_engine(each, name).samples for name in engines]))]
    running, waiting = (
        fsum(total(each, names) or 0.0 for own in busy for each in own) / max(1, len(busy))
        for names in (RUNNING, WAITING)
    )
    used = [value for own in busy for each in own if (value := total(each, KV_USAGE)) is not None]
    return Side(name, len(engines), running, waiting, fsum(used) / len(used) if used else None)


def sides_lines(sides: Sides) -> list[str]:
    """What happens on both sides, and what to do."""
    shown = [_text(side) for side in (sides.prefill, sides.decode)]
    first = f"Prefill and decode run apart: {shown[0]}; {shown[1]}."
    short = sides.short
    if short is None:
        both = sides.prefill.is_short and sides.decode.is_short
        state = (
            "Both sides are short: add replicas of both, or send fewer requests." if both else "They are in balance."
        )
        return [first, state]
    other = sides.decode if short is sides.prefill else sides.prefill
    now = (
        "send short prompts to the decode servers alone, which compute them, too, and let the gateway hold back others"
        if short is sides.prefill
        else "let fewer requests be in flight (a limit at the gateway): a prompt that is computed and cannot go on keeps blocks of both"
    )
    return [
        first,
        f"Out of balance: requests wait for {short.name} while {other.name} has room. Now, without a restart: {now}. At the next restart:"
        f" a server of the {other.name} side as one of the {short.name} side; fragmeter plan sizes both.",
    ]


def _text(side: Side) -> str:
    usage = "" if side.usage is None else f", {side.usage:.0%} of the KV cache is in use"
    servers = "server" if side.engines == 1 else "servers"
    return (
        f"on {side.engines} {side.name} {servers} {side.running:,.1f} requests run and {side.waiting:,.1f} wait{usage}"
    )
