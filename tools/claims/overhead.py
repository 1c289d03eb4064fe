"""Claims that name numbers for what paging gives and takes: 22 % of waste, 520 tokens/s, 95 ms, 15 % of overhead."""

from __future__ import annotations

from collections.abc import Mapping

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.experiments.paper.published import published_fig13a, published_mean_tokens
from fragmeter.sim.cost import RooflineCost
from fragmeter.sim.cost.paper import SWAP_IN_MS_PER_BLOCK, PaperCost
from fragmeter.sim.cost.shares import SHARES
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.optional import not_none
from fragmeter.sim.types.ticks import PER_MS
from fragmeter.sim.workload.workload import Workload

from .blocks import tail_waste_pct
from .claim import Code, Judged, Part, Values
from .runs import Trial, at_once
from .throughput import ROUNDED
from .waste import EARLIER

_KI = 1024
#: Requests of a burst.
_REQUESTS = 200
#: Requests for which the closed form sums the empty slots of last blocks.
_MANY = 20_000


def _twenty_two(trial: Trial) -> Values:
    many = at_once(SYNTHETIC_SET, _MANY, trial.seed)
    rates = {
        name: trial.burst(SYNTHETIC_SET, _REQUESTS, policy)
        for name, policy in (EARLIER | {"vLLM": "vllm-sosp23"}).items()
    }
    wastes = [trial.shares(policy)["waste"] for policy in EARLIER.values()]
    shape, tokens = model("llama-2-7b"), 16 * _KI
    card = gpu("a100-80gb")
    prefill_ms = RooflineCost(shape, card).step_ticks(0, 0, tokens, tokens * (tokens + 1) // 2) / PER_MS
    return {
        "block_size_of_22_pct": float(block_size_wasting(many, 22.0)),
        "blocks_of_16_pct": tail_waste_pct(many, 16),
        "blocks_of_128_pct": tail_waste_pct(many, 128),
        "least_before_pct": min(wastes),
        "most_before_pct": max(wastes),
        **{f"throughput_over_{name}": rates["vLLM"] / rates[name] for name in EARLIER},
        "prefill_ms": prefill_ms,
        "fill_ms": 1e3 * shape.kv_bytes(tokens) / card.memory_bytes_per_s,
    }


def block_size_wasting(lengths: Workload, percent: float) -> int:
    """The smallest block size at which last blocks leave at least this share empty."""
    low, high = 1, 2 * _KI
    while low < high:
        middle = (low + high) // 2
        low, high = (middle + 1, high) if tail_waste_pct(lengths, middle) < percent else (low, middle)
    return low


def judge_twenty_two(values: Mapping[str, float]) -> Judged:
    """22 % at a block size that systems have (up to 128); 68 % within the baselines; 520 / 320 and 230 / 95, from 95
    % on.
    """
    starts = (values["prefill_ms"] + values["fill_ms"]) / values["prefill_ms"]
    return Judged(
        (
            Part("68 % before", 68.0, values["least_before_pct"], values["most_before_pct"]),
            Part("22 % after, at blocks of up to 128 tokens", values["blocks_of_128_pct"], 22 * ROUNDED),
            *(
                Part(f"1.6 times the throughput of {name}", values[f"throughput_over_{name}"], 520 / 320 * ROUNDED)
                for name in EARLIER
            ),
            Part("a start 2.4 times as fast", starts, 230 / 95 * ROUNDED),
        ),
        f"baselines waste {values['least_before_pct']:.0f} to {values['most_before_pct']:.0f} %; last blocks of 16"
        f" tokens {values['blocks_of_16_pct']:.2f} %, of 128 {values['blocks_of_128_pct']:.1f} %, and 22 % takes"
        f" {values['block_size_of_22_pct']:.0f}; throughput "
        + ", ".join(f"{values[f'throughput_over_{name}']:.2f}x {name}" for name in EARLIER)
        + f"; 16K of LLaMA-2-7B prefill in {values['prefill_ms']:,.0f} ms on an A100-80GB (roofline), of which"
        f" writing all of its memory once would be {values['fill_ms']:.1f} ms",
        "A start computes the prompt; paging changes only where its KV is allocated.",
    )


def _under_512(trial: Trial) -> Values:
    batch = not_none(published_fig13a()["vLLM", "batched_requests"])
    prompt, output = published_mean_tokens()
    context = batch * (prompt + output / 2)
    shape, card = model("opt-13b"), gpu("a100-40gb")
    step_ms = PaperCost(trial.step_scale).step_ticks(round(batch), 0, 0, 0) / PER_MS
    attention_ms = 1e3 * context * shape.slot_bytes() / (card.memory_bytes_per_s * SHARES["a100"].decode_bandwidth)
    kernel = 0.26 * attention_ms
    return {
        f"blocks_of_{size}_pct": 100 * (batch / size * SWAP_IN_MS_PER_BLOCK + kernel) / step_ms
        for size in (8, 16, 64, 256)
    } | {"kernel_pct": 100 * kernel / step_ms, "batch": batch, "step_ms": step_ms}


def judge_under_512(values: Mapping[str, float]) -> Judged:
    """At the most 15 %, from 95 % on, if a block cost the host as much as one that is swapped in."""
    sizes = (8, 16, 64, 256)
    return Judged(
        tuple(Part(f"blocks of {size} tokens", values[f"blocks_of_{size}_pct"], 15 * ROUNDED) for size in sizes),
        f"at most ({values['batch']:.1f} / b * {SWAP_IN_MS_PER_BLOCK:g} ms + 26 % of attention) /"
        f" {values['step_ms']:.1f} ms: "
        + ", ".join(f"{values[f'blocks_of_{size}_pct']:.1f} % at b = {size}" for size in sizes)
        + f", of which the kernel's {values['kernel_pct']:.1f} %",
        "A step takes one new block in b for each sequence; even at the price of a swapped block, and with the"
        " paper's slowest paged kernel, that is little.",
    )


PROBES: Code = {
    32: (_twenty_two, judge_twenty_two),
    33: (_under_512, judge_under_512),
}
