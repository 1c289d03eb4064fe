"""Metrics of a server from its ``/metrics`` endpoint, saved in a file: one scrape, or several in sequence.

A scrape ends where a series occurs a second time. Between scrapes a line may give the time as seconds since
1970 or as a date: the first and the last of them say how long the scrapes lasted. This command makes such a file:

    while sleep 1; do date +%s; curl -s localhost:8000/metrics; done > metrics.txt

OpenMetrics text with timestamps, as ``simulate --openmetrics`` writes it, has the samples of a family together instead, so that
a scrape is all samples of one time, in seconds. Such text ends with ``# EOF``. Timestamps of other text, which are in ms, are ignored.

Gauges are averaged over the scrapes in which a request runs or waits. Counters and histograms count from the first
scrape to the last, or from the server's start if there is only one scrape.

``read_served_load`` averages gauges over the scrapes while requests arrive. The requests that have arrived by a scrape are those that
have finished, run or wait. They arrive from the last scrape with as many as the first one to the first with as many as the last one,
so that neither the time before a benchmark nor the drain after its last request counts. ``loop`` says from the same scrapes whether
clients wait for answers.

SGLang's metrics are read by the same rules. Its pool is ``max_total_num_tokens`` blocks of one token, its prefix cache
``cached_tokens_total`` of ``prompt_tokens_total``; of several pipeline stages the first counts. llama.cpp's have requests in flight and, up
to releases of 2025, the use of the KV cache: no latencies, lengths or finished requests.

Names: vllm-project/vllm, vllm/v1/metrics/loggers.py, where the second of two is from older releases; sgl-project/sglang 0.5.23,
python/sglang/srt/observability/metrics_collector.py; ggml-org/llama.cpp, tools/server/server-context.cpp, and
examples/server/server.cpp for ``kv_cache_usage_ratio``.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from math import fsum, isfinite, sqrt
from os import PathLike
from typing import NamedTuple

from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ...sim.types.user_files import text_of
from .loop import Loop, Point, loop_of

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))?")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
#: Servers by the beginning of their metrics' names.
SERVERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}
#: The policies that simulate a server other than vLLM.
_POLICIES = {SGLANG: "sglang", LLAMA_CPP: "llama-cpp"}
_END = "# EOF"
RUNNING = ("vllm:num_requests_running", "sglang:num_running_reqs", "llamacpp:requests_processing")
WAITING = ("vllm:num_requests_waiting", "sglang:num_queue_reqs", "llamacpp:requests_deferred")
KV_USAGE = (
    "vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "sglang:token_usage", "llamacpp:kv_cache_usage_ratio",
)  # fmt: skip
PREEMPTIONS = ("vllm:num_preemptions_total", "sglang:num_retracted_requests_total")
QUERIES = ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total", "sglang:prompt_tokens_total")
HITS = ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total", "sglang:cached_tokens_total")
TTFT = ("vllm:time_to_first_token_seconds", "sglang:time_to_first_token_seconds")
ITL = (
    "vllm:inter_token_latency_seconds", "vllm:time_per_output_token_seconds", "sglang:inter_token_latency_seconds",
)  # fmt: skip
#: Of whole requests.
TPOT = ("vllm:request_time_per_output_token_seconds", "sglang:request_time_per_output_token_seconds")
E2EL = ("vllm:e2e_request_latency_seconds", "sglang:e2e_request_latency_seconds")
PROMPTS = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram")
OUTPUTS = ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram")
POOL_TOKENS = ("sglang:max_total_num_tokens",)
CONFIG = "vllm:cache_config_info"
_FINISHED = tuple(f"{name}_count" for name in E2EL)

#: Beginnings of the lines that are read.
READ = (*RUNNING, *WAITING, *KV_USAGE, *PREEMPTIONS, *QUERIES, *HITS, *POOL_TOKENS, CONFIG) + tuple(
    f"{name}_{part}"
    for name in (*TTFT, *ITL, *TPOT, *E2EL, *PROMPTS, *OUTPUTS)
    for part in ("sum", "count", "bucket")[: 2 if name in ITL else 3]
)
#: Label of a pipeline stage that is not the first.
_FOLLOWING_STAGE = re.compile(r'\bpp_rank="[1-9]')
#: Least scrapes with waiting requests that show a limit on those that run, and the share of them at which it is reached.
_LIMIT_SCRAPES, _LIMIT_SHARE = 3, 0.75
#: Standard deviations of the requests that finish in a step by which a scrape is below the limit that it reaches; and the use of the
#: KV cache from which on it may limit about as many.
_LIMIT_DEVIATIONS, _LIMIT_USAGE = 4.0, 0.9
#: Share of a limit by which a scrape may be below it.
_LIMIT_GONE = 0.25

Series = tuple[str, tuple[tuple[str, str], ...]]
Scrape = dict[Series, float]


class _Clock(NamedTuple):
    """A line with the time, in seconds since 1970."""

    line: int
    at_s: float


class _Sample(NamedTuple):
    """A line of the text.

    Attributes:
        at_s: Its timestamp, in seconds in OpenMetrics; None without one.
        clock: The last line with the time before it.
    """

    series: Series
    value: float
    at_s: float | None
    clock: _Clock | None


class _Scrape(NamedTuple):
    """The samples of one time, in seconds; None if the file does not have it."""

    at_s: float | None
    samples: Scrape


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
        elapsed_s: Seconds between the times of the first and the last scrape, if the file has them.
        finished: Requests that finished.
        prompts, outputs: Lengths of the finished requests.
        ttfts, tpots, e2els: Latencies of the requests, in seconds.
        arrival_rate: Requests/s that arrive while any do; only ``read_served_load`` has it, if the file has times.
        loop: Whether clients wait for answers; only ``read_served_load`` has it. Its rate and requests in flight are those of the engine.
        config: Labels of ``cache_config_info``.
        model_name: Label of the requests; None if they have several.
        most_in_flight: Most requests that run or wait at a scrape.
        engine, num_engines: Label of the engine that all is of, and the number of engines in the file, if there are several.
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


def server_of_policy(policy: str) -> str | None:
    """The server of ``SERVERS`` that a policy simulates, if it is one."""
    return next(
        (server for server, name in _POLICIES.items() if name == policy), VLLM if policy.startswith("vllm") else None
    )


def read_metrics(path: str | PathLike[str]) -> ServerMetrics:
    """The metrics in a file.

    Raises:
        UserError: The file cannot be read, has no metrics of ``SERVERS``, has metrics of several engines, or has a line that is
            no metric.
    """
    scrapes, elapsed_s = _read(path)
    engines = _engines(scrapes[-1].samples)
    if len(engines) > 1:
        remedy = "one is simulated; benchmark and scrape a server with --data-parallel-size 1"
        raise UserError(f"{path}: has metrics of {len(engines)} engines; {remedy}")
    return _Reader(path, scrapes).metrics(elapsed_s)


def read_served_load(path: str | PathLike[str], one_engine: bool = False) -> ServerMetrics:
    """The metrics of the busiest engine in a file, with gauges and the rate of arrivals while requests arrive.

    The busiest engine has the most requests in flight, summed over the scrapes.

    Args:
        one_engine: Refuse metrics of several engines.

    Raises:
        UserError: As ``read_metrics``, but several engines are refused only if that is asked for; or the server is not vLLM.
    """
    scrapes, elapsed_s = _read(path)
    if (server := _server(scrapes[0].samples)) != VLLM:
        remedy = f"compare it with a benchmark by validate --policy {_POLICIES[server]} --against FILE --metrics {path}"
        raise UserError(f"{path}: is metrics of {server}, not of the vLLM server that is diagnosed; {remedy}")
    engines = _engines(scrapes[-1].samples)
    if one_engine and len(engines) > 1:
        remedy = (
            "the requests of a file went to all of them; give the metrics alone, of which the busiest engine is taken"
        )
        raise UserError(f"{path}: has metrics of {len(engines)} engines; {remedy}")
    loop = loop_of(_points(scrapes))
    if len(engines) < 2:
        return replace(_Reader(path, scrapes, *_arriving(scrapes)).metrics(elapsed_s), loop=loop)
    of_engines = {engine: [_of_engine(scrape, engine) for scrape in scrapes] for engine in engines}
    # Of equally busy ones the first.
    engine = max(engines, key=lambda each: fsum(_in_flight(scrape.samples) for scrape in of_engines[each]))
    scrapes = of_engines[engine]
    found, own = _Reader(path, scrapes, *_arriving(scrapes)).metrics(elapsed_s), loop_of(_points(scrapes))
    # Clients choose no engine: only all requests in flight stay the same.
    loop = replace(loop, arrival_rate=own.arrival_rate, in_flight=own.in_flight)
    return replace(found, loop=loop, engine=engine, num_engines=len(engines))


def _read(path: str | PathLike[str]) -> tuple[list[_Scrape], float | None]:
    """The scrapes of a file, and the seconds from the first to the last if it has times."""
    text = text_of(path, "metrics")
    samples = list(_samples(path, text))
    if not samples:
        names = ", ".join(SERVERS.values())
        raise UserError(f"{path}: has no metrics of {names}; give the server's response from /metrics")
    if _END in text and any(sample.at_s is not None for sample in samples):
        by_time = _by_time(path, samples)
        return [_Scrape(at_s, scrape) for at_s, scrape in by_time.items()], max(by_time) - min(by_time)
    at_s = [time_s for line in text.splitlines() if (time_s := _time_s(line.strip())) is not None]
    return list(_scrapes(samples)), at_s[-1] - at_s[0] if len(at_s) > 1 else None


def _engines(scrape: Scrape) -> list[str]:
    """The labels of the engines, in order."""
    found = (_engine(labels) for name, labels in scrape if name in (*RUNNING, CONFIG))
    return sorted({each for each in found if each is not None}, key=lambda each: (len(each), each))


def _engine(labels: Iterable[tuple[str, str]]) -> str | None:
    """The engine of a series: vLLM's number of it, SGLang's data-parallel rank."""
    named = dict(labels)
    return named.get("engine", named.get("dp_rank"))


def _server(scrape: Scrape) -> str:
    """The server of a scrape, of which all series are."""
    return SERVERS[next(iter(scrape))[0].partition(":")[0]]


def _of_engine(scrape: _Scrape, engine: str) -> _Scrape:
    """The samples of an engine, and those without an engine."""
    own = {series: value for series, value in scrape.samples.items() if (_engine(series[1]) or engine) == engine}
    return scrape._replace(samples=own)


def _finished(scrape: Scrape) -> float:
    """Requests that have finished since the server started."""
    return _sum(scrape, _FINISHED) or 0.0


def _in_flight(scrape: Scrape) -> float:
    """Requests that run or wait."""
    return (_sum(scrape, RUNNING) or 0.0) + (_sum(scrape, WAITING) or 0.0)


def _arriving(scrapes: Sequence[_Scrape]) -> tuple[slice, float | None]:
    """The scrapes while requests arrive, and the requests/s that do; all of them if the file does not show arrivals."""
    arrived = [_finished(scrape.samples) + _in_flight(scrape.samples) for scrape in scrapes]
    if _sum(scrapes[-1].samples, _FINISHED) is None or arrived[-1] <= arrived[0]:
        return slice(None), None
    last = next(place for place, count in enumerate(arrived) if count >= arrived[-1])
    first = max(place for place, count in enumerate(arrived[:last]) if count <= arrived[0])
    timed = [place for place in range(first, last + 1) if scrapes[place].at_s is not None]
    if not timed:
        return slice(first, last + 1), None
    begin, end = timed[0], timed[-1]
    passed_s = not_none(scrapes[end].at_s) - not_none(scrapes[begin].at_s)
    rate = (arrived[end] - arrived[begin]) / passed_s if passed_s > 0 and isfinite(passed_s) else None
    return slice(first, last + 1), rate or None


def _points(scrapes: Sequence[_Scrape]) -> list[Point]:
    """The scrapes with a time while requests arrive; none if the file does not show arrivals."""
    while_arriving, _ = _arriving(scrapes)
    return [
        Point(scrape.at_s, _finished(scrape.samples), _in_flight(scrape.samples))
        for scrape in scrapes[while_arriving]
        if scrape.at_s is not None
    ]


def kv_usage_over_time(path: str | PathLike[str]) -> list[tuple[float, float]]:
    """Seconds since 1970, and share of the pool in use, of each scrape after a line with its time.

    Raises:
        UserError: The file cannot be read.
    """
    found: list[tuple[float, float]] = []
    time_s: float | None = None
    for line in text_of(path, "metrics").splitlines():
        if (number := _number(line)) is not None:
            time_s = number
        elif time_s is not None and (sample := _SAMPLE.fullmatch(line)) and sample[1] in KV_USAGE:
            found.append((time_s, float(sample[3])))
            time_s = None
    return found


def _samples(path: str | PathLike[str], text: str) -> Iterator[_Sample]:
    """The samples of one server, that of the first one, in order."""
    clock, server = None, None
    # A scrape repeats the series of the one before it.
    series: dict[tuple[str, str | None], Series] = {}
    for number, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        # No sample is a time: it begins with a letter, and has a space.
        found = _SAMPLE.fullmatch(line)
        if found is None and (time_s := _time_s(line)) is not None:
            clock = _Clock(number, time_s)
            continue
        value = None if found is None else _number(found[3])
        if found is None or value is None:
            remedy = "is not a metric; give the server's response from /metrics"
            raise UserError(f"{path}, line {number}: {line[:60]!r}: {remedy}")
        name, labels, _, at = found.groups()
        begin = name.partition(":")[0]
        if begin in SERVERS and begin == (server := server or begin) and not _FOLLOWING_STAGE.search(labels or ""):
            if (known := series.get((name, labels))) is None:
                known = series[name, labels] = (name, tuple(_LABEL.findall(labels or "")))
            yield _Sample(known, value, None if at is None else float(at), clock)


def _scrapes(samples: Iterable[_Sample]) -> Iterator[_Scrape]:
    """Scrapes in sequence: each ends where a series occurs again. The time of one is that of a line since the one before."""
    scrape: Scrape = {}
    clock, seen = None, None
    for series, value, _, last in samples:
        if series in scrape:
            yield _Scrape(clock, scrape)
            scrape = {}
        if not scrape:
            clock, seen = None if last is seen or last is None else last.at_s, last
        scrape[series] = value
    if scrape:
        yield _Scrape(clock, scrape)


def _by_time(path: str | PathLike[str], samples: Iterable[_Sample]) -> dict[float, Scrape]:
    """The scrape of each timestamp, in order of time."""
    found: dict[float, Scrape] = {}
    for (name, labels), value, at_s, _ in samples:
        if at_s is None:
            raise UserError(f"{path}: {name} has no timestamp, and others have; give all of them one, or none")
        scrape = found.setdefault(at_s, {})
        if (name, labels) in scrape:
            raise UserError(f"{path}: {name} has two values at {at_s:g} s; give the metrics of one run")
        scrape[name, labels] = value
    return dict(sorted(found.items()))


def _time_s(line: str) -> float | None:
    """The time that a line between scrapes gives, in seconds since 1970; None for other lines."""
    if (number := _number(line)) is not None:
        return number
    try:
        return datetime.fromisoformat(line).timestamp()
    except (ValueError, OverflowError):
        return None


def _number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class _Reader:
    """Reads metrics from scrapes, under current and older names."""

    def __init__(
        self,
        path: str | PathLike[str],
        scrapes: Sequence[_Scrape],
        arriving: slice = slice(None),
        arrival_rate: float | None = None,
    ) -> None:
        self._path, self._scrapes, self._arrival_rate = path, [scrape.samples for scrape in scrapes], arrival_rate
        self._busy = [scrape for scrape in self._scrapes[arriving] if _in_flight(scrape) > 0]

    def metrics(self, elapsed_s: float | None) -> ServerMetrics:
        """The metrics over all scrapes, which are so many seconds apart from first to last."""
        usage, config, (num_blocks, block_size) = self._gauge(KV_USAGE), self._config(), self._pool()
        queries, hits = self._counted(QUERIES), self._counted(HITS)
        return ServerMetrics(
            num_scrapes=len(self._scrapes),
            server=_server(self._scrapes[-1]),
            num_gpu_blocks=num_blocks,
            block_size=block_size,
            kv_usage=(not_none(_mean(usage)), max(usage)) if usage else None,
            running=_mean(self._gauge(RUNNING)),
            waiting=_mean(self._gauge(WAITING)),
            running_limit=self._running_limit(),
            preemptions=self._counted(PREEMPTIONS),
            hit_rate=hits / queries if hits is not None and queries else None,
            first_tokens=self._counted(tuple(f"{name}_count" for name in TTFT)),
            ttft_s=self._observed(TTFT),
            itl_s=self._observed(ITL),
            e2el_s=self._observed(E2EL),
            elapsed_s=elapsed_s if elapsed_s and isfinite(elapsed_s) else None,
            finished=self._counted(_FINISHED),
            prompts=self._histogram(PROMPTS),
            outputs=self._histogram(OUTPUTS),
            ttfts=self._histogram(TTFT),
            tpots=self._histogram(TPOT),
            e2els=self._histogram(E2EL),
            arrival_rate=self._arrival_rate,
            config=config,
            model_name=self._model_name(),
            most_in_flight=max(map(_in_flight, self._scrapes)) or None,
        )

    def _model_name(self) -> str | None:
        names = {dict(labels).get("model_name") for name, labels in self._scrapes[-1] if name in RUNNING}
        return names.pop() if len(names) == 1 else None

    def _config(self) -> Mapping[str, str]:
        return next((dict(labels) for name, labels in self._scrapes[-1] if name == CONFIG), {})

    def _pool(self) -> tuple[int | None, int | None]:
        """Blocks of the KV cache, and tokens of one; None where the metrics do not have it."""
        tokens = _sum(self._scrapes[-1], POOL_TOKENS)
        if tokens is not None:
            # The simulated tree has pages of one token, whatever the server's are.
            return int(tokens), 1
        config = self._config()
        return _whole(config.get("num_gpu_blocks")), _whole(config.get("block_size"))

    def _gauge(self, names: tuple[str, ...]) -> list[float]:
        values = (_sum(scrape, names) for scrape in self._busy)
        return [value for value in values if value is not None]

    def _counted(self, names: tuple[str, ...]) -> float | None:
        """The increase of a counter."""
        last = _sum(self._scrapes[-1], names)
        if last is None or len(self._scrapes) == 1:
            return last
        first = _sum(self._scrapes[0], names) or 0.0
        if first > last:
            remedy = "the server was restarted between scrapes; keep those of one benchmark"
            raise UserError(f"{self._path}: {names[0]} falls from {first:g} to {last:g}; {remedy}")
        return last - first

    def _observed(self, names: tuple[str, ...]) -> float | None:
        """Mean of a histogram's observations."""
        total, count = (self._counted(tuple(f"{name}_{part}" for name in names)) for part in ("sum", "count"))
        return total / count if total is not None and count else None

    def _running_limit(self) -> float | None:
        """A limit is reached by a scheduled step; those that finish in it, a Poisson number, have left at the scrape that follows."""
        running = [_sum(scrape, RUNNING) or 0.0 for scrape in self._busy if (_sum(scrape, WAITING) or 0.0) >= 1]
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


def _buckets(scrape: Scrape, names: tuple[str, ...]) -> dict[float, float]:
    """The cumulative counts of a histogram by their bounds, over all other labels."""
    found: dict[float, float] = {}
    for (name, labels), value in scrape.items():
        bound = _number(dict(labels).get("le", ""))
        if name in names and bound is not None and isfinite(value):
            found[bound] = found.get(bound, 0.0) + value
    return found


def _sum(scrape: Scrape, names: tuple[str, ...]) -> float | None:
    """The sum over all labels of the first name that is present; values that are not numbers are skipped."""
    for wanted in names:
        values = [value for (name, _), value in scrape.items() if name == wanted and isfinite(value)]
        if values:
            return fsum(values)
    return None


def _mean(values: list[float]) -> float | None:
    return fsum(values) / len(values) if values else None


def _whole(text: str | None) -> int | None:
    return int(text) if text is not None and text.isdecimal() and int(text) > 0 else None
