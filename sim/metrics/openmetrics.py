"""A run as the metrics of vLLM's ``/metrics`` endpoint, scraped at regular times of the simulation.

    gauges      vllm:num_requests_running, vllm:num_requests_waiting, vllm:kv_cache_usage_perc
    counters    vllm:prompt_tokens_total, vllm:generation_tokens_total, vllm:request_success_total, vllm:num_preemptions_total;
                with speculative decoding vllm:spec_decode_num_drafts_total, vllm:spec_decode_num_draft_tokens_total,
                vllm:spec_decode_num_accepted_tokens_total, vllm:spec_decode_num_accepted_tokens_per_pos_total;
                with a prefix cache vllm:prefix_cache_queries_total, vllm:prefix_cache_hits_total
    info        with a pool of blocks vllm:cache_config_info, with those of vLLM's labels that a run has
    histograms  vllm:request_prompt_tokens, vllm:request_generation_tokens, vllm:time_to_first_token_seconds,
                vllm:request_time_per_output_token_seconds, vllm:e2e_request_latency_seconds, vllm:request_queue_time_seconds

Names, labels and buckets are those of vLLM 0.33 (``vllm/v1/metrics``). The text is OpenMetrics 1.0: the samples of a family
stand together, those of a replica in order of time. Timestamps are the simulated time in seconds, from a start. The label
``job="fragmeter"`` tells the samples from a server's own in one Prometheus. Two values are interpolated: between a request's first
and last token its tokens rise evenly, and within a leap the usage of the pool.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from ..memory.accounting.buckets import NOT_HELD
from ..runs.growth import growth_moments
from ..runs.moments import ticks_of
from ..runs.run import Run
from ..types.ticks import PER_MS, PER_SECOND
from .prefix_cache import first_look_ups
from .registry import LATENCIES
from .requests import RequestTimes, preemptions, request_times
from .speculative_decoding import most_drafts

_LATENCY = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0, 1920.0, 7680.0,
)  # fmt: skip
_FIRST_TOKEN = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0, 640.0, 2560.0,
)  # fmt: skip
_TOKEN = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)  # fmt: skip
#: Simulated seconds between two scrapes: by default, and the range.
DEFAULT_INTERVAL_S, LEAST_INTERVAL_S, MOST_INTERVAL_S = 5.0, 0.001, 86_400.0
#: Prometheus' label of a scraped job, which tells a simulated server from a served one.
JOB = "fragmeter"
_CONFIG = "vllm:cache_config_info"


class _Family(NamedTuple):
    """A metric family: its type, description, and the samples of each replica by name suffix and further label.

    Attributes:
        samples: Of each replica, the values at the scrapes, by suffix and label.
    """

    name: str
    kind: str
    about: str
    samples: list[dict[tuple[str, str], np.ndarray]]


def openmetrics(
    runs: Sequence[Run], model_name: str, interval_s: float = DEFAULT_INTERVAL_S, start_s: float = 0.0
) -> Iterator[str]:
    """The text, family by family.

    Args:
        runs: The run of each replica, on one clock.
        interval_s: Simulated seconds between two scrapes, above 0; the last one is at the end of the run. All are at whole
            milliseconds.
        start_s: Timestamp of the start of the runs, in seconds.
    """
    end_ms = -(-max(run.log.end_ticks for run in runs) // PER_MS)
    scrapes = np.unique(np.append(np.rint(np.arange(0, end_ms, interval_s * 1e3)), end_ms)).astype(np.int64)
    at = scrapes * PER_MS
    families = [_families(run, at) for run in runs]
    for of_family in zip(*families, strict=True):
        name, kind, about, _ = of_family[0]
        yield f"# HELP {name} {about}\n# TYPE {name} {kind}\n"
        for engine, family in enumerate(of_family):
            labels = f'job="{JOB}",engine="{engine}"' + f',model_name="{_escaped(model_name)}"' * (name != _CONFIG)
            yield from _points(family, labels, (start_s + scrapes / 1000).tolist())
    yield "# EOF\n"


def _points(family: _Family, labels: str, scrapes: list[float]) -> Iterator[str]:
    """The lines of one replica; the samples of a histogram stand together, scrape by scrape."""
    for samples in family.samples:
        for place, second in enumerate(scrapes):
            for (suffix, label), values in samples.items():
                every = f"{labels},{label}" if label else labels
                yield f"{family.name}{suffix}{{{every}}} {_number(values[place])} {second}\n"


def _families(run: Run, at: np.ndarray) -> list[_Family]:
    times = request_times(run)
    running, waiting, usage = gauges(run, at)
    work = run.workload
    declared = work.output_tokens if work.max_tokens is None else work.max_tokens
    at_length = (work.output_tokens >= declared)[times.index]
    reasons = {
        ("_total", f'finished_reason="{reason}"'): _count(times.finish_ticks[ended], at)
        for reason, ended in (("stop", ~at_length), ("length", at_length))
    }
    order = np.argsort(times.first_token_ticks)
    computed = _cumulative(times.first_token_ticks[order], work.prompt_tokens[times.index][order], at)
    several = times.output_tokens > 1
    per_token = _seconds(times.finish_ticks - times.first_token_ticks)[several] / (times.output_tokens[several] - 1)
    first, finish = times.first_token_ticks, times.finish_ticks
    queued = _seconds(times.first_scheduled_ticks - times.arrival_ticks)
    lengths = _token_buckets(run.replica.max_model_len)
    return [
        _gauge("vllm:num_requests_running", "Number of requests in model execution batches.", running),
        _gauge("vllm:num_requests_waiting", "Number of requests waiting to be processed.", waiting),
        _gauge("vllm:kv_cache_usage_perc", "KV-cache usage. 1 means 100 percent usage.", usage),
        *_cache_config(run, at),
        _counter("vllm:prompt_tokens", "Number of prefill tokens processed.", {("_total", ""): computed}),
        _counter("vllm:generation_tokens", "Number of generation tokens processed.", {("_total", ""): _tokens(run, times, at)}),
        _Family(
            "vllm:request_success", "counter", "Count of successfully processed requests.", [{key: value} for key, value in reasons.items()]
        ),
        _counter("vllm:num_preemptions", "Number of preemptions.", {("_total", ""): _count(preemptions(run).ticks, at)}),
        *_prefix_cache(run, at),
        _histogram(
            "vllm:request_prompt_tokens", "Number of prefill tokens processed.", finish, work.prompt_tokens[times.index], lengths, at
        ),
        _histogram("vllm:request_generation_tokens", "Number of generation tokens processed.", finish, times.output_tokens, lengths, at),
        *(
            _histogram(LATENCIES[name].family, LATENCIES[name].about, ticks, values, bounds, at)
            for name, ticks, values, bounds in (
                ("ttft", first, _seconds(first - times.arrival_ticks), _FIRST_TOKEN),
                ("tpot", finish[several], per_token, _TOKEN),
                ("e2el", finish, _seconds(finish - times.arrival_ticks), _LATENCY),
            )
        ),
        _histogram("vllm:request_queue_time_seconds", "Time in the waiting phase in seconds.", finish, queued, _LATENCY, at),
        *_drafts(run, at),
    ]  # fmt: skip


def _cache_config(run: Run, at: np.ndarray) -> list[_Family]:
    """The size of the pool and of its blocks, as labels; none without blocks."""
    if not run.log.paged:
        return []
    replica, chosen = run.replica, run.settings
    labels = {
        "block_size": replica.stated_block_size // int(chosen.value("decode_context_parallel_size")),
        "cache_dtype": chosen.kv_cache_dtype,
        "enable_prefix_caching": replica.caches_prefixes,
        "num_gpu_blocks": replica.num_blocks,
    }
    label = ",".join(f'{name}="{value}"' for name, value in labels.items())
    return [_Family(_CONFIG, "gauge", "Information of the LLMEngine CacheConfig", [{("", label): np.ones_like(at)}])]


def _token_buckets(longest: int) -> list[float]:
    """1, 2 and 5 times the powers of 10, up to the longest sequence (``build_1_2_5_buckets``)."""
    bounds = (float(digit * 10**power) for power in range(len(str(longest))) for digit in (1, 2, 5))
    return [bound for bound in bounds if bound <= longest]


def _prefix_cache(run: Run, at: np.ndarray) -> list[_Family]:
    """Tokens that admissions asked for and found, without those of preempted requests; none without a prefix cache."""
    log = run.replica.cache_log
    if log is None:
        return []
    look_ups = log.look_up_columns()
    first = first_look_ups(look_ups["index"])
    ticks = ticks_of(run.log, log.look_up_moments()[first])
    order = np.argsort(ticks, kind="stable")
    return [
        _counter(name, about, {("_total", ""): _cumulative(ticks[order], look_ups[column][first][order], at)})
        for name, about, column in (
            (
                "vllm:prefix_cache_queries",
                "Prefix cache queries, in terms of number of queried tokens.",
                "known_tokens",
            ),
            ("vllm:prefix_cache_hits", "Prefix cache hits, in terms of number of cached tokens.", "hit_tokens"),
        )
    ]


def _drafts(run: Run, at: np.ndarray) -> list[_Family]:
    """Drafts, their tokens, and those that were accepted; none without speculative decoding."""
    drafts = run.log.drafts
    if drafts is None:
        return []
    ticks, ones = run.log.end_of(drafts["decode_step"] + 1), np.ones(len(drafts["index"]), dtype=np.int64)
    counted = (
        ("drafts", "Number of spec decoding drafts.", ones),
        ("draft_tokens", "Number of draft tokens.", drafts["drafts"]),
        ("accepted_tokens", "Number of accepted tokens.", drafts["accepted"]),
    )
    found = [
        _counter(f"vllm:spec_decode_num_{name}", about, {("_total", ""): _cumulative(ticks, values, at)})
        for name, about, values in counted
    ]
    by_place = [
        {("_total", f'position="{place}"'): _cumulative(ticks, drafts["accepted"] > place, at)}
        for place in range(most_drafts(run))
    ]
    name = "vllm:spec_decode_num_accepted_tokens_per_pos"
    return [*found, _Family(name, "counter", "Accepted tokens per draft position.", by_place)]


def gauges(run: Run, at: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Requests that run, requests that wait, and the share of the pool in use, at each tick of ``at``; 0 between two leaps."""
    rows, capacity = run.log.rows, run.log.ledger_slots
    if not len(rows["start_ticks"]):
        nothing = np.zeros(len(at))
        return nothing, nothing, nothing
    row = np.maximum(np.searchsorted(rows["start_ticks"], at, side="right") - 1, 0)
    into = at - rows["start_ticks"][row]
    busy = (into >= 0) & (into < rows["ticks"][row])
    levels = run.accounts.at_rows()
    used = np.asarray(capacity - sum(levels[bucket] for bucket in NOT_HELD))
    growth = np.zeros(len(used))
    if run.log.paged and not run.log.groups.sliding:
        growth = growth_moments(run.log)[0] * run.log.block_size
    share = into / np.maximum(rows["ticks"][row], 1)
    usage = (used[row] + share * growth[row]) / max(capacity, 1)
    return rows["batch_size"][row] * busy, rows["waiting"][row] * busy, usage * busy


def _tokens(run: Run, times: RequestTimes, at: np.ndarray) -> np.ndarray:
    """Generated tokens at every scrape: the first of each request at its time, the others evenly up to the finish."""
    copies = run.workload.num_sequences[times.index]
    first, finish = times.first_token_ticks, times.finish_ticks
    rate = copies * (times.output_tokens - 1) / np.maximum(finish - first, 1)
    begun, ended = np.argsort(first), np.argsort(finish)
    # Each request contributes rate x (at - first) from its first token on, and stops contributing at its finish.
    ramps = _ramps(first[begun], rate[begun], at) - _ramps(finish[ended], rate[ended], at)
    return np.rint(ramps + _cumulative(first[begun], copies[begun], at)).astype(np.int64)


def _ramps(starts: np.ndarray, rates: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The sum of ``rate * (at - start)`` over all that have started; ``starts`` ascend."""
    return _cumulative(starts, rates, at) * at - _cumulative(starts, rates * starts, at)


def _cumulative(ticks: np.ndarray, values: np.ndarray, at: np.ndarray) -> np.ndarray:
    """The sum of the values until each scrape; ``ticks`` ascend."""
    sums = np.concatenate([[0], np.cumsum(values)])
    return sums[np.searchsorted(ticks, at, side="right")]


def _count(ticks: np.ndarray, at: np.ndarray) -> np.ndarray:
    return np.searchsorted(np.sort(ticks), at, side="right")


def _seconds(ticks: np.ndarray) -> np.ndarray:
    return ticks / PER_SECOND


def _gauge(name: str, about: str, values: np.ndarray) -> _Family:
    return _Family(name, "gauge", about, [{("", ""): values}])


def _counter(name: str, about: str, samples: dict[tuple[str, str], np.ndarray]) -> _Family:
    return _Family(name, "counter", about, [samples])


def _histogram(
    name: str, about: str, ticks: np.ndarray, values: np.ndarray, bounds: Sequence[float], at: np.ndarray
) -> _Family:
    """Values that were observed at ``ticks``, each in every bucket with a bound that it does not exceed."""
    order = np.argsort(ticks)
    ticks, values = ticks[order], values[order]
    samples = {("_bucket", f'le="{bound}"'): _cumulative(ticks, values <= bound, at) for bound in bounds}
    every = _count(ticks, at)
    samples |= {("_bucket", 'le="+Inf"'): every, ("_count", ""): every, ("_sum", ""): _cumulative(ticks, values, at)}
    return _Family(name, "histogram", about, [samples])


def _number(value: np.generic) -> str:
    plain = value.item()
    return str(int(plain)) if plain == int(plain) else repr(float(plain))


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
