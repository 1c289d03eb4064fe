"""The operations of a step as points, in the arguments that the operation models take.

A point is a dict with ``op``, its sizes and, once measured, ``us`` in microseconds. ``sim.cost.op_work`` defines the
sizes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import median
from typing import Any

from ...sim.cost import gemms
from ...sim.cost.op_work import ELEMENT_BYTES
from ...sim.spec import ModelSpec
from ...sim.spec.deployment import dtype_bits

Point = dict[str, Any]
#: Tokens that a call of ``decode_attention`` reads again. Points with it are not those of the operation's model, but of
#: ``repeats.repeated_reads``.
REPEATED = "repeated_tokens"
#: Keys that a measurement adds to a point.
MEASURED = ("us", "iqr_us", "samples", "apart_us")
#: Number formats of a KV element by the name of the cache's: the simulator's default has 16 bits, and is counted so, whatever the dtype.
KV_DTYPES = {"auto": "fp16", "fp8": "fp8"}


def layer_gemms(model: ModelSpec) -> list[tuple[int, int]]:
    """``(n, k)`` of the GEMMs of a layer on one GPU: the GEMMs that the cost model sums."""
    return [(matrix.n, matrix.k) for matrix in gemms.layer_gemms(model, 0, 1, None)]


def head_gemm(model: ModelSpec) -> tuple[int, int]:
    """``(n, k)`` of the output head."""
    return model.vocab_size, model.hidden_size


def gemm(m: int, n: int, k: int) -> Point:
    """GEMM of ``m`` tokens with a matrix of ``k`` inputs and ``n`` outputs."""
    return {"op": "gemm", "m": m, "n": n, "k": k}


def kv_write(model: ModelSpec, tokens: int, kv_cache_dtype: str = "auto") -> Point:
    """Write of the keys and values of one layer."""
    sizes = {"tokens": tokens, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
    return {"op": "kv_write", **sizes, **_element(kv_cache_dtype)}


def elementwise(model: ModelSpec, tokens: int) -> Point:
    """Norms, rotary positions, activation and residuals of one layer."""
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    return {"op": "elementwise", "tokens": tokens, **widths}


def embedding(model: ModelSpec, tokens: int) -> Point:
    """Embedding, and the position work that a step does once."""
    return {"op": "embedding", "tokens": tokens, "hidden_size": model.hidden_size}


def decode_attention(
    model: ModelSpec, contexts: Sequence[int], block_size: int, repeated: int = 0, kv_cache_dtype: str = "auto"
) -> Point:
    """One layer's decode attention, with one new token per sequence.

    Args:
        repeated: Tokens of the contexts in blocks that the table of an earlier sequence names, too.
    """
    sizes = {"batch": len(contexts), "context_tokens": sum(contexts)}
    shared = {REPEATED: repeated} if repeated else {}
    element = _element(kv_cache_dtype)
    return {"op": "decode_attention", **sizes, **shared, **_heads(model), "block_size": block_size, **element}


def contiguous_attention(model: ModelSpec, contexts: Sequence[int], kv_cache_dtype: str = "auto") -> Point:
    """One layer's decode attention over sequences that each lie in one piece."""
    sizes = {"batch": len(contexts), "context_tokens": sum(contexts)}
    return {"op": "contiguous_attention", **sizes, **_heads(model), **_element(kv_cache_dtype)}


def prefill_attention(
    model: ModelSpec, lens: Sequence[int], contexts: Sequence[int], kv_cache_dtype: str = "auto"
) -> Point:
    """One layer's causal attention of the last ``lens`` of ``contexts`` tokens."""
    pairs = sum(new * (context - new) + new * (new + 1) // 2 for new, context in zip(lens, contexts, strict=True))
    sizes = {"tokens": sum(lens), "pairs": pairs, "context_tokens": sum(contexts)}
    return {"op": "prefill_attention", **sizes, **_heads(model), **_element(kv_cache_dtype)}


def mixed_attention(model: ModelSpec, contexts: Sequence[int], tokens: int, prefix: int) -> Point:
    """One layer's attention of decodes and of a chunk of ``tokens`` after ``prefix`` tokens; ``apart_us`` is measured."""
    decode = decode_attention(model, contexts, 1)
    pairs = prefill_attention(model, [tokens], [prefix + tokens])["pairs"]
    sizes = {"batch": decode["batch"], "context_tokens": decode["context_tokens"], "tokens": tokens, "pairs": pairs}
    return {"op": "mixed_attention", **sizes, "heads": model.num_heads}


def move(op: str, model: ModelSpec, blocks: int, block_size: int, kv_cache_dtype: str = "auto") -> Point:
    """``block_copy``, ``swap_out`` or ``swap_in`` of whole blocks in all layers; K and V of a block are one piece each."""
    pieces = model.attention().kv_tensors * model.num_layers * blocks
    return {"op": op, "bytes": blocks * block_size * model.slot_bytes(KV_DTYPES[kv_cache_dtype]), "blocks": pieces}


def step(lens: Sequence[int], kv_bytes: int = 0) -> Point:
    """Overhead of a step beyond its operations; steps with prompts, which no graph captures, have another one.

    Args:
        lens: New tokens of each row.
        kv_bytes: KV that a step of decodes reads in all layers; 0 where that slows no GEMM.
    """
    if max(lens, default=1) == 1:
        read = {"kv_bytes": kv_bytes} if kv_bytes else {}
        return {"op": "step", "rows": len(lens), **read}
    return {"op": "prefill_step", "rows": len(lens), "tokens": sum(lens)}


#: By what calls of an operation differ in what they leave of the weights in the caches. All that has a number of tokens is one kind: a
#: step runs it over the same tokens.
_SIZES = {
    "gemm": ("layer", "m"),
    **dict.fromkeys(("kv_write", "elementwise", "embedding"), ("layer", "tokens")),
    "step": ("step", "kv_bytes"),
    "prefill_step": ("prefill_step", "tokens"),
}


def kind(point: Point) -> tuple[str, int]:
    """Kind and size of a call, by which calls are sampled behind those that leave the caches alike."""
    name, size = _SIZES.get(point["op"], (point["op"], "context_tokens"))
    return name, int(point[size] if size in point else point.get("bytes", 0))


def key(point: Point) -> tuple[tuple[str, Any], ...]:
    """The operation and its sizes, which identify the call that a point measures."""
    return tuple(sorted((name, value) for name, value in point.items() if name not in MEASURED))


def operations_of_step(
    model: ModelSpec,
    lens: Sequence[int],
    contexts: Sequence[int],
    block_size: int,
    padded: int | None = None,
    kv_cache_dtype: str = "auto",
) -> list[tuple[int, Point]]:
    """The operations of a step and their counts; rows with one new token are decodes.

    Args:
        lens: New tokens of each row.
        contexts: All tokens of each row, including the new ones.
        padded: Rows of a captured step with its padding, which only attention skips.
        kv_cache_dtype: Number format of the KV cache, a key of :data:`KV_DTYPES`.
    """
    kept = kv_cache_dtype
    tokens, layers = padded or sum(lens), model.num_layers
    rows = list(zip(lens, contexts, strict=True))
    decodes, prompts = [row for row in rows if row[0] == 1], [row for row in rows if row[0] > 1]
    found = [
        (1, embedding(model, tokens)),
        (layers, elementwise(model, tokens)),
        (layers, kv_write(model, tokens, kept)),
    ]
    found += [(layers, gemm(tokens, *shape)) for shape in layer_gemms(model)]
    if decodes:
        of_decodes = [context for _, context in decodes]
        found.append((layers, decode_attention(model, of_decodes, block_size, kv_cache_dtype=kept)))
    if prompts:
        new, held = ([row[which] for row in prompts] for which in (0, 1))
        found.append((layers, prefill_attention(model, new, held, kept)))
    return [*found, (1, gemm(padded or len(rows), *head_gemm(model)))]


def _element(kv_cache_dtype: str) -> Point:
    """The size of a KV element where it is not that of 16 bits, the default of the operations."""
    bytes_of_element = dtype_bits(KV_DTYPES[kv_cache_dtype]) / 8
    return {} if bytes_of_element == ELEMENT_BYTES else {"kv_element_bytes": bytes_of_element}


def _heads(model: ModelSpec) -> Point:
    return {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def spread(measured: Iterable[Point]) -> dict[str, float]:
    """The interquartile range of the samples over their time, by operation, in the median of its points.

    The rest of a step counts over the whole step.
    """
    shares = defaultdict(list)
    for point in measured:
        shares[point["op"]].append(point["iqr_us"] / point.get("whole_us", point["us"]))
    return {op: median(found) for op, found in shares.items()}
