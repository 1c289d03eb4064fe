"""Readings of a server: at each time the samples of its metrics, whatever says them.

    /metrics, saved or fetched          each response is a reading                                   ``readings_of``
    OpenMetrics text with timestamps    all samples of one time                                      ``readings_of``
    Prometheus                          an answer of /api/v1/query_range                             ``prometheus``
    the engine's log                    its periodic lines, as samples of the same names             ``server_log``

All doors end here, and all that is known of a server's metrics (``server_metrics``, ``loop``) is worked out from here.

A saved file is one scrape, or several in sequence. A scrape ends where a series occurs a second time. Between scrapes a line may give
the time as seconds since 1970 or as a date: the first and the last of them say how long the scrapes lasted. This command makes such a file:

    while sleep 1; do date +%s; curl -s localhost:8000/metrics; done > metrics.txt

OpenMetrics text with timestamps, as ``simulate --openmetrics`` writes it, has the samples of a family together instead, so that
a scrape is all samples of one time, in seconds. Such text ends with ``# EOF``. Timestamps of other text, which are in ms, are ignored.

Names: vllm-project/vllm, vllm/v1/metrics/loggers.py, where the second of two is from older releases; sgl-project/sglang 0.5.23,
python/sglang/srt/observability/metrics_collector.py; ggml-org/llama.cpp, tools/server/server-context.cpp, and
examples/server/server.cpp for ``kv_cache_usage_ratio``. Ray Serve writes vLLM's with an underscore for the colon, behind ``ray_``
(vllm/v1/metrics/ray_wrappers.py): they are read as vLLM's.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from math import fsum, isfinite
from os import PathLike
from typing import NamedTuple

from ...sim.types.errors import UserError
from ...sim.types.optional import not_none
from ...sim.types.user_files import text_of
from .loop import Point

_SAMPLE = re.compile(r"([a-zA-Z_:][\w:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+(?:\.\d*)?(?:[eE][-+]?\d+)?))?")
#: A name with an underscore for its colon, which Ray and OpenTelemetry do not take.
_RENAMED = re.compile(r"(?:ray_)?(vllm|sglang)_(\w+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
VLLM, SGLANG, LLAMA_CPP = "vLLM", "SGLang", "llama.cpp"
#: Servers by the beginning of their metrics' names.
SERVERS = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMA_CPP}
#: The policies that simulate a server other than vLLM.
POLICIES = {SGLANG: "sglang", LLAMA_CPP: "llama-cpp"}
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
#: Of the same requests in the engine: from its queue to their first step, and from there to the last token.
QUEUED, INFERENCE = ("vllm:request_queue_time_seconds",), ("vllm:request_inference_time_seconds",)
PROMPTS = ("vllm:request_prompt_tokens", "sglang:prompt_tokens_histogram")
OUTPUTS = ("vllm:request_generation_tokens", "sglang:generation_tokens_histogram")
PROMPT_TOKENS = ("vllm:prompt_tokens_total", "sglang:prompt_tokens_total")
GENERATION_TOKENS = ("vllm:generation_tokens_total", "sglang:generation_tokens_total")
#: Prompt tokens by where their KV comes from (label ``source``), and the value of those that another server has computed.
SOURCES, TRANSFERRED = "vllm:prompt_tokens_by_source_total", "external_kv_transfer"
#: Of the last requests, where there is no counter.
HIT_RATE = ("vllm:gpu_prefix_cache_hit_rate", "sglang:cache_hit_rate")
POOL_TOKENS = ("sglang:max_total_num_tokens",)
CONFIG = "vllm:cache_config_info"
#: Steps of a sequence with drafts, and the drafts accepted at each place of them (label ``position``).
DRAFTS, ACCEPTED = ("vllm:spec_decode_num_drafts_total",), ("vllm:spec_decode_num_accepted_tokens_per_pos_total",)
FINISHED = tuple(f"{name}_count" for name in E2EL)
#: Counters that fall if a server is restarted.
COUNTERS = frozenset(
    (*FINISHED, *PREEMPTIONS, *QUERIES, *HITS, *PROMPT_TOKENS, *GENERATION_TOKENS, *DRAFTS, *ACCEPTED, SOURCES)
)

#: Beginnings of the lines that are read.
READ = (*RUNNING, *WAITING, *KV_USAGE, *sorted(COUNTERS), *HIT_RATE, *POOL_TOKENS, CONFIG) + tuple(
    f"{name}_{part}"
    for name in (*TTFT, *ITL, *TPOT, *E2EL, *QUEUED, *INFERENCE, *PROMPTS, *OUTPUTS)
    for part in ("sum", "count", "bucket")[: 2 if name in (*ITL, *QUEUED, *INFERENCE) else 3]
)
#: Labels that name one of several servers, the plainest first.
_REPLICAS = ("pod", "ReplicaId", "instance")
#: Label of a pipeline stage that is not the first.
_FOLLOWING_STAGE = re.compile(r'\bpp_rank="[1-9]')


Series = tuple[str, tuple[tuple[str, str], ...]]
Samples = dict[Series, float]


class Clock(NamedTuple):
    """A line with the time, in seconds since 1970."""

    line: int
    at_s: float


class Sample(NamedTuple):
    """A line of the text.

    Attributes:
        at_s: Its timestamp, in seconds in OpenMetrics; None without one.
        clock: The last line with the time before it.
    """

    series: Series
    value: float
    at_s: float | None
    clock: Clock | None


class Scrape(NamedTuple):
    """The samples of one time, in seconds; None if the file does not have it."""

    at_s: float | None
    samples: Samples


@dataclass(frozen=True)
class Readings:
    """The readings of a server in order of time.

    Attributes:
        source: What they are of, for messages: a file or an address.
        scrapes: One or more.
        elapsed_s: Seconds between the first and the last time, if there are two.
    """

    source: str
    scrapes: Sequence[Scrape]
    elapsed_s: float | None


def read_scrapes(path: str | PathLike[str]) -> Readings:
    """The scrapes in a file.

    Raises:
        UserError: The file cannot be read, has no metrics of ``SERVERS``, or has a line that is no metric.
    """
    return readings_of(str(path), text_of(path, "metrics"))


def readings_of(source: str, text: str) -> Readings:
    """The scrapes in a text, and the seconds from the first to the last if it has times.

    Raises:
        UserError: As ``read_scrapes``.
    """
    samples = list(_samples(source, text))
    if not samples:
        names = ", ".join(SERVERS.values())
        raise UserError(f"{source}: has no metrics of {names}; give the server's response from /metrics")
    if _END in text and any(sample.at_s is not None for sample in samples):
        return timed(source, _by_time(source, samples))
    at_s = [time_s for line in text.splitlines() if (time_s := _time_s(line.strip())) is not None]
    return Readings(source, list(scrapes_of(samples)), at_s[-1] - at_s[0] if len(at_s) > 1 else None)


def timed(source: str, by_time: Mapping[float, Samples]) -> Readings:
    """The readings of samples by their times, in seconds."""
    scrapes = [Scrape(at_s, by_time[at_s]) for at_s in sorted(by_time)]
    return Readings(source, scrapes, max(by_time) - min(by_time))


def canonical(name: str) -> str:
    """The name of a metric as the server itself writes it: ``vllm:x`` for Ray's ``ray_vllm_x``."""
    found = _RENAMED.fullmatch(name)
    return name if found is None else f"{found[1]}:{found[2]}"


def engines_of(scrape: Samples) -> list[str]:
    """The labels of the engines, in order."""
    found = (_engine(labels) for name, labels in scrape if name in (*RUNNING, CONFIG))
    return sorted({each for each in found if each is not None}, key=lambda each: (len(each), each))


def _engine(labels: Iterable[tuple[str, str]]) -> str | None:
    """The engine of a series: vLLM's number of it, SGLang's data-parallel rank; behind the replica where Prometheus has several."""
    named = dict(labels)
    engine, replica = named.get("engine", named.get("dp_rank")), replica_of(named)
    return "/".join(filter(None, (replica, engine))) or None


def replica_of(named: Mapping[str, str]) -> str | None:
    """The server of a series by the labels that Kubernetes, Ray and Prometheus add; None without any."""
    return next((named[label] for label in _REPLICAS if named.get(label)), None)


def server_of(scrape: Samples) -> str:
    """The server of a scrape, of which all series are."""
    return SERVERS[next(iter(scrape))[0].partition(":")[0]]


def of_engine(scrape: Scrape, engine: str) -> Scrape:
    """The samples of an engine, and those without an engine."""
    own = {series: value for series, value in scrape.samples.items() if (_engine(series[1]) or engine) == engine}
    return scrape._replace(samples=own)


def of_replica(scrape: Samples, name: str) -> Samples:
    """The samples of a server, which get its name as Prometheus gives it."""
    return {(metric, (*labels, ("instance", name))): value for (metric, labels), value in scrape.items()}


def replicas_of(scrape: Samples) -> int:
    """Number of servers, at least 1."""
    return len({replica_of(dict(labels)) for name, labels in scrape if name in RUNNING}) or 1


def finished(scrape: Samples) -> float:
    """Requests that have finished since the server started."""
    return total(scrape, FINISHED) or 0.0


def in_flight(scrape: Samples) -> float:
    """Requests that run or wait."""
    return (total(scrape, RUNNING) or 0.0) + (total(scrape, WAITING) or 0.0)


def arriving(scrapes: Sequence[Scrape]) -> tuple[slice, float | None]:
    """The scrapes while requests arrive, and the requests/s that do; all of them if the file does not show arrivals."""
    arrived = [finished(scrape.samples) + in_flight(scrape.samples) for scrape in scrapes]
    if total(scrapes[-1].samples, FINISHED) is None or arrived[-1] <= arrived[0]:
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


def points(scrapes: Sequence[Scrape]) -> list[Point]:
    """The scrapes with a time while requests arrive; none if the file does not show arrivals."""
    while_arriving, _ = arriving(scrapes)
    return [
        Point(scrape.at_s, finished(scrape.samples), in_flight(scrape.samples))
        for scrape in scrapes[while_arriving]
        if scrape.at_s is not None
    ]


def total(scrape: Samples, names: tuple[str, ...]) -> float | None:
    """The sum over all labels of the first name that is present; values that are not numbers are skipped."""
    for wanted in names:
        values = [value for (name, _), value in scrape.items() if name == wanted and isfinite(value)]
        if values:
            return fsum(values)
    return None


def _samples(path: str | PathLike[str], text: str) -> Iterator[Sample]:
    """The samples of one server, that of the first one, in order."""
    clock, server = None, None
    # A scrape repeats the series of the one before it.
    series: dict[tuple[str, str | None], Series] = {}
    for place, line in enumerate(text.splitlines(), 1):
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        # No sample is a time: it begins with a letter, and has a space.
        found = _SAMPLE.fullmatch(line)
        if found is None and (time_s := _time_s(line)) is not None:
            clock = Clock(place, time_s)
            continue
        value = None if found is None else number(found[3])
        if found is None or value is None:
            remedy = "is not a metric; give the server's response from /metrics"
            raise UserError(f"{path}, line {place}: {line[:60]!r}: {remedy}")
        name, labels, _, at = found.groups()
        name = canonical(name)
        begin = name.partition(":")[0]
        if begin in SERVERS and begin == (server := server or begin) and not _FOLLOWING_STAGE.search(labels or ""):
            if (known := series.get((name, labels))) is None:
                known = series[name, labels] = (name, tuple(_LABEL.findall(labels or "")))
            yield Sample(known, value, None if at is None else float(at), clock)


def scrapes_of(samples: Iterable[Sample]) -> Iterator[Scrape]:
    """Scrapes in sequence: each ends where a series occurs again. The time of one is that of a line since the one before."""
    scrape: Samples = {}
    clock, seen = None, None
    for series, value, _, last in samples:
        if series in scrape:
            yield Scrape(clock, scrape)
            scrape = {}
        if not scrape:
            clock, seen = None if last is seen or last is None else last.at_s, last
        scrape[series] = value
    if scrape:
        yield Scrape(clock, scrape)


def _by_time(path: str | PathLike[str], samples: Iterable[Sample]) -> dict[float, Samples]:
    """The scrape of each timestamp, in order of time."""
    found: dict[float, Samples] = {}
    for (name, labels), value, at_s, _ in samples:
        if at_s is None:
            raise UserError(f"{path}: {name} has no timestamp, and others have; give all of them one, or none")
        scrape = found.setdefault(at_s, {})
        if (name, labels) in scrape:
            raise UserError(f"{path}: {name} has two values at {at_s:g} s; give the metrics of one run")
        scrape[name, labels] = value
    return found


def _time_s(line: str) -> float | None:
    """The time that a line between scrapes gives, in seconds since 1970; None for other lines."""
    if (seconds := number(line)) is not None:
        return seconds
    try:
        return datetime.fromisoformat(line).timestamp()
    except (ValueError, OverflowError):
        return None


def number(text: str) -> float | None:
    """A number as metrics have it; None for other text."""
    try:
        return float(text)
    except ValueError:
        return None
