"""Readings from a server's log: its periodic lines, as samples of the names that its metrics have.

    vLLM     Engine 000: Avg prompt throughput: 4012.0 tokens/s, Avg generation throughput: 1010.3 tokens/s, Running: 41 reqs,
             Waiting: 63 reqs, GPU KV cache usage: 99.1%, Prefix cache hit rate: 4.0%            every 10 s, while it is not idle
    SGLang   Decode batch, #running-req: 41, #token: 81234, token usage: 0.99, ..., #queue-req: 63
             Prefill batch, #new-seq: 2, #new-token: 812, #cached-token: 64, ...
             ... Retract requests. #retracted_reqs: 3, ...

Throughputs are means since the line before, SGLang's since the decode line before; over its time they are tokens. vLLM's prompt throughput leaves out what its prefix cache
had. Its ``Preemptions`` are of the time since the line before. A line has the time of ``kubectl logs --timestamps``, else
its own. vLLM's has no year, so that times are those of the year 2000: only their differences count.

Sources: vllm/v1/metrics/loggers.py of the wheels of 0.9 to 0.33; sgl-project/sglang 0.5, scheduler_metrics_mixin.py.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime

from ...sim.types.errors import UserError
from .scrapes import (
    GENERATION_TOKENS,
    HIT_RATE,
    HITS,
    KV_USAGE,
    PREEMPTIONS,
    PROMPT_TOKENS,
    QUERIES,
    RUNNING,
    WAITING,
    Clock,
    Readings,
    Sample,
    scrapes_of,
)

#: What a periodic line has, behind the number of its engine.
_VLLM = re.compile(r"(?:Engine (?P<engine>\d{1,4}): )?Avg prompt throughput: .*")
_SGLANG = re.compile(r"(?:Decode|Prefill) batch[.,] .*")
_RETRACTED = re.compile(
    r"Retract requests.*?#retracted_reqs: (\d{1,9})|Decode out of memory.*?#retracted_reqs: (\d{1,9})"
)
_PAIR = re.compile(r"([#A-Za-z][#\w -]*?)(?: \(token/s\))?: (\d{1,15}(?:\.\d{1,9})?)")
_STAMP = re.compile(r"(\d{4}-\d\d-\d\d)[T ](\d\d:\d\d:\d\d)(?:[.,]\d+)?(Z|[+-]\d\d:\d\d)?")
_SHORT = re.compile(r"(?:INFO|WARNING|DEBUG|ERROR) (\d\d-\d\d) (\d\d:\d\d:\d\d)")
_POD = re.compile(r"^\[(?:pod/)?([^\]/\s]+)(?:/[^\]\s]+)?\] ")
_RANK = re.compile(r"\bDP(\d{1,4})\b")
_COLOURS = re.compile(r"\x1b\[[\d;]*m")
#: Seconds of a line's means where there is no line before it, and the longest between two of a server that is not idle.
_PERIOD_S, _LONGEST_S = 10.0, 60.0

Labels = tuple[tuple[str, str], ...]


def has_periodic_lines(text: str) -> bool:
    """Whether a text has lines that are read here."""
    return any(pattern.search(text) for pattern in (_VLLM, _SGLANG))


def readings_of(source: str, text: str) -> Readings:
    """The readings of a log.

    Raises:
        UserError: It has no periodic line.
    """
    if not has_periodic_lines(text):
        lines = "Avg prompt throughput (vLLM), Decode batch (SGLang)"
        raise UserError(f"{source}: has no periodic line: {lines}; give the engine's log while it serves")
    samples = list(_Lines().samples(text))
    at_s = [sample.clock.at_s for sample in samples if sample.clock is not None]
    return Readings(source, list(scrapes_of(samples)), max(at_s) - min(at_s) if at_s else None)


class _Lines:
    """Turns lines into samples; counts over all of them what a line says of its time alone."""

    def __init__(self) -> None:
        self._counted: dict[tuple[str, Labels], float] = {}
        self._last: dict[Labels, float] = {}

    def samples(self, text: str) -> Iterator[Sample]:
        """The samples of the lines in order, of one kind of server."""
        is_vllm = _VLLM.search(text) is not None
        for place, raw in enumerate(text.splitlines(), 1):
            line = _COLOURS.sub("", raw)
            if is_vllm and (found := _VLLM.search(line)):
                labels = _labels(line, found["engine"])
                gauges = self._of_vllm(line, labels, _pairs(found[0]))
            elif not is_vllm and (retracted := _RETRACTED.search(line)):
                self._count(PREEMPTIONS[1], _labels(line, None), float(retracted[1] or retracted[2]))
                continue
            elif not is_vllm and (found := _SGLANG.search(line)):
                labels = _labels(line, None)
                gauges = self._of_sglang(line, labels, _pairs(found[0]))
            else:
                continue
            at_s = _at_s(line)
            clock = None if at_s is None else Clock(place, at_s)
            counted = {name: value for (name, own), value in self._counted.items() if own == labels}
            for name, value in (gauges | counted).items():
                yield Sample((name, labels), value, None, clock)

    def _of_vllm(self, line: str, labels: Labels, pairs: Mapping[str, float]) -> dict[str, float]:
        usage = [value for name, value in pairs.items() if name.endswith("KV cache usage")]
        at_s = _at_s(line)
        passed_s = _PERIOD_S if at_s is None or labels not in self._last else at_s - self._last[labels]
        if at_s is not None:
            self._last[labels] = at_s
        hits = pairs.get("Prefix cache hit rate", 0.0) / 100
        if 0 <= passed_s <= _LONGEST_S:
            prompts = pairs.get("Avg prompt throughput", 0.0) * passed_s
            self._count(PROMPT_TOKENS[0], labels, prompts / (1 - hits) if hits < 1 else prompts)
            self._count(GENERATION_TOKENS[0], labels, pairs.get("Avg generation throughput", 0.0) * passed_s)
        if (preempted := pairs.get("Preemptions")) is not None:
            self._count(PREEMPTIONS[0], labels, preempted)
        gauges = {
            RUNNING[0]: pairs.get("Running", 0.0),
            WAITING[0]: pairs.get("Waiting", pairs.get("Pending", 0.0)),
        }
        if usage:
            gauges[KV_USAGE[0]] = usage[0] / 100
        return gauges | ({HIT_RATE[0]: hits} if "Prefix cache hit rate" in pairs else {})

    def _of_sglang(self, line: str, labels: Labels, pairs: Mapping[str, float]) -> dict[str, float]:
        at_s = _at_s(line)
        if "gen throughput" in pairs and at_s is not None:
            # Of the tokens since the decode line before.
            passed_s = at_s - self._last.get(labels, at_s)
            self._last[labels] = at_s
            self._count(GENERATION_TOKENS[1], labels, pairs["gen throughput"] * max(passed_s, 0.0))
        if "#new-token" in pairs:
            cached = pairs.get("#cached-token", 0.0)
            self._count(QUERIES[2], labels, pairs["#new-token"] + cached)
            self._count(HITS[2], labels, cached)
        # Of the layers that keep every token, where others have a pool of their own.
        usage = "token usage" if "token usage" in pairs else "full token usage"
        found = {RUNNING[1]: "#running-req", WAITING[1]: "#queue-req", KV_USAGE[2]: usage}
        return {name: pairs[key] for name, key in found.items() if key in pairs}

    def _count(self, name: str, labels: Labels, more: float) -> None:
        self._counted[name, labels] = self._counted.get((name, labels), 0.0) + more


def _pairs(text: str) -> dict[str, float]:
    return {name.strip(): float(value) for name, value in _PAIR.findall(text)}


def _labels(line: str, engine: str | None) -> Labels:
    pod, rank = _POD.match(line), _RANK.search(line)
    named = {"pod": pod and pod[1], "engine": engine and str(int(engine)), "dp_rank": rank and rank[1]}
    return tuple((name, value) for name, value in named.items() if value)


def _at_s(line: str) -> float | None:
    """Seconds since 1970 of a line's own time; None without one, or one that cannot be."""
    stamp, short = _STAMP.search(line), _SHORT.search(line)
    try:
        if stamp is not None:
            found = datetime.fromisoformat(f"{stamp[1]}T{stamp[2]}{stamp[3] or '+00:00'}")
        elif short is not None:
            found = datetime.fromisoformat(f"2000-{short[1]}T{short[2]}").replace(tzinfo=UTC)
        else:
            return None
    except ValueError:
        return None
    return found.timestamp()
