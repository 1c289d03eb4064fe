"""Claims about throughput and latency of static and of continuous batches.

Ratios of throughput are of Anyscale's workload at its widest output cap (``anyscale``), to which the texts' own numbers
go back.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache

from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.sim import Workload, simulate
from fragmeter.traces import poisson, stream

from . import anyscale
from .anyscale import FASTERTRANSFORMER, NAIVE, RESERVES_CAP, RESERVES_OUTPUT, VLLM
from .claim import Code, Judged, Part, Values
from .runs import Trial, median_latency_s

#: Claims give round numbers: one is reached from 95 % of it on.
ROUNDED = 0.95
#: Requests/s that FasterTransformer serves of Anyscale's workload without falling behind.
_LATENCY_RATE, _LATENCY_REQUESTS = 0.3, 300


@lru_cache(8)
def widest_ratios(trial: Trial) -> Values:
    """Throughput at the widest cap, over that of FasterTransformer, which is fitted, and of naive static."""
    rates = anyscale.tokens_per_s(anyscale.facts()["output_caps"][-1], trial.seed, trial.stretch)
    names = {
        "vllm": VLLM,
        "cap_reserved": RESERVES_CAP,
        "output_reserved": RESERVES_OUTPUT,
        "fastertransformer": FASTERTRANSFORMER,
    }
    over_naive = {name: rates[system] / rates[NAIVE] for name, system in names.items()}
    return over_naive | {f"vllm_over_{name}": rates[VLLM] / rates[system] for name, system in names.items()}


def judge_three_and_six(values: Mapping[str, float]) -> Judged:
    """vLLM has 3 and 6 times the throughput, from 95 % of the number on."""
    vllm = values["vllm"]
    cap, length, faster = (
        values[f"vllm_over_{name}"] for name in ("cap_reserved", "output_reserved", "fastertransformer")
    )
    return Judged(
        (
            Part("3x over continuous batching that reserves the cap (Orca)", cap, 3 * ROUNDED),
            Part("3x over continuous batching that reserves each output (TGI)", length, 3 * ROUNDED),
            Part("6x over static batches of FasterTransformer", faster, 6 * ROUNDED),
            Part("6x over naive static batches", vllm, 6 * ROUNDED),
        ),
        f"vLLM over continuous batching {cap:.2f} (cap reserved) and {length:.2f} (output reserved); over"
        f" FasterTransformer {faster:.2f}; over naive static {vllm:.1f}",
        "The gain of paging depends on how much other servers reserve: with known output lengths they batch nearly as many.",
    )


def _twenty_three(trial: Trial) -> Values:
    return widest_ratios(trial) | _latency(trial)


def _latency(trial: Trial) -> Values:
    """Median latency of static and of continuous batches of four, at a load that both can carry."""
    drawn = anyscale.draw(anyscale.facts()["output_caps"][-1], trial.seed).workload()
    arrivals = poisson(_LATENCY_REQUESTS, _LATENCY_RATE, stream(trial.seed, "claims latency"))
    prompts, outputs = (column[:_LATENCY_REQUESTS] for column in (drawn.prompt_tokens, drawn.output_tokens))
    work = Workload("latency", arrivals, prompts, outputs)
    batch = anyscale.facts()["static_batch"][-1]
    return {
        f"median_s_{policy}": median_latency_s(
            simulate(paper_settings(policy=policy, max_num_seqs=batch, step_scale=trial.step_scale), work)
        )
        for policy in ("fastertransformer", "orca-oracle")
    }


def judge_twenty_three(values: Mapping[str, float]) -> Judged:
    """23 times naive static, from 95 % on; a median latency that is at least 5 % lower."""
    static, continuous = values["median_s_fastertransformer"], values["median_s_orca-oracle"]
    batching = max(values["cap_reserved"], values["output_reserved"])
    return Judged(
        (
            Part("continuous batching with paged memory", values["vllm"], 23 * ROUNDED),
            Part("continuous batching by itself", batching, 23 * ROUNDED),
            Part("median latency", continuous / static, most=ROUNDED),
        ),
        f"over naive static: vLLM {values['vllm']:.1f}, continuous batching {values['cap_reserved']:.1f} (cap reserved)"
        f" to {values['output_reserved']:.1f} (output reserved); median latency in batches of four, {_LATENCY_RATE:g}"
        f" req/s: {static:.1f} s static, {continuous:.1f} s continuous",
        "The factor combines three effects: scheduling by iterations, memory on demand, and the naive"
        " baseline's batches, which all run to the longest output of the load.",
    )


PROBES: Code = {
    4: (widest_ratios, judge_three_and_six),
    20: (_twenty_three, judge_twenty_three),
}
