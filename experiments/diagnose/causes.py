"""The causes that a diagnosis knows: a symptom each, and the flags that may remove it.

    cause                  symptom as served                                    flags that are tried
    small pool             preemptions, or requests wait for KV cache           --gpu-memory-utilization, less overrides
    pool of states         requests wait for max-num-seqs, which follows from   --max-mamba-cache-size, or
                           the states; or the pool is full and prefixes are lost  --mamba-full-memory-ratio (SGLang)
    pool of windows        requests wait for windows; or the pool is full, and  --swa-full-tokens-ratio (SGLang)
                           requests are retracted or prefixes are lost
    KV dtype               the same, and the KV cache has 16 bits               --kv-cache-dtype fp8
    states                 the same, and states at ends of blocks are kept      --no-enable-prefix-caching
    max-num-seqs too high  the same, and more may run than the pool holds       --max-num-seqs, --watermark
    max-num-seqs too low   requests wait for max-num-seqs, and KV cache is free --max-num-seqs
    chunk too large        p99 ITL above 25 decode steps or 250 ms; above 5     --max-num-batched-tokens
                           where the chunk is above vLLM's default
    chunk too small        requests wait for steps; or the mean prompt is longer --max-num-batched-tokens
                           than a chunk below vLLM's default
    caching off            prefix caching is off, and prompts share a prefix    --enable-prefix-caching
    evicted prefixes       blocks are asked for after their eviction            --kv-offloading-size
    drafts                 --speculative-config, and the accepted drafts known  without it
    no CUDA graphs         --enforce-eager                                      without it

A line of SGLang has its own flags for these, and a change without one is not tried (``Server.changed``). A symptom alone is no finding: the flags are simulated on the same requests, and those that do not help are dropped
(``diagnosis``). 25 and 5 decode steps are the relaxed and the strict limit on the time between tokens of Sarathi-Serve (OSDI'24);
250 ms is a choice. The strict one holds for a chunk larger than vLLM's default: smaller chunks gain a little in
most servers, and a server as vLLM starts it is not ill for that. An fp8 KV cache changes what the model answers, and all other flags leave it alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from ...sim.metrics.registry import metric_text
from ...sim.spec.gpu import GIB
from ...sim.types.optional import not_none
from ..measured.server_metrics import ServerMetrics
from .load import ServedLoad
from .run import Observation
from .server import Change, Server

#: Preemptions per 100 requests, and share of the time that requests wait, from which on they are symptoms.
PREEMPTS, WAITS = 1.0, 0.05
#: Limits on the p99 gap between tokens: decode steps, or milliseconds if it also lasts some decode steps; decode steps for a
#: chunk above vLLM's default.
STALL_STEPS, STALL_MS, _SOME_STEPS, STRICT_STEPS = 25.0, 250.0, 10.0, 5.0
#: Usage of the KV cache below which it has room; and usage from which on it has none.
ROOM, FULL = 0.9, 0.95
#: Values of ``max_num_seqs`` that are tried, relative to the number of sequences of mean final length that fit.
_FITTING = (1.25, 1.0, 0.75)
_WATERMARKS = ("0.02", "0.05")
#: The first release for which the watermark is proposed; it came in between 0.24 and this one (pull request 44594).
_HAS_WATERMARK = (0, 27)
_LEAST_CHUNK, _MOST_CHUNK = 512, 16_384


@dataclass(frozen=True)
class Case:
    """What is known of a server as it serves.

    Attributes:
        seen: Means of its runs.
        would_hit: Hit rate of a prefix cache, if its own is off and the contents of prompts are known; else 0.
        cache_worth: What its cached blocks were worth in one run (``cache_worth`` of the summary); None without a cache, or where
            the contents of prompts are not known.
    """

    server: Server
    load: ServedLoad
    seen: Observation
    metrics: ServerMetrics | None
    would_hit: float = 0.0
    cache_worth: dict[str, Any] | None = None

    @property
    def fitting(self) -> int:
        """Sequences of the load's mean lengths that run at once in the KV cache."""
        prompt, output = self.load.mean_tokens
        return self.server.started.fitting(round(prompt + output), max(1, round(prompt)))

    @property
    def measured_preemptions(self) -> float | None:
        """Preemptions per 100 requests by the server's own metrics."""
        metrics = self.metrics
        if metrics is None or metrics.preemptions is None or not metrics.first_tokens:
            return None
        return 100 * metrics.preemptions / metrics.first_tokens


@dataclass(frozen=True)
class Suspect:
    """A cause with its symptom in this case.

    Attributes:
        symptom: What the runs show, one clause.
        changes: Flags to try.
    """

    cause: Cause
    symptom: str
    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Cause:
    """A cause.

    Attributes:
        name: Short name, as in the data.
        title: A sentence for the report.
        lossless: Whether its flags leave the answers of the model alone.
        symptom: The symptom in words; None where it is absent.
        changes: Flags to try.
    """

    name: str
    title: str
    symptom: Callable[[Case], str | None]
    changes: Callable[[Case], Iterator[Change]]
    lossless: bool = True


def suspects(case: Case) -> list[Suspect]:
    """The causes with a symptom and flags to try."""
    found = []
    for cause in CAUSES:
        symptom = cause.symptom(case)
        changes = () if symptom is None else tuple(cause.changes(case))
        if symptom is not None and changes:
            found.append(Suspect(cause, symptom, changes))
    return found


def pressure(case: Case) -> str | None:
    """What the pool lacks; None if it is large enough."""
    seen = case.seen
    parts = []
    if seen.preemptions >= PREEMPTS:
        parts.append(f"{seen.preemptions:.0f} preemptions per 100 requests")
    elif (case.measured_preemptions or 0.0) >= PREEMPTS:
        parts.append(f"{case.measured_preemptions:.0f} measured preemptions per 100 requests")
    if seen.recomputed >= 0.01:
        parts.append(f"{seen.recomputed:.0%} of the computed tokens are recomputed")
    if seen.wait_memory >= WAITS:
        parts.append(f"requests wait for KV cache {seen.wait_memory:.0%} of the time")
    return "; ".join(parts) or None


def _larger_pool(case: Case) -> Iterator[Change]:
    yield from case.server.started.larger_pools()


def _fp8_cache(case: Case) -> Iterator[Change]:
    if case.server.launch.deployment.kv_dtype != "fp8":
        yield {"kv-cache-dtype": "fp8"}


def _states(case: Case) -> str | None:
    """Blocks as large as a state, of which the last one of a sequence is partly filled, and states at their ends."""
    text, launch = pressure(case), case.server.launch
    shares = case.server.started.own_pool() is None and launch.model.state_layers
    if text is None or not shares or not launch.enable_prefix_caching:
        return None
    tokens = round(sum(case.load.mean_tokens))
    kept = launch.decode_blocks(tokens)
    states = kept - replace(launch, enable_prefix_caching=False).decode_blocks(tokens)
    blocks = -(-tokens // launch.block_tokens)
    return (
        f"{text}; a block has {launch.block_tokens:,} tokens, as large as a state: {tokens:,} tokens take {blocks:,} of them,"
        f" {1 - tokens / (blocks * launch.block_tokens):.0%} empty, and {states:,} of at most {kept:,} blocks of a sequence are states kept for prefixes"
    )


def _states_bound(case: Case) -> bool:
    """Whether as many sequences run at most as a pool of states is for."""
    own = case.server.started.own_pool()
    return own is not None and case.server.launch.max_num_seqs == case.server.started.most_seqs()


def _few_states(case: Case) -> str | None:
    own, seen = case.server.started.own_pool(), case.seen
    if own is None or own.kind != "states":
        return None
    parts = []
    if seen.wait_seqs >= WAITS and _states_bound(case):
        parts.append(
            f"requests wait {seen.wait_seqs:.0%} of the time, as no more than {case.server.launch.max_num_seqs:,} run: {own.slots:,} states are"
            f" {own.of_request} for each of them"
        )
    return "; ".join([*parts, *_lost_prefixes(case)]) or None


def _few_windows(case: Case) -> str | None:
    own, seen = case.server.started.own_pool(), case.seen
    if own is None or own.kind != "windows":
        return None
    parts = []
    if seen.wait_windows >= WAITS:
        parts.append(f"requests wait for windows {seen.wait_windows:.0%} of the time")
    if seen.preemptions >= PREEMPTS and seen.own_max >= FULL:
        parts.append(
            f"{seen.preemptions:.0f} retractions per 100 requests, with {seen.own_max:.0%} of the windows in use"
        )
    return "; ".join([*parts, *_lost_prefixes(case)]) or None


def _lost_prefixes(case: Case) -> Iterator[str]:
    """Prefixes that are not found, where the pool of windows or states is full, so that it evicts them."""
    launch, load, seen = case.server.launch, case.load, case.seen
    if not launch.enable_prefix_caching or not load.knows_contents or seen.own_full < WAITS:
        return
    if load.shared - seen.hit_rate >= WAITS:
        own = not_none(case.server.started.own_pool())
        yield (
            f"prompts have {load.shared:.0%} of their tokens in common and {seen.hit_rate:.0%} are found, with no room among the {own.slots:,}"
            f" {own.kind} {seen.own_full:.0%} of the time"
        )


def _larger_own_pool(case: Case) -> Iterator[Change]:
    yield from case.server.started.larger_own_pools()


def _one_state(case: Case) -> Iterator[Change]:
    yield {"enable-prefix-caching": False}


def _too_many(case: Case) -> str | None:
    text = pressure(case)
    if text is None or case.seen.preemptions < PREEMPTS or case.server.launch.max_num_seqs <= case.fitting:
        return None
    return f"{text}; the KV cache holds {case.fitting} sequences of the mean final length"


def _fewer_seqs(case: Case) -> Iterator[Change]:
    now = case.server.launch.max_num_seqs
    for value in dict.fromkeys(max(1, round(case.fitting * factor)) for factor in _FITTING):
        if value < now:
            yield {"max-num-seqs": str(value)}
    version = case.server.line.version
    if "watermark" not in case.server.line.flags and (version is None or version >= _HAS_WATERMARK):
        yield from ({"watermark": value} for value in _WATERMARKS)


def _too_few(case: Case) -> str | None:
    seen = case.seen
    if seen.wait_seqs < WAITS or seen.mean_usage >= ROOM or _states_bound(case):
        return None
    states, line = case.server.started.most_seqs(), case.server.line
    bound = (
        ""
        if states is None
        else f"; {line.server} starts with at most {states:,}, as each sequence needs room for its states"
    )
    return (
        f"requests wait for {case.server.line.flag_name('max-num-seqs')} {case.server.launch.max_num_seqs:,} {seen.wait_seqs:.0%} of the time while"
        f" {1 - seen.mean_usage:.0%} of the KV cache is free{bound}"
    )


def _more_seqs(case: Case) -> Iterator[Change]:
    launch = case.server.launch
    most = min(launch.max_num_batched_tokens, case.server.started.most_seqs() or launch.max_num_batched_tokens)
    for value in dict.fromkeys(min(factor * launch.max_num_seqs, most) for factor in (2, 4, 8)):
        if value > launch.max_num_seqs:
            yield {"max-num-seqs": str(value)}


def _stalls(case: Case) -> str | None:
    seen = case.seen
    times = seen.p99_itl_ms / seen.median_itl_ms if seen.median_itl_ms else 0.0
    stalls = times > STALL_STEPS or (times > _SOME_STEPS and seen.p99_itl_ms > STALL_MS)
    is_above = case.server.launch.max_num_batched_tokens > _default_chunk(case.server)
    if not stalls and not (times > STRICT_STEPS and is_above):
        return None
    return f"prompts stall the other requests: p99 ITL is {metric_text('p99_itl_ms', seen.p99_itl_ms)} ms, {times:.0f} decode steps"


def _default_chunk(server: Server) -> int:
    """Tokens of a step by vLLM's default on this GPU; those of this server where it would not start with the default."""
    return (server.changed({"max-num-batched-tokens": None}) or server).launch.max_num_batched_tokens


def _smaller_chunks(case: Case) -> Iterator[Change]:
    launch = case.server.launch
    value = _MOST_CHUNK
    while value >= max(_LEAST_CHUNK, case.server.started.fewest_tokens):
        if value < launch.max_num_batched_tokens:
            yield {"max-num-batched-tokens": str(value)}
        value //= 2


def _small_steps(case: Case) -> str | None:
    waits, chunk, (prompt, _) = case.seen.wait_steps, case.server.launch.max_num_batched_tokens, case.load.mean_tokens
    if waits >= WAITS:
        return f"requests wait for a step {waits:.0%} of the time"
    if prompt <= chunk or chunk >= _default_chunk(case.server):
        return None
    return f"a step takes {chunk:,} tokens, so that a prompt of {prompt:,.0f}, the mean, needs {ceil(prompt / chunk)} of them"


def _larger_chunks(case: Case) -> Iterator[Change]:
    chunk = case.server.launch.max_num_batched_tokens
    for factor in (2, 4, 16):
        if factor * chunk <= _MOST_CHUNK:
            yield {"max-num-batched-tokens": str(factor * chunk)}


def _long_prompts(case: Case) -> str | None:
    """vLLM serves prompts in order: one that is longer than a step takes whole steps, in which those behind it wait."""
    launch, prompts = case.server.launch, case.load.trace.prompt_tokens
    chunk = launch.max_num_batched_tokens
    longer = prompts > chunk
    if case.seen.wait_steps < WAITS or not longer.any() or launch.long_prefill_token_threshold:
        return None
    return (
        f"{longer.mean():.1%} of the prompts are longer than the {chunk:,} tokens of a step, and the longest fills"
        f" {-(-int(prompts.max()) // chunk):,} steps; requests wait for a step {case.seen.wait_steps:.0%} of the time"
    )


def _shorter_long_chunks(case: Case) -> Iterator[Change]:
    chunk = case.server.launch.max_num_batched_tokens
    for share in (2, 4, 8, 16):
        if chunk // share >= _LEAST_CHUNK:
            yield {"long-prefill-token-threshold": str(chunk // share)}


def _uncached(case: Case) -> str | None:
    if case.server.launch.enable_prefix_caching or case.would_hit < WAITS:
        return None
    return f"prefix caching is off, and prompts have {case.would_hit:.0%} of their tokens in common"


def _caching(case: Case) -> Iterator[Change]:
    yield {"enable-prefix-caching": True}


def _evicted(case: Case) -> str | None:
    found = case.cache_worth
    if found is None or not found.get("asked_blocks"):
        return None
    hit, infinite = (found[name] / found["asked_blocks"] for name in ("hit_blocks", "infinite_hit_blocks"))
    if infinite - hit < WAITS:
        return None
    return f"of the blocks that prompts ask for {hit:.0%} are hit, and {infinite:.0%} would be if none were evicted"


def _host_memory(case: Case) -> Iterator[Change]:
    """Host memory of the size of the KV cache, and four times of it."""
    server = case.server
    if {"kv-offloading-size", "kv-transfer-config"} & server.line.flags.keys():
        return
    ranks, blocks = server.launch.tensor_parallel, server.pool.num_blocks
    whole = ranks * blocks * sum(stage.block_bytes for stage in server.started.stages())
    yield from ({"kv-offloading-size": f"{max(1, round(factor * whole / GIB))}"} for factor in (1, 4))


def _drafts(case: Case) -> str | None:
    config = case.server.launch.speculative
    if config is None or not config.acceptance_rates:
        return None
    return f"of {config.num_speculative_tokens} drafts of a step {sum(config.acceptance_rates):.2g} are accepted in the mean"


def _no_drafts(case: Case) -> Iterator[Change]:
    yield {"speculative-config": None}


def _eager(case: Case) -> str | None:
    line = case.server.line
    return f"{line.flag_name('enforce-eager')}: no CUDA graphs" if line.switch("enforce-eager") else None


def _graphs(case: Case) -> Iterator[Change]:
    yield {"enforce-eager": None}


CAUSES = (
    Cause("small pool", "The KV cache is too small", pressure, _larger_pool),
    Cause("pool of states", "The pool of states (mamba pool) is too small", _few_states, _larger_own_pool),
    Cause("pool of windows", "The pool of windows (SWA pool) is too small", _few_windows, _larger_own_pool),
    Cause("states", "States kept for prefixes take blocks of the KV cache", _states, _one_state),
    Cause("max-num-seqs too high", "More sequences are admitted than the KV cache holds", _too_many, _fewer_seqs),
    Cause("max-num-seqs too low", "Requests wait though the KV cache has room", _too_few, _more_seqs),
    Cause("chunk too large", "Prompts are computed in chunks that are too large", _stalls, _smaller_chunks),
    Cause("chunk too small", "Prompts are computed in chunks that are too small", _small_steps, _larger_chunks),
    Cause(
        "long prompts", "Long prompts fill the steps that shorter ones wait for", _long_prompts, _shorter_long_chunks
    ),
    Cause("caching off", "Prefixes are computed again and again", _uncached, _caching),
    Cause("evicted prefixes", "Prefixes are evicted before they are asked for again", _evicted, _host_memory),
    Cause("drafts", "Drafts take more time than they save", _drafts, _no_drafts),
    Cause("no CUDA graphs", "Steps wait for the host", _eager, _graphs),
    Cause("KV dtype", "The KV cache has 16 bits a number", pressure, _fp8_cache, lossless=False),
)
