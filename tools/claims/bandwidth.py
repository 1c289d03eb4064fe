"""Claims about what a card reads and computes in a step: what limits decoding, and how much faster it could be."""

from __future__ import annotations

from collections.abc import Mapping

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.sim.cost.shares import PUBLISHED_SHARES, SHARES
from fragmeter.sim.spec import gpu, model, paper_num_blocks
from fragmeter.sim.spec.families import read_config

from .claim import Code, Judged, Part, Values
from .runs import Trial, at_once
from .throughput import ROUNDED

_GB = 10**9
#: Batch of FasterTransformer on ShareGPT (SOSP'23, Fig 12).
_STATIC_BATCH = 5
#: Hugging Face's configuration.
GPT2 = {"model_type": "gpt2", "n_layer": 12, "n_embd": 768, "n_head": 12, "vocab_size": 50257, "n_positions": 1024}


def _one_token(trial: Trial) -> Values:
    shape, card = model("opt-13b"), gpu("a100-40gb")
    weights, flops = shape.weight_bytes(), 2 * shape.num_params
    read_s, compute_s = weights / card.memory_bytes_per_s, flops / card.fp16_flops_per_s
    return {
        "weights_gb": weights / _GB,
        "gflop_a_token": flops / _GB,
        "read_ms": 1e3 * read_s,
        "compute_ms": 1e3 * compute_s,
        "share_of_flops_pct": 100 * compute_s / read_s,
        "tokens_that_balance": read_s / compute_s,
    }


def judge_one_token(values: Mapping[str, float]) -> Judged:
    """Reading takes ten times as long as computing, or more."""
    read, compute = values["read_ms"], values["compute_ms"]
    return Judged(
        (Part("one query token", read / compute, 10),),
        f"OPT-13B, A100-40GB: {values['weights_gb']:.1f} GB / 1,555 GB/s = {read:.1f} ms to read,"
        f" {values['gflop_a_token']:.1f} GFLOP / 312 TFLOP/s = {compute:.3f} ms to compute,"
        f" {values['share_of_flops_pct']:.2f} % of the card's flops; the two take as long at"
        f" {values['tokens_that_balance']:.0f} tokens a step",
        "Every step reads every weight, whatever the number of tokens, so throughput grows with the batch.",
    )


def _bandwidth(trial: Trial) -> Values:
    reached = {f"{name}_pct": 100 * share.decode_bandwidth for name, share in PUBLISHED_SHARES.items()}
    return reached | {"padded_over_useful": padded_over_useful(trial.seed)}


def padded_over_useful(seed: int) -> float:
    """Context read by padded static batches over what of it belongs to sequences that have not ended."""
    work = at_once(SYNTHETIC_SET, 2000, seed)
    prompts, outputs = (column.reshape(-1, _STATIC_BATCH) for column in (work.prompt_tokens, work.output_tokens))
    steps, longest = outputs.max(axis=1), prompts.max(axis=1)
    padded = (_STATIC_BATCH * (steps * longest + steps * (steps + 1) // 2)).sum()
    useful = (outputs * prompts + outputs * (outputs + 1) // 2).sum()
    return float(padded / useful)


def judge_bandwidth(values: Mapping[str, float]) -> Judged:
    """A gain of 2, from 95 % on, against a kernel that reads each token once, and against one that reads padding."""
    best = {name: 100 / values[f"{name}_pct"] for name in PUBLISHED_SHARES}
    return Judged(
        (
            *(Part(f"a contiguous kernel on an {name.upper()}", gain, 2 * ROUNDED) for name, gain in best.items()),
            Part("attention over padded static batches", values["padded_over_useful"], 2 * ROUNDED),
        ),
        "published decode kernels reach "
        + ", ".join(f"{values[f'{name}_pct']:.0f} % ({name.upper()})" for name in PUBLISHED_SHARES)
        + " of the bandwidth: no kernel can be more than "
        + ", ".join(f"{gain:.2f}" for gain in best.values())
        + f" times as fast; static batches of {_STATIC_BATCH} read {values['padded_over_useful']:.1f} times what is"
        " useful",
        "Scattered blocks are at best read as fast as contiguous memory; paging gains only by not reading unused"
        " slots.",
    )


def _gpt2(trial: Trial) -> Values:
    shape, card = read_config(GPT2, "gpt2"), gpu("a100-40gb")
    context = shape.max_model_len
    kv, weights = shape.kv_bytes(context), shape.weight_bytes()
    best = 1 / SHARES[card.architecture].decode_bandwidth
    return {
        "context_tokens": context,
        "kv_mb": kv / 1e6,
        "weights_mb": weights / 1e6,
        "kv_share_pct": 100 * kv / (kv + weights),
        "one_sequence": (weights + kv) / (weights + kv / best),
        "any_batch": best,
        "sequences_that_fit": float(paper_num_blocks(shape, card, 1) * 16 // context),
    }


def judge_gpt2(values: Mapping[str, float]) -> Judged:
    """1.8 times as fast, from 95 % on, if attention went from what kernels reach to all of the bandwidth."""
    return Judged(
        (
            Part("one sequence", values["one_sequence"], 1.8 * ROUNDED),
            Part("any batch", values["any_batch"], 1.8 * ROUNDED),
        ),
        f"at its {values['context_tokens']:,.0f} tokens a sequence of GPT-2 reads {values['kv_mb']:.0f} MB of KV and"
        f" {values['weights_mb']:.0f} MB of weights ({values['kv_share_pct']:.0f} % KV): attention at full bandwidth"
        f" makes one {values['one_sequence']:.2f} and the largest batch at most {values['any_batch']:.2f} times as"
        f" fast; {values['sequences_that_fit']:,.0f} such sequences fit a 40 GB card",
        "GPT-2 has no positions for longer sequences, and so many fit a card that memory is not what limits it.",
    )


PROBES: Code = {
    18: (_one_token, judge_one_token),
    26: (_bandwidth, judge_bandwidth),
    27: (_gpt2, judge_gpt2),
}
