"""The operations of a step as points: what was done, in the sizes that models of operations take.

A point is a dict: ``op``, its sizes, and when it has been measured ``us``, microseconds. ``sim.cost.operations`` says
what the sizes mean.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...sim.cost import gemms
from ...sim.spec import ModelSpec

Point = dict[str, Any]
#: What measuring adds to a point.
MEASURED = ("us", "iqr_us", "samples")
#: The simulator counts an element of KV as 16 bits where nothing else is said: moves of blocks do so too, in any dtype.
KV_DTYPE = "fp16"


def layer_gemms(model: ModelSpec) -> list[tuple[int, int]]:
    """``(n, k)`` of the GEMMs of a layer, on one GPU: those that costs are added up of."""
    return [(matrix.n, matrix.k) for matrix in gemms.layer_gemms(model, 0, 1, None)]


def head_gemm(model: ModelSpec) -> tuple[int, int]:
    """``(n, k)`` of the output head."""
    return model.vocab_size, model.hidden_size


def gemm(m: int, n: int, k: int) -> Point:
    """``m`` tokens by a matrix of ``k`` inputs and ``n`` outputs."""
    return {"op": "gemm", "m": m, "n": n, "k": k}


def kv_write(model: ModelSpec, tokens: int) -> Point:
    """Keys and values of one layer."""
    return {"op": "kv_write", "tokens": tokens, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}


def elementwise(model: ModelSpec, tokens: int) -> Point:
    """Norms, rotary positions, activation and residuals of one layer."""
    widths = {"hidden_size": model.hidden_size, "intermediate_size": model.intermediate_size}
    return {"op": "elementwise", "tokens": tokens, **widths}


def embedding(model: ModelSpec, tokens: int) -> Point:
    """Embedding, and what positions take once a step."""
    return {"op": "embedding", "tokens": tokens, "hidden_size": model.hidden_size}


def decode_attention(model: ModelSpec, contexts: Sequence[int], block_size: int) -> Point:
    """One layer's attention of a new token of each sequence."""
    sizes = {"batch": len(contexts), "context_tokens": sum(contexts)}
    return {"op": "decode_attention", **sizes, **_heads(model), "block_size": block_size}


def prefill_attention(model: ModelSpec, lens: Sequence[int], contexts: Sequence[int]) -> Point:
    """One layer's causal attention of the last ``lens`` of ``contexts`` tokens."""
    pairs = sum(new * (context - new) + new * (new + 1) // 2 for new, context in zip(lens, contexts, strict=True))
    sizes = {"tokens": sum(lens), "pairs": pairs, "context_tokens": sum(contexts)}
    return {"op": "prefill_attention", **sizes, **_heads(model)}


def move(op: str, model: ModelSpec, blocks: int, block_size: int) -> Point:
    """``block_copy``, ``swap_out`` or ``swap_in`` of whole blocks, all layers; a piece for K and V of each."""
    pieces = model.attention().kv_tensors * model.num_layers * blocks
    return {"op": op, "bytes": blocks * block_size * model.slot_bytes(KV_DTYPE), "blocks": pieces}


def step(rows: int) -> Point:
    """What a step takes beside its operations."""
    return {"op": "step", "rows": rows}


def key(point: Point) -> tuple[tuple[str, Any], ...]:
    """The operation and its sizes: what two points of one call have in common."""
    return tuple(sorted((name, value) for name, value in point.items() if name not in MEASURED))


def operations_of_step(
    model: ModelSpec, lens: Sequence[int], contexts: Sequence[int], block_size: int
) -> list[tuple[int, Point]]:
    """How often a step does which operation; rows with one new token decode.

    Args:
        lens: New tokens of each row.
        contexts: All its tokens, the new ones included.
    """
    tokens, layers = sum(lens), model.num_layers
    rows = list(zip(lens, contexts, strict=True))
    decodes, prompts = [row for row in rows if row[0] == 1], [row for row in rows if row[0] > 1]
    found = [(1, embedding(model, tokens)), (layers, elementwise(model, tokens)), (layers, kv_write(model, tokens))]
    found += [(layers, gemm(tokens, *shape)) for shape in layer_gemms(model)]
    if decodes:
        found.append((layers, decode_attention(model, [context for _, context in decodes], block_size)))
    if prompts:
        found.append((layers, prefill_attention(model, *zip(*prompts, strict=True))))
    return [*found, (1, gemm(len(rows), *head_gemm(model)))]


def _heads(model: ModelSpec) -> Point:
    return {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
