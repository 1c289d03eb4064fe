"""What vLLM's blog and Anyscale say of throughput and memory, put to the test.

All ratios are of output tokens/s of requests that arrive at once, each system with the same model, card and step
time: they differ in their schedules and in their memory.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache, partial
from importlib import resources
from math import inf
from typing import Any

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.paper.sharing import BLOCK_SIZE
from fragmeter.experiments.runs.slo_check import compiled_cost
from fragmeter.sim import Workload, simulate
from fragmeter.sim.spec import gpu, model, paper_num_blocks
from fragmeter.sim.types.ticks import PER_SECOND

from . import anyscale
from .anyscale import FASTERTRANSFORMER, RESERVES_CAP, RESERVES_OUTPUT, VLLM
from .claim import Code, Judged, Part, Values
from .runs import Trial, at_once
from .sharing import saving
from .static_batches import GENERATE_TOKENS, generate_ticks
from .throughput import ROUNDED, widest_ratios
from .waste import EARLIER

MODEL, REQUESTS, _POINTS = "llama-13b", 400, 2.0


@cache
def published() -> Mapping[str, Any]:
    """The numbers by system, but for Anyscale's."""
    return json.loads(resources.files(__package__).joinpath("facts/other_systems.json").read_text("utf-8"))


def _blog(name: str) -> Any:
    return published()["vllm_blog_2023"][name]


def _waste(trial: Trial) -> Values:
    earlier = [trial.shares(policy)["waste"] for policy in EARLIER.values()]
    return {"least_pct": min(earlier), "most_pct": max(earlier), "vllm_pct": trial.shares("vllm-sosp23")["waste"]}


def judge_waste_before(values: Mapping[str, float]) -> Judged:
    """The paper's baselines waste what is said, within two points at either end."""
    low, high = _blog("waste_before_pct")
    return Judged(
        (
            Part("the least wasteful baseline", values["least_pct"], low - _POINTS, high + _POINTS),
            Part("the most wasteful one", values["most_pct"], low - _POINTS, high + _POINTS),
        ),
        f"Orca (Oracle) to Orca (Max): {values['least_pct']:.1f} to {values['most_pct']:.1f} %",
        "It is the range of the paper's own baselines.",
    )


def judge_waste_after(values: Mapping[str, float]) -> Judged:
    """Less than what is said."""
    return Judged(
        (Part("vLLM", values["vllm_pct"], most=_blog("waste_vllm_pct_below")),),
        f"{values['vllm_pct']:.2f} % of the pool",
        "Less than a block a sequence is empty, and the watermark is free.",
    )


def _against(trial: Trial, n: int) -> Values:
    """vLLM's output tokens/s over each other's, with ``n`` sequences a request."""
    work = at_once(SYNTHETIC_SET, REQUESTS, trial.seed, n)
    declared = Workload(
        work.name, work.arrival_ticks, work.prompt_tokens, work.output_tokens, work.output_tokens, n=work.n
    )
    runs = {
        "tgi_without_max_tokens": ("tgi", work),
        "tgi_output_as_max_tokens": ("tgi", declared),
        "vllm": ("vllm-sosp23", work),
    }
    rates = {name: tokens_per_s(policy, requests) for name, (policy, requests) in runs.items()}
    rates["hf"] = _requested_tokens(work) * PER_SECOND / _hf_ticks(work, n)
    return {name: rates["vllm"] / rate for name, rate in rates.items()}


def _against_hf(trial: Trial, n: int) -> Values:
    """As ``_against``, and how much longer a step of the same library takes by Anyscale's benchmark."""
    return _against(trial, n) | {"anyscale_slowness": _slowness(widest_ratios(trial))}


def _hf_ticks(work: Workload, n: int) -> int:
    """As vLLM's benchmark serves it, in the largest batches that hold the longest sequences, at vLLM's step time."""
    longest_in_pool = paper_num_blocks(model(MODEL), gpu("a100-40gb"), 1) * BLOCK_SIZE // GENERATE_TOKENS
    cost = compiled_cost(paper_settings(policy="vllm-sosp23", model=MODEL))
    return generate_ticks(cost, work.prompt_tokens, work.output_tokens, longest_in_pool // n, n)


def tokens_per_s(policy: str, work: Workload, **more: Any) -> float:
    """Output tokens/s of all that is asked for, to the last request."""
    run = simulate(paper_settings(policy=policy, **{"model": MODEL} | more), work)
    return _requested_tokens(work) * PER_SECOND / run.log.end_ticks


def _requested_tokens(work: Workload) -> float:
    return float((work.output_tokens * work.num_sequences).sum())


def _judge_hf(name: str) -> Any:
    def judge(values: Mapping[str, float]) -> Judged:
        """From 95 % of the lower end on; less leaves the rest to the software."""
        low, high = _blog(name)
        times = values["hf"]
        return Judged(
            (Part("Hugging Face Transformers", times, low * ROUNDED, up_to=inf),),
            f"{times:.1f} times the throughput of static batches that grow up to 2,048 padded tokens, as the"
            " benchmark's script forms them, and to as many as the pool holds at that length (it publishes no size, and"
            f" larger ones would lower the factor), at vLLM's step time; said: {low:g} to {high:g}",
            f"Only batching and memory are compared here: a factor of {low / times:.1f} to {high / times:.1f} is left"
            " to the longer step of Hugging Face's code, of which no published time was found; Anyscale's benchmark of"
            f" the same library asks for {values['anyscale_slowness']:.2f}.",
        )

    return judge


def _judge_tgi(name: str) -> Any:
    def judge(values: Mapping[str, float]) -> Judged:
        """From 95 % of the lower end on."""
        low, high = _blog(name)
        nothing, output = values["tgi_without_max_tokens"], values["tgi_output_as_max_tokens"]
        return Judged(
            (
                Part("TGI without max_new_tokens", nothing, low * ROUNDED),
                Part("TGI with each output's length as max_new_tokens", output, low * ROUNDED),
            ),
            f"{nothing:.1f} times TGI that reserves the model's maximum, {output:.1f} times TGI that reserves what"
            f" will come; said: {low:g} to {high:g}",
            "TGI reserves prompt + max_new_tokens at admission: the ratio depends on how far that is from the true length.",
        )

    return judge


def judge_sharing(values: Mapping[str, float]) -> Judged:
    """55 %, within 5 points, and 2.2 times from 95 % on."""
    memory, gain = _blog("memory_saving_pct_up_to"), _blog("throughput_gain_x_up_to")
    return Judged(
        (
            Part("memory that beams save", values["beams_saved_pct"], memory - 5, memory + 5),
            Part("throughput of beams over Orca (Oracle)", values["beams_over_oracle"], gain * ROUNDED),
        ),
        f"six beams save {values['beams_saved_pct']:.1f} %; {values['beams_over_oracle']:.2f} times Orca (Oracle)'s"
        " rate",
        "Saved memory raises throughput only while memory limits the batch.",
    )


def _slowness(values: Mapping[str, float]) -> float:
    """How much longer a step of naive static must take for FasterTransformer to have its published 4."""
    return anyscale.published(FASTERTRANSFORMER) / values["fastertransformer"]


def _anyscale(trial: Trial) -> Values:
    """The ratios, and the one nearest its bound, scaled so that FasterTransformer has its published 4 in this draw."""
    found = widest_ratios(trial)
    return found | {"cap_reserved_fitted": found["cap_reserved"] * _slowness(found)}


def judge_anyscale(values: Mapping[str, float]) -> Judged:
    """Within 25 % of each published ratio, against naive static at FasterTransformer's published 4."""
    fitted = _slowness(values)
    times = {
        "continuous batching that reserves the cap": (
            values["cap_reserved"] * fitted,
            anyscale.published(RESERVES_CAP),
        ),
        "continuous batching that reserves each output": (
            values["output_reserved"] * fitted,
            anyscale.published(RESERVES_OUTPUT),
        ),
        "vLLM": (values["vllm"] * fitted, anyscale.published(VLLM)),
    }
    within = 1 - anyscale.WITHIN, 1 + anyscale.WITHIN
    return Judged(
        tuple(Part(name, value / said, *within) for name, (value, said) in times.items()),
        ", ".join(f"{name} {value:.1f} (said: {said:g})" for name, (value, said) in times.items()),
        "`tools/claims/anyscale.py` has every cap, and what decides each ratio.",
    )


PROBES: Code = {
    1: (_waste, judge_waste_before),
    2: (_waste, judge_waste_after),
    3: (partial(_against_hf, n=1), _judge_hf("vs_hf_x")),
    4: (partial(_against, n=1), _judge_tgi("vs_tgi_x")),
    5: (partial(_against_hf, n=3), _judge_hf("parallel3_vs_hf_x")),
    6: (partial(_against, n=3), _judge_tgi("parallel3_vs_tgi_x")),
    7: (saving, judge_sharing),
    8: (_anyscale, judge_anyscale),
}
