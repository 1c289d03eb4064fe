"""The operations of a step as points, in the arguments that the operation models take.

A point is a dict with ``op``, its sizes and, once measured, ``us`` in microseconds. ``sim.cost.operations`` defines the
sizes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...sim.cost import gemms
from ...sim.spec import ModelSpec

Point = dict[str, Any]
#: Tokens that a call of ``decode_attention`` reads again. Points with it are not those of the operation's model, but of
#: ``repeats.repeated_reads``.
REPEATED = "repeated_tokens"
#: Keys that a measurement adds to a point.
MEASURED = ("us", "iqr_us", "samples", "apart_us")
#: The simulator's default KV element has 16 bits; moves of blocks are counted in it, whatever the dtype.
KV_DTYPE = "fp16"


def layer_gemms(model: ModelSpec) -> list[tuple[int, int]]:
    """``(n, k)`` of the GEMMs of a layer on one GPU: the GEMMs that the cost model sums."""
    return [(matrix.n, matrix.k) for matrix in gemms.layer_gemms(model, 0, 1, None)]


def head_gemm(model: ModelSpec) -> tuple[int, int]:
    """``(n, k)`` of the output head."""
    return model.vocab_size, model.hidden_size


def gemm(m: int, n: int, k: int) -> Point:
    """GEMM of ``m`` tokens with a matrix of ``k`` inputs and ``n`` outputs."""
    return {"op": "gemm", "m": m, "n": n, "k": k}


def kv_write(model: ModelSpec, tokens: int) -> Point:
    """Write of the keys and values of one layer."""
    return {"op": "kv_write", "tokens": tokens, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def elementwise(model: ModelSpec, tokens: int) -> Point:
    """Norms, rotary positions, activation and residuals of one layer."""
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    return {"op": "elementwise", "tokens": tokens, **widths}


def embedding(model: ModelSpec, tokens: int) -> Point:
    """Embedding, and the position work that a step does once."""
    return {"op": "embedding", "tokens": tokens, "hidden_size": model.hidden_size}


def decode_attention(model: ModelSpec, contexts: Sequence[int], block_size: int, repeated: int = 0) -> Point:
    """One layer's decode attention, with one new token per sequence.

    Args:
        repeated: Tokens of the contexts in blocks that the table of an earlier sequence names, too.
    """
    sizes = {"batch": len(contexts), "context_tokens": sum(contexts)}
    shared = {REPEATED: repeated} if repeated else {}
    return {"op": "decode_attention", **sizes, **shared, **_heads(model), "block_size": block_size}


def prefill_attention(model: ModelSpec, lens: Sequence[int], contexts: Sequence[int]) -> Point:
    """One layer's causal attention of the last ``lens`` of ``contexts`` tokens."""
    pairs = sum(new * (context - new) + new * (new + 1) // 2 for new, context in zip(lens, contexts, strict=True))
    sizes = {"tokens": sum(lens), "pairs": pairs, "context_tokens": sum(contexts)}
    return {"op": "prefill_attention", **sizes, **_heads(model)}


def mixed_attention(model: ModelSpec, contexts: Sequence[int], tokens: int, prefix: int) -> Point:
    """One layer's attention of decodes and of a chunk of ``tokens`` after ``prefix`` tokens; ``apart_us`` is measured."""
    decode = decode_attention(model, contexts, 1)
    pairs = prefill_attention(model, [tokens], [prefix + tokens])["pairs"]
    sizes = {"batch": decode["batch"], "context_tokens": decode["context_tokens"], "tokens": tokens, "pairs": pairs}
    return {"op": "mixed_attention", **sizes, "heads": model.num_heads}


def move(op: str, model: ModelSpec, blocks: int, block_size: int) -> Point:
    """``block_copy``, ``swap_out`` or ``swap_in`` of whole blocks in all layers; K and V of a block are one piece each."""
    pieces = model.attention().kv_tensors * model.num_layers * blocks
    return {"op": op, "bytes": blocks * block_size * model.slot_bytes(KV_DTYPE), "blocks": pieces}


def step(lens: Sequence[int]) -> Point:
    """Overhead of a step beyond its operations; steps with prompts, which no graph captures, have another one.

    Args:
        lens: New tokens of each row.
    """
    if max(lens, default=1) == 1:
        return {"op": "step", "rows": len(lens)}
    return {"op": "prefill_step", "rows": len(lens), "tokens": sum(lens)}


def key(point: Point) -> tuple[tuple[str, Any], ...]:
    """The operation and its sizes, which identify the call that a point measures."""
    return tuple(sorted((name, value) for name, value in point.items() if name not in MEASURED))


def operations_of_step(
    model: ModelSpec, lens: Sequence[int], contexts: Sequence[int], block_size: int, padded: int | None = None
) -> list[tuple[int, Point]]:
    """The operations of a step and their counts; rows with one new token are decodes.

    Args:
        lens: New tokens of each row.
        contexts: All tokens of each row, including the new ones.
        padded: Rows of a captured step with its padding, which only attention skips.
    """
    tokens, layers = padded or sum(lens), model.num_layers
    rows = list(zip(lens, contexts, strict=True))
    decodes, prompts = [row for row in rows if row[0] == 1], [row for row in rows if row[0] > 1]
    found = [(1, embedding(model, tokens)), (layers, elementwise(model, tokens)), (layers, kv_write(model, tokens))]
    found += [(layers, gemm(tokens, *shape)) for shape in layer_gemms(model)]
    if decodes:
        found.append((layers, decode_attention(model, [context for _, context in decodes], block_size)))
    if prompts:
        found.append((layers, prefill_attention(model, *zip(*prompts, strict=True))))
    return [*found, (1, gemm(padded or len(rows), *head_gemm(model)))]


def _heads(model: ModelSpec) -> Point:
    return {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
