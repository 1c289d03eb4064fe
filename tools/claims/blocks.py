"""Claims about the size of a block: what it leaves empty, what its table costs, and how it grows with the context.

The closed form of what last blocks leave empty: a request of p and o tokens decodes while it holds p + 1 to p + o -
1, and holding c of them it has ceil(c / b) * b slots; added up over all decode steps of all requests, as in a pool
that is full.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import lru_cache
from math import isqrt, log

import numpy as np

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.paper.sharing import blocks_up_to
from fragmeter.sim import Run, Workload, simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.spec import model
from fragmeter.sim.types.ticks import PER_SECOND

from .claim import Code, Judged, Part, Values
from .runs import Trial, at_once
from .waste import held_waste

#: Requests of a burst; fewer where the pool holds a few blocks.
_REQUESTS, _FEW = 200, 80
#: Bytes of a block table's entry.
_ENTRY_BYTES = 4
_KI = 1024


def tail_waste_pct(lengths: Workload, block_size: int) -> float:
    """What last blocks leave empty, in percent of all slots held, by the closed form."""
    prompt, last = lengths.prompt_tokens, lengths.prompt_tokens + lengths.output_tokens - 1
    held = block_size * (blocks_up_to(last, block_size) - blocks_up_to(prompt, block_size)).sum()
    live = (last * (last + 1) - prompt * (prompt + 1)).sum() // 2
    return float(100 * (1 - live / held))


@lru_cache(16)
def _burst_run(trial: Trial, policy: str, requests: int = _REQUESTS, **more: object) -> Run:
    return simulate(paper_settings(policy=policy, **more), at_once(SYNTHETIC_SET, requests, trial.seed))


def _empty_share(run: Run) -> float:
    """Percent of the slots held that are not live."""
    shares = {bucket: 100 * run.window.share_of_steps(bucket) for bucket in run.window.slot_steps}
    held = held_waste(shares)
    return 100 * held / (held + shares["live"])


def _thirty_two(trial: Trial) -> Values:
    four_k = {"model": "llama-2-7b", "max_model_len": 4 * _KI}
    found = {
        f"blocks_of_{size}_pct": _empty_share(_burst_run(trial, "vllm-sosp23", block_size=size, **four_k))
        for size in (32, 64)
    }
    return found | {"preallocated_pct": _empty_share(_burst_run(trial, "orca-max", **four_k))}


def judge_thirty_two(values: Mapping[str, float]) -> Judged:
    """Blocks of 32 and of 64 leave a tenth of the share empty that 4,096 preallocated tokens do, or less."""
    before = values["preallocated_pct"]
    return Judged(
        tuple(
            Part(f"blocks of {size} tokens", values[f"blocks_of_{size}_pct"] / before, most=0.1) for size in (32, 64)
        ),
        f"LLaMA-2-7B, empty of what is held: {before:.1f} % with 4,096 tokens preallocated,"
        f" {values['blocks_of_32_pct']:.1f} % in blocks of 32, {values['blocks_of_64_pct']:.1f} % in blocks of 64",
        "On average half a block per sequence is empty; of a preallocated context, most slots are.",
    )


def _token_attention(trial: Trial) -> Values:
    work = at_once(SYNTHETIC_SET, _REQUESTS, trial.seed)
    work = replace(work, arrival_ticks=np.arange(_REQUESTS) * 2 * PER_SECOND)
    limits = {"block_size": 1, "max_num_seqs": 256, "max_num_batched_tokens": 2560, "step_scale": trial.step_scale}
    ours, theirs = (simulate(paper_settings(policy=policy, **limits), work) for policy in ("vllm-sosp23", "lightllm"))
    finish = [request_times(run).finish_ticks for run in (ours, theirs)]
    slots = [[run.window.slot_ticks[bucket] for bucket in sorted(run.window.slot_ticks)] for run in (ours, theirs)]
    return {
        "finishes_that_differ": float((finish[0] != finish[1]).sum()),
        "buckets_that_differ": float(sum(a != b for a, b in zip(*slots, strict=True))),
        "held_and_empty_pct": _empty_share(_burst_run(trial, "lightllm")),
        "entries_a_token_against_16": 16.0,
        "table_bytes_a_token": float(_ENTRY_BYTES),
    }


def judge_token_attention(values: Mapping[str, float]) -> Judged:
    """Where memory decides nothing, the same finishes and the same ledger, to the tick; and no slot empty."""
    finishes, buckets, empty = (
        values[name] for name in ("finishes_that_differ", "buckets_that_differ", "held_and_empty_pct")
    )
    share = 100 * values["table_bytes_a_token"] / model("opt-13b").slot_bytes()
    return Judged(
        (
            Part("equality with paged blocks of one token", finishes + buckets, most=0),
            Part("nothing empty", empty, most=0),
        ),
        f"of {_REQUESTS} requests {finishes:.0f} finish at another tick than with paged blocks of one token,"
        f" {buckets:.0f} of nine buckets differ; held and empty {empty:.1f} %; tables are 16 times as long as with"
        f" blocks of 16: {_ENTRY_BYTES} bytes a token, {share:.4f} % of OPT-13B's KV",
        "A block of one token has no empty slots; the price is a longer block table, and kernels that gather single"
        " tokens.",
    )


def _pages(trial: Trial) -> Values:
    shares = {"paged_16": trial.shares("vllm-v0")} | {
        f"pages_of_{kib}_kib": trial.shares("vattention", page_size=kib) for kib in (64, 2048)
    }
    entry_share = 100 * _ENTRY_BYTES / (16 * model("opt-13b").slot_bytes())
    return {f"{name}_pct": held_waste(found) for name, found in shares.items()} | {"table_pct_of_kv": entry_share}


def judge_pages(values: Mapping[str, float]) -> Judged:
    """A table's bytes are worth avoiding from 1 % of the KV on; pages leave no more empty than blocks of 16 and a
    point.
    """
    paged, small, large = (values[f"{name}_pct"] for name in ("paged_16", "pages_of_64_kib", "pages_of_2048_kib"))
    return Judged(
        (
            Part("the tables' memory", values["table_pct_of_kv"], 1),
            Part("pages of 64 KiB, which leave no more empty than paging", small, most=paged + 1),
            Part("pages of 2 MiB, which leave no more empty than paging", large, most=paged + 1),
        ),
        f"block tables take 4 / (16 * 819,200) = {values['table_pct_of_kv']:.5f} % of OPT-13B's KV; held and empty:"
        f" {paged:.1f} % in blocks of 16, {small:.1f} % in pages of 64 KiB, {large:.1f} % in pages of 2 MiB (204"
        " tokens)",
        "A block table costs kernel and host time rather than bytes; pages of CUDA's own size leave more slots empty"
        " than blocks.",
    )


def _square_root(trial: Trial) -> Values:
    shape, short, long = model("opt-13b"), 4 * _KI, 64 * _KI
    return {
        "kv_exponent": _exponent(shape.kv_bytes, short, long),
        "paged_exponent": _exponent(lambda n: -(-n // 16) * (16 * shape.slot_bytes() + _ENTRY_BYTES), short, long),
        "table_and_tail_exponent": _exponent(lambda n: n / isqrt(n) + isqrt(n), short, long),
        "table_and_tail_at_16": 4 * _KI / 16 + 16,
        "table_and_tail_at_sqrt": float(4 * _KI / isqrt(4 * _KI) + isqrt(4 * _KI)),
    }


def _exponent(needed: Callable[[int], float], short: int, long: int) -> float:
    """The power of n with which something grows from one length to another."""
    return log(needed(long) / needed(short)) / log(long / short)


def judge_square_root(values: Mapping[str, float]) -> Judged:
    """An exponent is as said within 0.05: 2 without paging, 1/2 with it."""
    kv, paged, rest = (values[f"{name}_exponent"] for name in ("kv", "paged", "table_and_tail"))
    return Judged(
        (
            Part("memory that grows as n^2 without paging", kv, 1.95, 2.05),
            Part("memory that grows as sqrt(n) with it", paged, 0.45, 0.55),
            Part("table entries and empty slots of the last block alone, at blocks of sqrt(n)", rest, 0.45, 0.55),
        ),
        f"from 4K to 64K tokens the KV of OPT-13B grows as n^{kv:.2f}, and paged, tables included, as n^{paged:.2f};"
        f" n / b entries and at most b empty slots are least at b = sqrt(n): {values['table_and_tail_at_sqrt']:.0f}"
        f" at 4K, where b = 16 has {values['table_and_tail_at_16']:.0f}",
        "The key and value of every token are kept under every layout: paging reduces waste, not the memory of the tokens.",
    )


def _sixteen_chunks(trial: Trial) -> Values:
    sizes = (512, 1024, 4096)
    more = {size: {"block_size": size, "num_gpu_blocks_override": 15_728 // size} for size in sizes}
    found = {f"chat_{size}_pct": _empty_share(_burst_run(trial, "vllm-sosp23", _FEW, **more[size])) for size in sizes}
    long = Workload("16K", np.array([0]), np.array([16 * _KI - 512]), np.array([1024]))
    return found | {f"at_16k_{size}_pct": tail_waste_pct(long, size) for size in sizes} | {"chunks": 16 * _KI / 1024}


def judge_sixteen_chunks(values: Mapping[str, float]) -> Judged:
    """16 chunks; and at most 4 % of what is held is empty, the bar that paging set itself."""
    parts = [
        Part(f"blocks of {size:,} tokens, {name}", values[f"{key}_{size}_pct"], most=4.0)
        for key, name in (("at_16k", "at 16K of context"), ("chat", "on chat lengths"))
        for size in (512, 1024, 4096)
    ]
    shares = ", ".join(
        f"{size:,}: {values[f'at_16k_{size}_pct']:.1f} % and {values[f'chat_{size}_pct']:.1f} %"
        for size in (512, 1024, 4096)
    )
    return Judged(
        (Part("16 chunks of 1,024", values["chunks"], 16, 16), *parts),
        f"16,384 / 1,024 = {values['chunks']:.0f}; empty of what is held, around 16K of context and on chat lengths:"
        f" {shares}",
        "A sequence leaves half a block empty on average: a small share of 16K tokens, most of a chat.",
    )


PROBES: Code = {
    7: (_thirty_two, judge_thirty_two),
    14: (_token_attention, judge_token_attention),
    21: (_pages, judge_pages),
    22: (_square_root, judge_square_root),
    23: (_sixteen_chunks, judge_sixteen_chunks),
}
