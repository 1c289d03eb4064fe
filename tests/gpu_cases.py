"""Paged caches to run attention over, and what attention over them is, in float64."""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np

from fragmeter.gpu import arrays, paged_attention, source
from fragmeter.gpu.cpu_kernels import CpuKernels
from fragmeter.gpu.source import Kernel

DTYPES = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
#: Relative L2 error allowed.
TOLERANCE = {"float32": 1e-5, "float16": 1e-3, "bfloat16": 1e-2}


@dataclass(frozen=True)
class Case:
    """The arguments of ``forward``, under its names."""

    query: np.ndarray
    key_cache: np.ndarray
    value_cache: np.ndarray
    block_tables: np.ndarray
    context_lens: np.ndarray
    block_size: int
    max_context_len: int


def case(
    dtype: str, heads: tuple[int, int], head_dim: int, block_size: int, contexts: list[int], seed: int = 0
) -> Case:
    """Sequences over a shuffled cache; the second shares the first one's full blocks where both have them.

    Every slot that no sequence holds is NaN, and every table entry past a sequence's end is wild.
    """
    rng = np.random.default_rng(seed)
    num_heads, kv_heads = heads
    blocks = [-(-context // block_size) for context in contexts]
    tables = np.full((len(contexts), max(blocks) + 1), 2**30, np.int32)
    ids = iter(rng.permutation(sum(blocks) + 2))
    for sequence, count in enumerate(blocks):
        tables[sequence, :count] = [next(ids) for _ in range(count)]
    if len(contexts) > 1:
        shared = min(context // block_size for context in contexts[:2])
        tables[1, :shared] = tables[0, :shared]
    caches = [np.full((sum(blocks) + 2, block_size, kv_heads, head_dim), np.nan, DTYPES[dtype]) for _ in "kv"]
    for cache in caches:
        for sequence, context in enumerate(contexts):
            slots = slots_of(tables[sequence], context, block_size)
            cache.reshape(-1, kv_heads, head_dim)[slots] = rng.standard_normal((context, kv_heads, head_dim))
    query = rng.standard_normal((len(contexts), num_heads, head_dim)).astype(DTYPES[dtype])
    lengths = np.array(contexts, np.int32)
    return Case(query, *caches, tables, lengths, block_size, max(contexts))


def slots_of(table: np.ndarray, context: int, block_size: int) -> np.ndarray:
    tokens = np.arange(context)
    return table[tokens // block_size].astype(np.int64) * block_size + tokens % block_size


def expected(given: Case) -> np.ndarray:
    """Gathered by the block table, in float64."""
    batch, heads, head_dim = given.query.shape
    kv_heads = given.key_cache.shape[2]
    out = np.zeros(given.query.shape)
    for sequence in range(batch):
        slots = slots_of(given.block_tables[sequence], given.context_lens[sequence], given.block_size)
        if not len(slots):
            continue
        keys, values = (
            cache.reshape(-1, kv_heads, head_dim)[slots].astype(np.float64).repeat(heads // kv_heads, axis=1)
            for cache in (given.key_cache, given.value_cache)
        )
        scores = np.einsum("hd,thd->ht", given.query[sequence].astype(np.float64), keys) / np.sqrt(head_dim)
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        out[sequence] = np.einsum("ht,thd->hd", weights / weights.sum(axis=1, keepdims=True), values)
    return out


def error(out: np.ndarray, wanted: np.ndarray) -> float:
    """Relative L2, over all and of the worst row; NaN where anything is."""
    difference = np.linalg.norm(out.astype(np.float64) - wanted, axis=-1)
    return float(np.max(difference / np.maximum(np.linalg.norm(wanted, axis=-1), 1e-30)))


def run(given: Case, partition_tokens: int | None = None, seed: int = 0) -> np.ndarray:
    """The kernels over it, threads in the order of ``seed``."""
    named = vars(given) | {"out": np.full_like(given.query, np.nan)}
    sizes = {name: named.pop(name) for name in ("block_size", "max_context_len")}
    views = {name: arrays.view(name, array) for name, array in named.items()}
    call = paged_attention.checked(**views, **sizes)
    call.run(CpuKernels(seed), partition_tokens)
    return named["out"]


def planted(kernel: Kernel, right: str, wrong: str) -> Kernel:
    """The kernel with a bug."""
    assert kernel.text.count(right) == 1, "the bug has no place any more"
    return Kernel(kernel.text.replace(right, wrong), kernel.expression)


def plant_attention(monkeypatch, right: str, wrong: str) -> None:
    """A bug in the attention kernels, wherever they are asked for."""
    whole = source.attention
    monkeypatch.setattr(source, "attention", lambda expression: planted(whole(expression), right, wrong))
