"""Metrics of a server from its readings (``scrapes``): means, counts and histograms, under current and older names.

Gauges are averaged over the scrapes in which a request runs or waits. Counters and histograms count from the first
scrape to the last, or from the server's start if there is only one scrape.

``served_load`` averages gauges over the scrapes while requests arrive. The requests that have arrived by a scrape are those that
have finished, run or wait. They arrive from the last scrape with as many as the first one to the first with as many as the last one,
so that neither the time before a benchmark nor the drain after its last request counts. ``loop`` says from the same scrapes whether
clients wait for answers.

SGLang's metrics are read by the same rules. Its pool is ``max_total_num_tokens`` blocks of one token, its prefix cache
``cached_tokens_total`` of ``prompt_tokens_total``; of several pipeline stages the first counts. llama.cpp's have requests in flight and, up
to releases of 2025, the use of the KV cache: no latencies, lengths or finished requests.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import fsum, isfinite, sqrt
from os import PathLike

from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from .loop import Loop, loop_of
from .scrapes import (
    ACCEPTED,
    CONFIG,
    DRAFTS,
    E2EL,
    FINISHED,
    GENERATION_TOKENS,
    HIT_RATE,
    HITS,
    INFERENCE,
    ITL,
    KV_USAGE,
    OUTPUTS,
    POLICIES,
    POOL_TOKENS,
    PREEMPTIONS,
    PROMPT_TOKENS,
    PROMPTS,
    QUERIES,
    QUEUED,
    RUNNING,
    TPOT,
    TTFT,
    VLLM,
    WAITING,
    Readings,
    Samples,
    Scrape,
    arriving,
    engines_of,
    in_flight,
    number,
    of_engine,
    points,
    read_scrapes,
    replicas_of,
    server_of,
    total,
)

#: Least scrapes with waiting requests that show a limit on those that run, and the share of them at which it is reached.
_LIMIT_SCRAPES, _LIMIT_SHARE = 3, 0.75
#: Standard deviations of the requests that finish in a step by which a scrape is below the limit that it reaches; and the use of the
#: KV cache from which on it may limit about as many.
_LIMIT_DEVIATIONS, _LIMIT_USAGE = 4.0, 0.9
#: Requests that finish between the scrapes from which on their lengths stand for the load's.
_LEAST_LENGTHS = 30
#: Share of a limit by which a scrape may be below it.
_LIMIT_GONE = 0.25


@dataclass(frozen=True)
class Histogram:
    """A histogram over requests: of lengths in tokens, or of latencies in seconds.

    Attributes:
        count: Number of requests.
        mean: Mean value.
        bounds: Finite upper bounds of the buckets, ascending.
        shares: Share of the requests up to each bound, ascending; below 1 if some requests are above all bounds.
    """

    count: float
    mean: float
    bounds: tuple[float, ...]
    shares: tuple[float, ...]

    def shares_within(self, limit: float) -> tuple[float, float]:
        """The least and the greatest share of the requests that can be up to a limit, by the buckets beside it."""
        known = list(zip(self.bounds, self.shares, strict=True))
        least = max((share for bound, share in known if bound <= limit), default=0.0)
        return least, min((share for bound, share in known if bound >= limit), default=1.0)


@dataclass(frozen=True)
class ServerMetrics:
    """Metrics found in a file; None for absent ones.

    Attributes:
        num_scrapes: Number of scrapes.
        server: The server that wrote them, a value of ``SERVERS``.
        num_gpu_blocks, block_size: Size of the KV pool.
        kv_usage: Mean and maximum share of the pool in use.
        running, waiting: Mean number of requests.
        running_limit: Most requests that run at scrapes at which others wait, if about as many run at most of them.
        preemptions: Number of preemptions.
        hit_rate: Share of the tokens looked up that the prefix cache had.
        first_tokens: Requests that produced a first token.
        ttft_s, itl_s, e2el_s: Means measured by the server, without the transfer to the client.
        outside_engine_s: Mean time of a request in the server and outside of its engine: the API server's own, in front of the engine's
            queue and behind the last token.
        elapsed_s: Seconds between the times of the first and the last scrape, if the file has them.
        finished: Requests that finished.
        prompts, outputs: Lengths of the finished requests; ``served_load`` takes all since the server's start if few finish meanwhile.
        ttfts, tpots, e2els: Latencies of the requests, in seconds.
        arrival_rate: Requests/s that arrive while any do; only ``served_load`` has it, if the file has times.
        loop: Whether clients wait for answers; only ``served_load`` has it. Its rate and requests in flight are those of the engine.
        config: Labels of ``cache_config_info``.
        model_name: Label of the requests; None if they have several.
        most_in_flight: Most requests that run or wait at a scrape.
        engine, num_engines: Label of the engine that all is of, and the number of engines in the file, if there are several.
        num_replicas: Servers that these are of.
        prompt_rate, output_rate: Tokens/s of prompts and of outputs between the first and the last scrape.
        acceptance_rates: For each place of a step's drafts, the share of the steps in which the drafts up to it are accepted, as
            ``SpeculativeConfig`` has it; empty without drafts.
    """

    num_scrapes: int
    server: str = VLLM
    num_gpu_blocks: int | None = None
    block_size: int | None = None
    kv_usage: tuple[float, float] | None = None
    running: float | None = None
    waiting: float | None = None
    running_limit: float | None = None
    preemptions: float | None = None
    hit_rate: float | None = None
    first_tokens: float | None = None
    ttft_s: float | None = None
    itl_s: float | None = None
    e2el_s: float | None = None
    outside_engine_s: float | None = None
    elapsed_s: float | None = None
    finished: float | None = None
    prompts: Histogram | None = None
    outputs: Histogram | None = None
    ttfts: Histogram | None = None
    tpots: Histogram | None = None
    e2els: Histogram | None = None
    arrival_rate: float | None = None
    loop: Loop | None = None
    config: Mapping[str, str] = field(default_factory=dict)
    model_name: str | None = None
    most_in_flight: float | None = None
    engine: str | None = None
    num_engines: int = 1
    num_replicas: int = 1
    prompt_rate: float | None = None
    output_rate: float | None = None
    acceptance_rates: tuple[float, ...] = ()


def server_of_policy(policy: str) -> str | None:
    """The server of ``SERVERS`` that a policy simulates, if it is one."""
    return next(
        (server for server, name in POLICIES.items() if name == policy), VLLM if policy.startswith("vllm") else None
    )


def read_metrics(path: str | PathLike[str]) -> ServerMetrics:
    """The metrics in a file.

    Raises:
        UserError: The file cannot be read, has no metrics of ``SERVERS``, has metrics of several engines, or has a line that is
            no metric.
    """
    readings = read_scrapes(path)
    engines = engines_of(readings.scrapes[-1].samples)
    if len(engines) > 1:
        remedy = "one is simulated; benchmark and scrape a server with --data-parallel-size 1"
        raise UserError(f"{path}: has metrics of {len(engines)} engines; {remedy}")
    return _Reader(readings, readings.scrapes).metrics()


def served_load(readings: Readings, one_engine: bool = False) -> ServerMetrics:
    """What a server's metrics say of its load, to simulate one engine under it.

    Of several engines it is the one with the most requests in flight, summed over the scrapes. Gauges and the arrival rate are of the
    scrapes between which requests arrive; lengths of prompts and outputs are of all requests since the server's start if too few finished
    between these.

    Args:
        one_engine: Refuse metrics of several engines.

    Raises:
        UserError: There are several engines, and that is refused.
    """
    engines = engines_of(readings.scrapes[-1].samples)
    if one_engine and len(engines) > 1:
        remedy = (
            "the requests of a file went to all of them; give the metrics alone, of which the busiest engine is taken"
        )
        raise UserError(f"{readings.source}: has metrics of {len(engines)} engines; {remedy}")
    (engine, scrapes), loop = busiest(readings), _loop(readings.scrapes)
    found = _Reader(readings, scrapes, *arriving(scrapes)).metrics()
    if found.outputs is None or found.outputs.count < _LEAST_LENGTHS:
        # Of all requests since the server's start.
        last = _Reader(readings, scrapes[-1:]).metrics()
        found = replace(found, prompts=last.prompts or found.prompts, outputs=last.outputs or found.outputs)
    if engine is None:
        return replace(found, loop=loop)
    # Clients choose no engine: only all requests in flight stay the same.
    own = _loop(scrapes)
    loop = replace(loop, arrival_rate=own.arrival_rate, in_flight=own.in_flight)
    replicas = replicas_of(readings.scrapes[-1].samples)
    return replace(found, loop=loop, engine=engine, num_engines=len(engines), num_replicas=replicas)


def _loop(scrapes: Sequence[Scrape]) -> Loop:
    if total(scrapes[-1].samples, FINISHED) is None:
        return Loop("unknown", "they do not count the requests that finish")
    return loop_of(points(scrapes))


def busiest(readings: Readings) -> tuple[str | None, Sequence[Scrape]]:
    """The engine with the most requests in flight, summed over the scrapes, and its scrapes; None and all if there is only one."""
    engines = engines_of(readings.scrapes[-1].samples)
    if len(engines) < 2:
        return None, readings.scrapes
    of_engines = {engine: [of_engine(scrape, engine) for scrape in readings.scrapes] for engine in engines}
    # Of equally busy ones the first.
    engine = max(engines, key=lambda each: fsum(in_flight(scrape.samples) for scrape in of_engines[each]))
    return engine, of_engines[engine]


class _Reader:
    """Reads metrics from scrapes, under current and older names."""

    def __init__(
        self,
        readings: Readings,
        scrapes: Sequence[Scrape],
        while_arriving: slice = slice(None),
        arrival_rate: float | None = None,
    ) -> None:
        self._source, self._elapsed_s, self._arrival_rate = readings.source, readings.elapsed_s, arrival_rate
        self._scrapes = [scrape.samples for scrape in scrapes]
        self._busy = [scrape for scrape in self._scrapes[while_arriving] if in_flight(scrape) > 0]

    def metrics(self) -> ServerMetrics:
        """The metrics over all scrapes."""
        elapsed_s = self._elapsed_s
        usage, config, (num_blocks, block_size) = self._gauge(KV_USAGE), self._config(), self._pool()
        queries, hits = self._counted(QUERIES), self._counted(HITS)
        return ServerMetrics(
            num_scrapes=len(self._scrapes),
            server=server_of(self._scrapes[-1]),
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            kv_usage=(not_none(_mean(usage)), max(usage)) if usage else None,
            running=_mean(self._gauge(RUNNING)),
            waiting=_mean(self._gauge(WAITING)),
            running_limit=self._running_limit(),
            preemptions=self._counted(PREEMPTIONS),
            hit_rate=hits / queries if hits is not None and queries else _mean(self._gauge(HIT_RATE)),
            first_tokens=self._counted(tuple(f"{name}_count" for name in TTFT)),
            ttft_s=self._observed(TTFT),
            itl_s=self._observed(ITL),
            e2el_s=self._observed(E2EL),
            outside_engine_s=self._outside_engine_s(),
            elapsed_s=elapsed_s if elapsed_s and isfinite(elapsed_s) else None,
            finished=self._counted(FINISHED),
            prompts=self._histogram(PROMPTS),
            outputs=self._histogram(OUTPUTS),
            ttfts=self._histogram(TTFT),
            tpots=self._histogram(TPOT),
            e2els=self._histogram(E2EL),
            arrival_rate=self._arrival_rate,
            prompt_rate=self._rate(PROMPT_TOKENS),
            output_rate=self._rate(GENERATION_TOKENS),
            config=config,
            model_name=self._model_name(),
            most_in_flight=max(map(in_flight, self._scrapes)) or None,
            acceptance_rates=self._acceptance_rates(),
        )

    def _model_name(self) -> str | None:
        names = {dict(labels).get("model_name") for name, labels in self._scrapes[-1] if name in RUNNING}
        return names.pop() if len(names) == 1 else None

    def _config(self) -> Mapping[str, str]:
        return next((dict(labels) for name, labels in self._scrapes[-1] if name == CONFIG), {})

    def _pool(self) -> tuple[int | None, int | None]:
        """Blocks of the KV cache, and tokens of one; None where the metrics do not have it."""
        tokens = total(self._scrapes[-1], POOL_TOKENS)
        if tokens is not None:
            # The simulated tree has pages of one token, whatever the server's are.
            return int(tokens), 1
        config = self._config()
        return _whole(config.get("num_gpu_blocks")), _whole(config.get("block_size"))

    def _gauge(self, names: tuple[str, ...]) -> list[float]:
        values = (total(scrape, names) for scrape in self._busy)
        return [value for value in values if value is not None]

    def _counted(self, names: tuple[str, ...]) -> float | None:
        """The increase of a counter."""
        last = total(self._scrapes[-1], names)
        if last is None or len(self._scrapes) == 1:
            return last
        first = total(self._scrapes[0], names) or 0.0
        if first > last:
            remedy = "the server was restarted between scrapes; keep those of one benchmark"
            raise UserError(f"{self._source}: {names[0]} falls from {first:g} to {last:g}; {remedy}")
        return last - first

    def _acceptance_rates(self) -> tuple[float, ...]:
        steps, last = self._counted(DRAFTS), _accepted(self._scrapes[-1])
        if not steps or sorted(last) != [*range(len(last))]:
            return ()
        first = _accepted(self._scrapes[0]) if len(self._scrapes) > 1 else {}
        return tuple(min(1.0, (last[place] - first.get(place, 0.0)) / steps) for place in range(len(last)))

    def _observed(self, names: tuple[str, ...]) -> float | None:
        """Mean of a histogram's observations."""
        total, count = (self._counted(tuple(f"{name}_{part}" for name in names)) for part in ("sum", "count"))
        return total / count if total is not None and count else None

    def _outside_engine_s(self) -> float | None:
        """The three histograms observe a request when it has finished, so that their means are of the same requests."""
        whole, queued, computed = (self._observed(names) for names in (E2EL, QUEUED, INFERENCE))
        return None if whole is None or queued is None or computed is None else max(0.0, whole - queued - computed)

    def _running_limit(self) -> float | None:
        """A limit is reached by a scheduled step; those that finish in it, a Poisson number, have left at the scrape that follows."""
        running = [total(scrape, RUNNING) or 0.0 for scrape in self._busy if (total(scrape, WAITING) or 0.0) >= 1]
        if len(running) < _LIMIT_SCRAPES:
            return None
        limit, outputs, usage = max(running), self._observed(OUTPUTS), self._gauge(KV_USAGE)
        has_room = usage and max(usage) < _LIMIT_USAGE
        finish = limit / outputs if outputs and has_room else 0.0
        gone = max(1.0, finish + _LIMIT_DEVIATIONS * sqrt(finish))
        if gone > max(1.0, _LIMIT_GONE * limit):
            # So many finish in a step that any number of running requests would do.
            return None
        reached = sum(limit - each <= gone for each in running)
        return limit if reached >= _LIMIT_SHARE * len(running) else None

    def _rate(self, names: tuple[str, ...]) -> float | None:
        """The increase of a counter a second."""
        if len(self._scrapes) == 1 or not self._elapsed_s or not isfinite(self._elapsed_s):
            return None
        counted = self._counted(names)
        return None if counted is None else counted / self._elapsed_s

    def _histogram(self, names: tuple[str, ...]) -> Histogram | None:
        """The distribution of a histogram; None if it is absent or has observed nothing."""
        mean = self._observed(names)
        buckets = tuple(f"{name}_bucket" for name in names)
        counts = _buckets(self._scrapes[-1], buckets)
        if len(self._scrapes) > 1:
            before = _buckets(self._scrapes[0], buckets)
            counts = {bound: count - before.get(bound, 0.0) for bound, count in counts.items()}
        total = max(counts.values(), default=0.0)
        bounds = sorted(bound for bound in counts if isfinite(bound))
        if mean is None or total <= 0 or not bounds:
            return None
        return Histogram(total, mean, tuple(bounds), tuple(counts[bound] / total for bound in bounds))


def _buckets(scrape: Samples, names: tuple[str, ...]) -> dict[float, float]:
    """The cumulative counts of a histogram by their bounds, over all other labels."""
    found: dict[float, float] = {}
    for (name, labels), value in scrape.items():
        bound = number(dict(labels).get("le", ""))
        if name in names and bound is not None and isfinite(value):
            found[bound] = found.get(bound, 0.0) + value
    return found


def _mean(values: list[float]) -> float | None:
    return fsum(values) / len(values) if values else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None


def _accepted(samples: Samples) -> dict[int, float]:
    """Accepted drafts by place, of all engines."""
    found: dict[int, float] = {}
    for (name, labels), value in samples.items():
        place = dict(labels).get("position", "")
        if name in ACCEPTED and place.isdecimal():
            found[int(place)] = found.get(int(place), 0.0) + value
    return found
