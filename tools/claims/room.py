"""Claims that arithmetic decides: what weights and KV take, what a card reads and computes, what crosses a link.

Bytes of a token's KV are 2 * layers * KV heads * head size * 2 in 16 bit. Pools are sized as the paper sized its own.
"""

from __future__ import annotations

from collections.abc import Mapping

from fragmeter.sim.cost import RooflineCost
from fragmeter.sim.spec import Deployment, GpuSpec, ModelSpec, gpu, model, paper_num_blocks, stage_bytes
from fragmeter.sim.spec.families import read_config
from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.types.errors import SettingError
from fragmeter.sim.types.ticks import PER_SECOND

from .claim import Code, Judged, Part, Values
from .runs import Trial
from .throughput import ROUNDED

_KI, _GB = 1024, 10**9
#: Hugging Face's configuration, of which no preset is made.
LLAMA_65B = {
    "model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64,
    "intermediate_size": 22016, "vocab_size": 32000, "max_position_embeddings": 2048,
}  # fmt: skip
#: The larger of the two memories that NVIDIA's V100 comes with (data sheet: 16 or 32 GB).
V100_BYTES = 32 * _GB
#: Model, card, cards and number format of the KV of each question whether a context fits.
_FITS = (
    ("opt-13b", "a100-80gb", 1, "fp16"),
    ("llama-2-7b", "a100-80gb", 1, "fp16"),
    ("llama-3.1-8b", "a100-40gb", 1, "fp16"),
    ("llama-3.1-8b", "a100-40gb", 1, "fp8"),
    ("llama-3.1-8b", "a100-80gb", 1, "fp16"),
    ("llama-3.1-70b", "h200", 1, "fp8"),
    ("llama-3.1-70b", "h200", 2, "fp16"),
)


def _contexts(trial: Trial) -> Values:
    return {_fit_name(*fit): _room_tokens(*fit) / _KI for fit in _FITS}


def _fit_name(name: str, card: str, cards: int, dtype: str) -> str:
    return f"{name} on {cards} {card}, {dtype} KV"


def _room_tokens(name: str, card: str, cards: int, dtype: str) -> float:
    try:
        return float(paper_num_blocks(model(name), gpu(card), cards, 16, Deployment(kv_dtype=dtype)) * 16)
    except SettingError:
        return 0.0


def judge_contexts(values: Mapping[str, float]) -> Judged:
    """The pool holds one sequence of 256K tokens."""
    return Judged(
        tuple(Part(name, values[name], 256) for name in (_fit_name(*fit) for fit in _FITS)),
        "tokens that the pool holds: "
        + ", ".join(f"{values[_fit_name(*fit)]:,.0f}K {_fit_name(*fit)}" for fit in _FITS)
        + "; over 32K: "
        + ", ".join(_fit_name(*fit) for fit in _FITS if values[_fit_name(*fit)] > 32),
        "Bytes per token decide; they follow from KV heads, layers and number format, and paging changes none of them."
        " None of these models has 256K positions as it is published.",
    )


def _pipeline(trial: Trial) -> Values:
    """What crosses with blocks of 16, and with one block for the whole context."""
    shape, card, tokens = model("llama-3.1-70b"), gpu("h200"), 256 * _KI
    two_stages = Deployment(pipeline_parallel=2)
    hops = {
        size: RooflineCost(shape, card, 1, block_size=size, deployment=two_stages).hop_ticks(tokens)
        for size in (16, tokens)
    }
    return {
        "activations_gb": tokens * shape.hidden_size * 2 / _GB,
        "kv_gb": shape.kv_bytes(tokens) / _GB,
        "saved_pct": 100 * (1 - hops[16] / hops[tokens]),
    }


def judge_pipeline(values: Mapping[str, float]) -> Judged:
    """76 % less crosses, from 95 % of that on."""
    return Judged(
        (Part("what crosses from stage to stage", values["saved_pct"], 76 * ROUNDED),),
        f"LLaMA-3.1-70B, 256K tokens: 262,144 * 8,192 * 2 = {values['activations_gb']:.1f} GB of activations cross"
        f" from one stage to the next, paged or not: {values['saved_pct']:.0f} % less; {values['kv_gb']:.0f} GB of"
        " KV stay with their layers",
        "A stage keeps the KV of its own layers, and no stage asks for another's.",
    )


def _sixty_five(trial: Trial) -> Values:
    shape, card, tokens = read_config(LLAMA_65B, "llama-65b"), gpu("a100-80gb"), 16 * _KI
    usable = int(0.95 * card.memory_bytes) - GIB
    found = {"fp16_weights_gb": stage_bytes(shape)[0] / _GB, "usable_gb": usable / _GB}
    found |= {f"kv_{dtype}_gb": shape.kv_bytes(tokens, dtype) / _GB for dtype in ("fp16", "fp8", "int4")}
    found["int4_weights_gb"] = stage_bytes(shape, quantization="awq")[0] / _GB
    for dtype in ("fp16", "fp8", "int4"):
        found[f"tokens_per_s_{dtype}"] = _decode_tokens_per_s(shape, card, tokens, dtype)
    return found


def _decode_tokens_per_s(shape: ModelSpec, card: GpuSpec, tokens: int, dtype: str) -> float:
    """With 4-bit weights and as many sequences of so many tokens as fit; 0 where none does."""
    deployment = Deployment(kv_dtype=dtype, quantization="awq")
    batch = paper_num_blocks(shape, card, 1, 16, deployment) * 16 // tokens
    if not batch:
        return 0.0
    step = RooflineCost(shape, card, deployment=deployment).step_ticks(batch, batch * tokens, 0, 0)
    return batch * PER_SECOND / step


def judge_sixty_five(values: Mapping[str, float]) -> Judged:
    """The weights fit; 820 tokens/s, from 95 % on, with weights of 4 bits and KV of 16, 8 and 4."""
    rates = {dtype: values[f"tokens_per_s_{dtype}"] for dtype in ("fp16", "fp8", "int4")}
    return Judged(
        (
            Part("weights of 16 bits, which fit", values["usable_gb"] - values["fp16_weights_gb"], 0),
            *(Part(f"4-bit weights and {dtype} KV", rate, 820 * ROUNDED) for dtype, rate in rates.items()),
        ),
        f"weights {values['fp16_weights_gb']:.0f} GB in fp16, {values['int4_weights_gb']:.0f} GB in 4 bits, of"
        f" {values['usable_gb']:.0f} GB; KV of 16K tokens 2 * 80 * 64 * 128 * 2 * 16,384 = {values['kv_fp16_gb']:.0f}"
        f" GB in fp16, {values['kv_fp8_gb']:.0f} in fp8, {values['kv_int4_gb']:.0f} in int4; with 4-bit weights at"
        " 16K"
        " (roofline) " + ", ".join(f"{rate:.0f} tokens/s ({dtype} KV)" for dtype, rate in rates.items()),
        "Each token of each sequence reads all of its KV; at 16K so few sequences fit that a read of the weights"
        " serves only a few tokens.",
    )


def _parameters(trial: Trial) -> Values:
    shape, card = model("opt-13b"), gpu("a100-40gb")
    return {
        "bytes_of_20b": 20e9 * 2,
        "v100_bytes": float(V100_BYTES),
        "weights_gb": shape.weight_bytes() / _GB,
        "card_gb": card.memory_bytes / _GB,
    }


def judge_parameters(values: Mapping[str, float]) -> Judged:
    """The claim: the weights of 20 billion parameters fit on the card, and without any KV cache 2.5 times as many would (95 % of that passes)."""
    weights, card = values["bytes_of_20b"], values["v100_bytes"]
    most = values["card_gb"] / values["weights_gb"]
    return Judged(
        (
            Part("2.5 times the parameters", most, 2.5 * ROUNDED),
            Part("20B on a V100", card - weights, 0),
        ),
        f"if the cache of OPT-13B took nothing at all, an A100-40GB would hold {values['card_gb']:.1f} /"
        f" {values['weights_gb']:.1f} GB = {most:.2f} times its parameters; 20e9 * 2 bytes = {weights / _GB:.0f} GB"
        f" in fp16, and the largest V100 has {card / _GB:.0f} GB",
        "Paging manages the KV cache; weights are not part of it. There is no V100 of 40 GB.",
    )


PROBES: Code = {
    24: (_contexts, judge_contexts),
    28: (_pipeline, judge_pipeline),
    30: (_sixty_five, judge_sixty_five),
    31: (_parameters, judge_parameters),
}
