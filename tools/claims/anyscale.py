"""Anyscale's workload of 2023: throughput relative to naive static batching, by the cap on output lengths.

A thousand requests of 512 prompt tokens arrive at once; outputs are exponential, up to a cap. With a wider cap a
static batch waits longer for its longest output, and reserving the cap wastes more memory.

    naive static                  every batch runs to the longest output of all requests: the benchmark gives the
                                  pipeline one length for all of them, as min_length and max_length
    FasterTransformer             every batch runs to its own longest output
    continuous, cap reserved      Orca's rule in the benchmark's token budget: prompt + cap reserved for each
    continuous, output reserved   TGI as launched: the client names each output's length, and no more is reserved
    vLLM                          as launched: the budget is max_num_batched_tokens, the activations reduce the
                                  pool, and the serving loop sleeps 10 ms before every step

One number is fitted: the ratio of a naive static step (Hugging Face's model code) to a step of the other systems. It
is fitted on the published ratio of FasterTransformer at the widest cap. All other ratios are predicted. Step times are
the paper's, with DistServe's slope for the prompt tokens of a step beyond the 256th, because prompts here are longer
than those of Fig 19a.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import resources
from statistics import fmean
from typing import Any

import numpy as np

from fragmeter.experiments.paper.comparison import Payload
from fragmeter.experiments.paper.rows import STEP_CHANGES, Row, as_finding, moved, value_row
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.sim import Workload, simulate
from fragmeter.sim.cost import PaperCost, StepCost
from fragmeter.sim.cost.base import coefficient
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.sim.spec import block_bytes, gpu, model, paper_num_blocks
from fragmeter.sim.spec.pool import MAX_BATCHED_TOKENS
from fragmeter.sim.types.ticks import PER_SECOND, from_ms
from fragmeter.traces import stream


class PausedCost:
    """A ``StepCost`` with a pause of the host before every step.

    Args:
        pause_ticks: Length of the pause.
        source: Source of the pause.
    """

    def __init__(self, cost: StepCost, pause_ticks: int, source: str) -> None:
        self._cost, self._pause_ticks, self._source = cost, pause_ticks, source
        self.name = f"{cost.name}, paused"
        self.swap_out_ticks, self.swap_in_ticks = cost.swap_out_ticks, cost.swap_in_ticks
        self.copy_ticks = cost.copy_ticks

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        return self._pause_ticks + self._cost.step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``."""
        base, slope, until = self._cost.decode_line(decodes, context)
        return self._pause_ticks + base, slope, until

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        return self._cost.describe() | {"pause": coefficient(self._pause_ticks, "ticks", self._source)}


FIGURE = "anyscale"
METRIC = "times_naive_static"
SEEDS = 3
FASTERTRANSFORMER, VLLM = "FasterTransformer", "vLLM"
RESERVES_CAP, RESERVES_OUTPUT = "continuous, cap reserved", "continuous, output reserved"
SERIES = (FASTERTRANSFORMER, RESERVES_CAP, RESERVES_OUTPUT, VLLM)
NAIVE, VLLM_AWAKE = "naive static", "vLLM without the sleep"
#: Allowed error of a ratio, as a share of the published one.
WITHIN = 0.25
_DECIMALS = 3


@cache
def facts() -> Mapping[str, Any]:
    """The workload, the launch of each system, and the published ratios."""
    return json.loads(resources.files(__package__).joinpath("facts/anyscale.json").read_text("utf-8"))


def published(series: str) -> float:
    """Published throughput of each system over naive static, at the widest cap."""
    ratios = facts()["published"]["times_naive_static"]
    return ratios["continuous batching" if series in (RESERVES_CAP, RESERVES_OUTPUT) else series]


@dataclass(frozen=True)
class Drawn:
    """One draw of the workload.

    Attributes:
        output_tokens: int64 [requests].
    """

    output_tokens: np.ndarray

    @property
    def total_tokens(self) -> int:
        """Prompt and output tokens, as the benchmark counts them."""
        return int(self.output_tokens.sum()) + len(self.output_tokens) * facts()["prompt_tokens"]

    def workload(self, output_tokens: np.ndarray | int | None = None, max_tokens: int | None = None) -> Workload:
        """All requests at once, with these outputs and declared max_tokens in place of the drawn ones."""
        outputs = (
            self.output_tokens if output_tokens is None else np.broadcast_to(output_tokens, len(self.output_tokens))
        )
        declared = outputs if max_tokens is None else np.full(len(outputs), max_tokens)
        prompts = np.full(len(outputs), facts()["prompt_tokens"])
        return Workload(FIGURE, np.zeros(len(outputs), dtype=np.int64), prompts, outputs, declared)


def draw(cap: int, seed: int) -> Drawn:
    """The benchmark's ``capped_exponential``: rounded, redrawn above the cap, at least one token."""
    random, wanted = stream(seed, f"anyscale {cap}"), facts()["num_requests"]
    outputs = np.empty(0, dtype=np.int64)
    while len(outputs) < wanted:
        more = np.rint(random.exponential(facts()["mean_output_tokens"], wanted)).astype(np.int64)
        outputs = np.append(outputs, more[more <= cap])
    return Drawn(np.maximum(outputs[:wanted], 1))


def tokens_per_s(cap: int, seed: int, stretch: float = 1.0) -> dict[str, float]:
    """Throughput of every system by name; naive static has the step time of FasterTransformer here.

    Args:
        stretch: Factor on the step time of all; the benchmark's sleep is not stretched.
    """
    place, drawn = facts()["output_caps"].index(cap), draw(cap, seed)
    batch, budget = facts()["static_batch"][place], facts()["token_budget"][place]
    slope = facts()["ms_per_prefill_token_beyond_256"]
    cost = PaperCost(FITTED_STEP_SCALE * stretch, ms_per_prefill_token_beyond=slope)
    asleep = PausedCost(cost, from_ms(facts()["vllm_sleep_ms"]), facts()["vllm_sleep_source"])
    slots = {"num_gpu_blocks_override": budget, "block_size": 1}
    vllm = {"num_gpu_blocks_override": vllm_blocks(budget), "max_num_batched_tokens": budget}
    tgi = {name: facts()[name] for name in ("waiting_served_ratio", "max_waiting_tokens")}
    longest = int(drawn.output_tokens.max())
    runs: dict[str, tuple[str, dict[str, Any], Workload, StepCost]] = {
        NAIVE: ("static", {"max_num_seqs": batch}, drawn.workload(longest), cost),
        FASTERTRANSFORMER: ("fastertransformer", {"max_num_seqs": batch}, drawn.workload(), cost),
        RESERVES_CAP: ("orca", slots, drawn.workload(max_tokens=cap), cost),
        RESERVES_OUTPUT: ("tgi", slots | tgi, drawn.workload(), cost),
        VLLM: ("vllm-sosp23", vllm, drawn.workload(), asleep),
        VLLM_AWAKE: ("vllm-sosp23", vllm, drawn.workload(), cost),
    }
    return {
        name: drawn.total_tokens * PER_SECOND / simulate(paper_settings(policy=policy, **more), work, at).log.end_ticks
        for name, (policy, more, work, at) in runs.items()
    }


def vllm_blocks(budget: int) -> int:
    """The paper's pool minus the activations of a larger step: twice the logits of all its tokens, in fp16."""
    shape = model("opt-13b")
    more_bytes = 2 * (budget - MAX_BATCHED_TOKENS) * 2 * shape.vocab_size
    return paper_num_blocks(shape, gpu("a100-40gb"), 1) - -(-more_bytes // block_bytes(shape))


@dataclass(frozen=True)
class Ratios:
    """Throughput over naive static, by (series, cap), in each of several draws.

    Attributes:
        slowness: Time of a naive static step over that of the other systems, fitted.
        times: Ratios, one value per seed.
        changed: Ratios of the first seed with 1 % shorter and 1 % longer steps.
        tokens_per_s: Throughput at the widest cap, mean over seeds.
    """

    slowness: float
    times: dict[tuple[str, int], list[float]]
    changed: tuple[dict[tuple[str, int], float], ...]
    tokens_per_s: dict[str, float]


def ratios(seeds: tuple[int, ...]) -> Ratios:
    """Every ratio, with the slowness of naive static fitted over the seeds."""
    caps = facts()["output_caps"]
    found = {cap: [tokens_per_s(cap, seed) for seed in seeds] for cap in caps}
    widest = found[caps[-1]]
    fitted = published(FASTERTRANSFORMER) / fmean(rates[FASTERTRANSFORMER] / rates[NAIVE] for rates in widest)
    names = (*SERIES, VLLM_AWAKE)
    changed = ({cap: tokens_per_s(cap, seeds[0], stretch) for cap in caps} for stretch in STEP_CHANGES)
    return Ratios(
        fitted,
        {(name, cap): [_times(name, rates, fitted) for rates in found[cap]] for name in names for cap in caps},
        tuple({(name, cap): _times(name, rates[cap], fitted) for name in names for cap in caps} for rates in changed),
        {name: fmean(rates[name] for rates in widest) / (fitted if name == NAIVE else 1) for name in widest[0]},
    )


def _times(name: str, rates: Mapping[str, float], slowness: float) -> float:
    return rates[name] / rates[NAIVE] * slowness


def compare_anyscale(seeds: tuple[int, ...]) -> Payload:
    """Every ratio, with the published one at the widest cap; the text gives no numbers for other caps."""
    found = ratios(seeds)
    widest = facts()["output_caps"][-1]
    drawn = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {seeds[0]} to {seeds[-1]}"
    rows = [_row(name, cap, widest, found) for name in SERIES for cap in facts()["output_caps"]]
    return {
        "figure": FIGURE,
        "workload": f"OPT-13B on an A100-40GB, {facts()['num_requests']:,} requests at once, by output cap, {drawn}",
        "rows": rows,
        "x_is": "output cap, tokens",
        "seeds": list(seeds),
        "fit": {
            "slowness": round(found.slowness, _DECIMALS),
            "on": f"{FASTERTRANSFORMER} over naive static, at the widest cap",
            "published": published(FASTERTRANSFORMER),
        },
        "tokens_per_s": {name: round(rate, 1) for name, rate in found.tokens_per_s.items()},
        "findings": list(findings(found, widest)),
        "basis": [f"Published: {facts()['source']}; set up as its scripts do: {facts()['scripts']}.", *_basis(found)],
        "remarks": list(_remarks(found, widest)),
    }


def _row(name: str, cap: int, widest: int, found: Ratios) -> Row:
    values, fitted = found.times[name, cap], name == FASTERTRANSFORMER and cap == widest
    return value_row(
        name,
        METRIC,
        published(name) if cap == widest else None,
        values,
        x=cap,
        how=facts()["published"]["how"],
        kind="fitted" if fitted else "predicted",
        step_1pct=moved(values[:1], *([times[name, cap]] for times in found.changed)),
    )


def findings(found: Ratios, widest: int) -> Iterator[dict[str, Any]]:
    """Whether each published ratio is reproduced within ``WITHIN``."""
    for name in (RESERVES_CAP, RESERVES_OUTPUT, VLLM):
        yield _reached(name, fmean(found.times[name, widest]), published(name), ".1f", "times naive static")
    beside = facts()["published"]["naive_static_tokens_per_s_at_widest_cap"]
    yield _reached("Naive static", found.tokens_per_s[NAIVE], beside, ".0f", "tokens/s at the widest cap")


def _reached(name: str, simulated: float, beside: float, form: str, unit: str) -> dict[str, Any]:
    off = simulated / beside - 1
    values = f"{simulated:{form}} {unit}, published {beside:g}, off by {100 * off:+.0f} %, limit {100 * WITHIN:.0f} %"
    return as_finding(f"{name}: {values}.", abs(off) <= WITHIN)


def _basis(found: Ratios) -> Iterator[str]:
    yield (
        f"Naive static's step: {found.slowness:.2f} times as long as the others', fitted on {FASTERTRANSFORMER}'s"
        f" published {published(FASTERTRANSFORMER):g} at the widest cap. That the benchmark runs every naive batch to"
        f" the longest output of all makes {published(FASTERTRANSFORMER) / found.slowness:.2f} of it without any"
        " slowness."
    )
    yield (
        f"Steps: the paper's, s = {FITTED_STEP_SCALE:g} as fitted on its Fig 13a, and"
        f" {facts()['ms_per_prefill_token_beyond_256']:g} ms for each prompt token of a step beyond the 256th"
        f" ({facts()['ms_per_prefill_token_source']})."
    )


def _remarks(found: Ratios, widest: int) -> Iterator[str]:
    awake, ratio = fmean(found.times[VLLM_AWAKE, widest]), fmean(found.times[RESERVES_OUTPUT, widest])
    yield (
        f"vLLM without the 10 ms that its serving loop sleeps before every step: {awake:.1f} times naive static. The"
        " benchmark's own loop costs it that."
    )
    yield (
        "With each output's length reserved, as the benchmark's client declares it to TGI, FasterTransformer's step time"
        f" gives {ratio:.1f} of the published {published(RESERVES_OUTPUT):g}; at naive static's step time (both ran"
        f" Hugging Face's model code) {ratio / found.slowness:.1f}. TGI of 2023 also padded OPT's sequences to the"
        " longest of the batch, which is not modelled."
    )
