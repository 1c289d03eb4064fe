"""The load of a diagnosis, from what is known of it, and its draws.

    benchmark, probe, trace   its requests; draws are blocks of consecutive requests with their gaps, as of a plan
    given lengths             requests drawn with them (``traces.synthesis.random_load``)
    metrics                   clients that wait for answers or not (``measured.loop``); lengths drawn from the server's histograms
    nothing                   ShareGPT lengths, at a share of the rate that the replica serves when requests always wait;
                              as many requests as that takes are sent at once, whatever the size of a draw

Requests with known contents keep their order, and a draw has other gaps. Where the contents are unknown and the server found a
share of its tokens in the prefix cache, so large a share of every prompt is taken as one prefix that all have in common.
Users of a closed loop send drawn requests.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from pathlib import Path

import numpy as np

from ...sim import Settings
from ...sim.types import ticks
from ...sim.types.errors import MissingSetting, SettingError, UserError
from ...sim.types.optional import not_none
from ...sim.workload.content import PromptContent
from ...sim.workload.workload import Workload
from ...traces import (
    Pacing,
    Reading,
    Trace,
    check_fits,
    measured,
    read,
    read_with_content,
    stream,
    synthetic_pairs,
    users,
    workload,
)
from ...traces.arrivals.pacing import at_rate, unit_gaps
from ...traces.stats.stats import reused
from ...traces.synthesis.random_load import RandomLoad
from ..capacity.load import drawn_rows, taken, traced_gaps_s
from ..measured.server_metrics import Histogram, ServerMetrics
from ..runs.inputs import DATASETS, DEFAULT_DATASET, say_start
from ..runs.slo_check import saturated_rate

#: Requests that lengths are drawn from, where no file has requests.
_POOL = 5000
#: Share of the running requests that wait, from which on the metrics are those of a server that never catches up.
_BEHIND = 0.1
#: Share of the saturated rate that is taken where nothing is known of the load.
ASSUMED_SHARE = 0.8
#: Requests that are sent at once to find the saturated rate: at first, and at most.
_FIRST_AT_ONCE, _MOST_AT_ONCE = 4096, 1 << 18
#: Least hit rate that says that prompts have something in common.
_SHARED = 0.01


@dataclass(frozen=True, eq=False)
class ServedLoad:
    """Requests that can be drawn anew for every seed.

    Attributes:
        trace: All known requests, with arrivals if gaps are drawn from them.
        rate: Requests/s of Poisson arrivals; None takes the gaps of the trace.
        max_concurrency: Users of a closed loop; None for arrivals that do not depend on the server.
        num_prompts: Requests of a draw.
        origin: Where it comes from, for the report.
        assumed: Whether it is a guess.
        think_s: Mean seconds between an answer and the user's next request, exponentially distributed.
        shares_nothing: Whether prompts are given to have nothing in common.
        share: Share of the requests that reach the server: they come at so much of the rate, or of so many of the users.
    """

    trace: Trace
    rate: float | None
    max_concurrency: int | None
    num_prompts: int
    origin: str
    assumed: bool = False
    think_s: float = 0.0
    shares_nothing: bool = False
    share: float = 1.0

    @property
    def knows_contents(self) -> bool:
        """Whether it is known which prompts have something in common."""
        return self.trace.content is not None

    @property
    def shared(self) -> float:
        """Share of the prompt tokens of a draw with known contents that earlier prompts have."""
        trace = self.trace.first(min(self.num_prompts, len(self.trace)))
        found = reused(trace)
        return 0.0 if found is None else int(found.tokens.sum()) / int(trace.prompt_tokens.sum())

    @property
    def mean_tokens(self) -> tuple[float, float]:
        """Mean prompt and output tokens."""
        return float(self.trace.prompt_tokens.mean()), float(self.trace.output_tokens.mean())

    def work(self, seed: int) -> Workload:
        """The requests of a seed."""
        rng, n = stream(seed, "diagnosed requests"), self.num_prompts
        if self.trace.content is not None:
            n, trace, rows = min(n, len(self.trace)), self.trace.first(min(n, len(self.trace))), None
        else:
            rows = drawn_rows(len(self.trace), n, self.rate is None and self.max_concurrency is None, rng)
            trace = taken(self.trace, rows)
        if self.max_concurrency is not None:
            arrived = replace(trace, arrival_ticks=np.zeros(n, dtype=np.int64))
            concurrency = max(1, round(self.share * self.max_concurrency))
            clients = Pacing(max_concurrency=concurrency, think_time=self.think_s)
            return workload(arrived, users=users(clients, arrived, seed))
        if self.rate is None and rows is not None:
            gaps_s = traced_gaps_s(self.trace)[rows] / self.share
            arrivals = np.rint(np.cumsum(gaps_s) * 1e9).astype(np.int64) * (ticks.PER_SECOND // 10**9)
        else:
            arrivals = at_rate(self.mean_rate, unit_gaps(n, 1.0, stream(seed, "arrivals")))
        return workload(replace(trace, arrival_ticks=arrivals))

    @property
    def mean_rate(self) -> float:
        """Requests/s of arrivals that do not wait for answers; infinite if all arrive at once."""
        if self.rate is not None:
            return self.share * self.rate
        mean_s = float(traced_gaps_s(self.trace).mean())
        return self.share / mean_s if mean_s else inf


@dataclass(frozen=True)
class Sources:
    """What the user has of the load.

    Attributes:
        bench, probe, trace: Files with requests.
        random: Requests of given lengths; None without any.
        pacing: How requests arrive: a rate, users, or neither.
        num_prompts: Requests of a draw.
        reading: How to read ``trace``.

    Raises:
        SettingError: There are several files or arrivals, or a number cannot be.
    """

    bench: Path | None
    probe: Path | None
    trace: Path | None
    random: RandomLoad | None
    pacing: Pacing
    num_prompts: int
    reading: Reading = Reading()

    def __post_init__(self) -> None:
        """Refuse several files, several arrivals, and numbers that cannot be."""
        rate, clients = self.request_rate, self.max_concurrency
        if rate is not None and not rate > 0:
            raise SettingError("request_rate", rate, "must be above 0")
        if rate is not None and clients is not None:
            with self.pacing.names_as_given():
                raise SettingError("max_concurrency", clients, "excludes a request rate; give one of them")
        if self.pacing.think_time is not None and clients is None:
            remedy = "applies only to users; give their number as users"
            raise SettingError("think_time", self.pacing.think_time, remedy)
        if len(self._files) > 1:
            (first, _), (name, path), *_ = self._files
            raise SettingError(name, str(path), f"both it and {first} have the requests; give one of them")
        if self._files and self.random is not None:
            name, path = self._files[0]
            raise SettingError(name, str(path), "has the requests, and their lengths are given, too; give one of them")

    @property
    def request_rate(self) -> float | None:
        """Requests/s as given; None without it."""
        return self.pacing.rate

    @property
    def max_concurrency(self) -> int | None:
        """Users of a closed loop as given; None without them."""
        return self.pacing.concurrency

    @property
    def think_s(self) -> float:
        """Mean think time of given users, in seconds."""
        return self.pacing.think_time or 0.0

    @property
    def _files(self) -> list[tuple[str, Path]]:
        return [(name, path) for name in ("bench", "probe", "trace") if (path := getattr(self, name)) is not None]

    @property
    def file(self) -> tuple[str, Path] | None:
        """The flag of the file with requests, and the file; None without one."""
        return self._files[0] if self._files else None


def served_load(sources: Sources, metrics: ServerMetrics | None, served: Settings) -> ServedLoad:
    """The load from whatever is known of it.

    Args:
        served: Settings of the replica as it serves.

    Raises:
        UserError: A file cannot be read, or nothing says how requests arrive.
    """
    found = sources.file
    if found is not None:
        load = _of_file(*found, sources)
        check_fits(load.trace, not_none(served.max_model_len), found[1])
    elif metrics is not None and sources.random is None:
        load = _of_metrics(metrics, sources, served)
    else:
        load = _assumed(metrics, sources, served)
    if metrics is not None and metrics.hit_rate and metrics.hit_rate >= _SHARED and not load.knows_contents:
        origin = f"{load.origin}; {metrics.hit_rate:.0%} of each prompt as one common prefix, by the measured hit rate"
        load = replace(load, trace=_with_prefix(load.trace, metrics.hit_rate), origin=origin)
    return load


def _of_file(kind: str, path: Path, sources: Sources) -> ServedLoad:
    trace = read(path) if kind == "bench" else read_with_content(path, sources.reading)
    if kind == "trace":
        say_start(trace, path)
    clients, rate = sources.max_concurrency, sources.request_rate
    if kind == "bench" and rate is None and clients is None:
        seen = measured(path, trace)
        clients = seen.max_concurrency
        rate = seen.request_rate if trace.arrival_ticks is None else None
    elif rate is None and clients is None:
        clients = trace.max_concurrency
    if trace.arrival_ticks is None and rate is None and clients is None:
        raise SettingError(kind, str(path), "has no arrivals; give --request-rate or --max-concurrency as well")
    origin = f"{len(trace):,} requests of {path.name}"
    return ServedLoad(trace, rate, clients, sources.num_prompts, origin, think_s=sources.think_s)


def _of_metrics(metrics: ServerMetrics, sources: Sources, served: Settings) -> ServedLoad:
    """Lengths of the finished requests, sent as the server's clients send them."""
    longest, rng = not_none(served.max_model_len), stream(0, "diagnosed lengths")
    lengths = "lengths by the server's histograms"
    if metrics.prompts is not None and metrics.outputs is not None:
        prompts, outputs = (_drawn_lengths(each, rng, longest) for each in (metrics.prompts, metrics.outputs))
    elif (scaled := _by_throughput(metrics, served, longest)) is not None:
        prompts, outputs = scaled
        means = f"{prompts.mean():,.0f} and {outputs.mean():,.0f}"
        lengths = f"lengths of ShareGPT's shape with means of {means} tokens, which the measured tokens/s and the use of the KV cache imply"
    else:
        remedy = "have no histograms of request lengths, and neither tokens/s nor the use of the KV cache"
        raise UserError(f"the server's readings {remedy}; give --bench, --probe or --trace as well")
    prompts = np.minimum(prompts, longest - 1)
    trace = Trace("metrics", prompts, np.minimum(outputs, longest - prompts))
    rate, clients, why = sources.request_rate, sources.max_concurrency, ""
    if rate is None and clients is None:
        if metrics.finished is None and metrics.output_rate and metrics.elapsed_s:
            metrics = replace(metrics, arrival_rate=metrics.output_rate / float(trace.output_tokens.mean()))
        rate, clients, why = _clients(metrics)
    origin = f"{lengths}, {_sent(rate, clients, metrics)}{why}"
    return ServedLoad(trace, rate, clients, sources.num_prompts, origin, think_s=sources.think_s)


def _by_throughput(metrics: ServerMetrics, served: Settings, longest: int) -> tuple[np.ndarray, np.ndarray] | None:
    """Prompts and outputs, int64, of ShareGPT's shape scaled by two factors; None where the readings lack what gives them.

    A request holds its prompt and half of its output in the mean over its own time, and long outputs are in flight for longer: with
    outputs o and prompts p the mean over those that run is a sum(op) / sum(o) + b sum(oo) / (2 sum(o)), where a and b are the factors.
    That is the use of the KV cache over the requests that run. Prompt over output tokens/s is a sum(p) / (b sum(o)).
    """
    usage, running, pool = metrics.kv_usage, metrics.running, served.num_gpu_blocks_override
    if usage is None or not running or not pool or not metrics.prompt_rate or not metrics.output_rate:
        return None
    pairs = synthetic_pairs(DATASETS[DEFAULT_DATASET], _POOL, 0, longest)
    prompts, outputs = (each.astype(np.float64) for each in (pairs.prompt_tokens, pairs.output_tokens))
    held = usage[0] * pool * not_none(served.block_size) / running
    ratio = metrics.prompt_rate / metrics.output_rate
    # a = ratio * b * sum(o) / sum(p).
    of_prompts = ratio * float(prompts @ outputs) / prompts.sum()
    b = held / (of_prompts + float(outputs @ outputs) / (2 * outputs.sum()))
    a = ratio * b * outputs.sum() / prompts.sum()
    return tuple(
        np.clip(np.rint(each * factor), 1, longest).astype(np.int64) for each, factor in ((prompts, a), (outputs, b))
    )


def _sent(rate: float | None, clients: int | None, metrics: ServerMetrics) -> str:
    how = f"{clients:,} requests in flight" if clients else f"{rate:.3g} requests/s"
    of = "" if metrics.engine is None else f", of engine {metrics.engine}, the busiest of {metrics.num_engines}"
    return f"{how}{of}"


def _clients(metrics: ServerMetrics) -> tuple[float | None, int | None, str]:
    """The rate of clients that do not wait for answers, or the users of a closed loop, and why.

    Where the metrics do not tell, a server behind its load is taken for one with a closed loop of as many requests as are in it: the
    rate at which it finishes them is its own, and without times that of its clients is not known.
    """
    loop = metrics.loop
    if loop is not None and loop.kind == "open" and loop.arrival_rate:
        return loop.arrival_rate, None, f", of clients that do not wait for answers: {loop.reason}"
    if loop is not None and loop.kind == "closed" and loop.in_flight:
        return None, max(1, round(loop.in_flight)), f", of clients that wait for answers: {loop.reason}"
    unknown = "" if loop is None else f"; the metrics do not say whether clients wait for answers: {loop.reason}"
    running, waiting, rate = metrics.running or 0.0, metrics.waiting or 0.0, metrics.arrival_rate
    if waiting > _BEHIND * running:
        otherwise = f" (if they do not: --request-rate {rate:.3g})" if rate else ""
        return None, max(1, round(running + waiting)), f", of clients that wait for answers{otherwise}{unknown}"
    if not rate and metrics.elapsed_s and metrics.finished:
        rate = metrics.finished / metrics.elapsed_s
    elif not rate and metrics.e2el_s and running:
        # Little's law.
        rate = (running + waiting) / metrics.e2el_s
    if not rate:
        raise MissingSetting("request_rate", "is missing, and the metrics have no times and no latencies; give it")
    return rate, None, unknown


def _drawn_lengths(lengths: Histogram, rng: np.random.Generator, longest: int) -> np.ndarray:
    """Stratified lengths of a histogram, int64: even in the logarithm within a bucket, and scaled to the mean."""
    bounds = np.minimum(np.array([1.0, *lengths.bounds, longest]), longest)
    ranks = (rng.permutation(_POOL) + 0.5) / _POOL
    drawn = np.exp(np.interp(ranks, (0.0, *lengths.shares, 1.0), np.log(bounds)))
    return np.maximum(1, np.rint(drawn * lengths.mean / drawn.mean())).astype(np.int64)


def _assumed(metrics: ServerMetrics | None, sources: Sources, served: Settings) -> ServedLoad:
    """Requests of given lengths, or of ShareGPT's, at a given rate, as the server's clients send them, or at a share of the highest."""
    longest, random = not_none(served.max_model_len), sources.random
    if random is None:
        pairs = synthetic_pairs(DATASETS[DEFAULT_DATASET], _POOL, 0, longest)
        trace, lengths = Trace(DEFAULT_DATASET, pairs.prompt_tokens, pairs.output_tokens), "assumed: ShareGPT's lengths"
    else:
        trace = random.draw(max(_POOL, sources.num_prompts), 0, longest)
        lengths = f"as given: {trace.name}"
    rate, clients, how = sources.request_rate, sources.max_concurrency, f"{sources.pacing.in_words}, as given"
    if rate is None and clients is None and metrics is not None:
        rate, clients, why = _clients(metrics)
        how = f"{_sent(rate, clients, metrics)}, by the metrics{why}"
    is_assumed = rate is None and clients is None
    if is_assumed:
        rate = ASSUMED_SHARE * _saturated(served, trace)
        how = f"{rate:.3g} requests/s, {ASSUMED_SHARE:.0%} of what it serves at most"
    origin, assumed = f"{lengths}, {how}", random is None or is_assumed
    shares_nothing = random is not None and not random.prefix_len
    return ServedLoad(trace, rate, clients, sources.num_prompts, origin, assumed, sources.think_s, shares_nothing)


def _saturated(served: Settings, trace: Trace) -> float:
    """The highest rate that the replica serves, requests/s: twice as many requests at once, until they fill it."""
    count = _FIRST_AT_ONCE
    while count <= _MOST_AT_ONCE:
        if rate := saturated_rate(served, ServedLoad(trace, inf, None, count, "").work(0)):
            return rate
        count *= 2
    remedy = f"is missing, and {_MOST_AT_ONCE:,} requests at once do not fill the server; give it"
    raise MissingSetting("request_rate", remedy)


def _with_prefix(trace: Trace, share: float) -> Trace:
    tokens = np.maximum(1, np.rint(trace.prompt_tokens * min(share, 1.0))).astype(np.int64)
    ids = np.zeros(len(trace), dtype=np.int64)
    return replace(trace, content=PromptContent(np.arange(len(trace) + 1), ids, tokens))
