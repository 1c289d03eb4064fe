"""The cost of decode attention: piecewise linear in the context, with a term for each KV group.

A step knows how many sequences decode and their total context, not the context of each. A layer with a window of W
reads at most W tokens of each sequence, so ``min(context, decodes * W)`` in total. This is exact if all sequences have
the same length or all exceed the window, and an upper bound otherwise (a chunk of chunked attention, which starts
empty again at its end, is treated as a window). With one line for reading, one for computing, and a minimum for short
calls, decoding takes

    max(floor, per_decode * decodes + sum_g read_g * min(context, decodes * W_g),
        sum_g flops_g * min(context, decodes * W_g))

which is piecewise linear in the context, with a knot at every ``decodes * W_g``.

Compressed attention (``compressed``) is such groups, too: a window, vectors that stand for several tokens, and keys in 16 bits' flops.

Sparse attention (``Indexer``) is such groups too: latent vectors, or K and V of the layers with an indexer, with a window of ``top_k``
tokens, and the keys of the indexer. It scores all tokens, in fp8 where it chooses single ones, and writes and reads the scores. Prompts
attend to latent vectors as decodes do, and ranks divide their rows in the indexer (``tp_prefill_row_sharding_supported`` of vLLM); of an
indexer that chooses blocks they divide the heads. vLLM computes short prompts densely; this is not modelled.
"""

from __future__ import annotations

from functools import partial
from typing import NamedTuple

from ..spec.attention import Indexer, KvGroup
from ..spec.gpu import GpuSpec
from ..spec.shape import AnyAttention, ModelSpec
from ..types.ticks import PER_SECOND, PER_US
from . import shares
from .base import coefficient
from .envelope import Line, Segment, segment_at, stretches

ELEMENT_BYTES = 2


class _Group(NamedTuple):
    """A KV group: tokens of its window (0: all), ticks to read and to compute one, ticks of a prompt's pair."""

    window: int
    read: int
    flops: int
    pair: int


class AttentionCost:
    """Attention of all layers that have it on one rank, compiled to ticks.

    Of ranks that divide the tokens of a sequence each attends with the query heads of all to its part: it reads as many times less of
    the context, and as many times more queries and outputs, at the same flops.

    Args:
        kv_dtype: Number format of the KV cache.
        share: Share of the data-sheet throughput that kernels reach.
        context_ranks: Ranks that divide the tokens of a sequence.
    """

    def __init__(
        self,
        model: ModelSpec,
        gpu: GpuSpec,
        tensor_parallel: int,
        kv_dtype: str,
        share: shares.Shares,
        context_ranks: int = 1,
    ) -> None:
        layers, indexer = len(model.attention_layers), model.indexer
        kept = [group for group in model.kv_groups() if group.span.keeps_tokens]
        shapes = [(group, model.attention(tensor_parallel, group.span)) for group in kept]
        read = partial(ticks, per_second=gpu.memory_bytes_per_s * share.decode_bandwidth)
        flops = gpu.fp16_flops_per_s
        per_pair, per_token = share.prefill_factors()
        self._origin = shares.origin(gpu.architecture)
        self._floor = round(layers * shares.ATTENTION_FLOOR_US * PER_US)
        elements = sum(group.num_layers * shape.decode_elements for group, shape in shapes)
        self._read_per_decode = read(context_ranks * elements * ELEMENT_BYTES)
        pairs = sum(group.num_layers * _prefill_flops(shape, indexer) for group, shape in shapes)
        self._prefill_per_token = ticks(pairs * per_token, flops)
        self._groups = [
            _Group(
                window,
                read(shape.slot_bytes(number, kv_dtype) / context_ranks),
                ticks(number * shape.decode_flops, flops * share.gemm_flops),
                ticks(number * _prefill_flops(shape, indexer) * per_pair, flops),
            )
            for group, shape in shapes
            for window, number in _windows(group, indexer)
        ]
        if model.compressed:
            self._groups = [
                _Group(
                    each.window,
                    read(each.layers * each.vector_bytes / each.tokens),
                    ticks(each.layers * each.flops / each.tokens, flops * share.gemm_flops),
                    ticks(each.layers * each.flops * per_pair / each.tokens, flops),
                )
                for each in model.compressed.reads(model.heads_per_rank(tensor_parallel))
                if each.layers
            ]
        if indexer:
            by_token = not indexer.block_tokens
            rate = flops * shares.speedup(gpu, "fp8") if by_token else flops
            scored = len(indexer.layers) * indexer.flops(tensor_parallel)
            self._groups.append(
                _Group(
                    0,
                    read(len(indexer.layers) * (indexer.slot_bytes + indexer.score_bytes(tensor_parallel))),
                    ticks(scored, rate * share.gemm_flops),
                    ticks(scored * per_pair / (tensor_parallel if by_token else 1), rate),
                )
            )
        self._lines: dict[int, list[tuple[int, list[Line]]]] = {}

    def decode_ticks(self, decodes: int, context: int) -> int:
        """Attention of ``decodes`` new tokens to ``context`` tokens in total."""
        for start, lines in reversed(self.decode_lines(decodes)):
            if start <= context:
                break
        return max([base + slope * context for base, slope in lines])

    def decode_lines(self, decodes: int) -> list[tuple[int, list[Line]]]:
        """Lines in the context, the highest of which is the cost, and the context from which on they are valid."""
        found = self._lines.get(decodes)
        if found is None:
            found = self._lines[decodes] = self._compile_lines(decodes)
        return found

    def _compile_lines(self, decodes: int) -> list[tuple[int, list[Line]]]:
        if not decodes:
            return [(0, [(0, 0)])]
        windows = sorted({group.window for group in self._groups if group.window})
        return [(start * decodes, self._lines_past(start, decodes)) for start in (0, *windows)]

    def _lines_past(self, window: int, decodes: int) -> list[Line]:
        """The lines where windows of up to ``window`` tokens are full and the others still grow."""
        full = [group for group in self._groups if group.window and group.window <= window]
        growing = [group for group in self._groups if group not in full]
        read = self._read_per_decode * decodes + sum(group.read * group.window * decodes for group in full)
        return [
            (self._floor, 0),
            (read, sum(group.read for group in growing)),
            (sum(group.flops * group.window * decodes for group in full), sum(group.flops for group in growing)),
        ]

    def prefill_ticks(self, tokens: int, pairs: int) -> int:
        """Attention of ``tokens`` prompt tokens over ``pairs`` causal pairs, or fewer within windows."""
        ticks = self._prefill_per_token * tokens
        for group in self._groups:
            ticks += group.pair * (min(pairs, group.window * tokens) if group.window else pairs)
        return ticks

    def decode_segment(self, decodes: int, context: int) -> Segment:
        """``decode_ticks`` as a line around a context."""
        return segment_at(stretches(self.decode_lines(decodes)), context)

    def prefill_line(self) -> tuple[int, tuple[tuple[int, int], ...]]:
        """``prefill_ticks`` as ticks of a token, and (window, ticks of a pair) for each group."""
        return self._prefill_per_token, tuple((group.window, group.pair) for group in self._groups)

    def describe(self) -> dict[str, object]:
        """See ``StepCost``; a group with a window has it in the name of its coefficients."""
        published = f"data sheet of the GPU; {self._origin}"
        floor = f"{shares.PUBLISHED}: {shares.ATTENTION_FLOOR_US} us a call"
        terms: dict[str, object] = {"attention_read_per_decode": coefficient(self._read_per_decode, "ticks", published)}
        for group in self._groups:
            where = f"_window_{group.window}" if group.window else ""
            terms[f"attention_read_per_context{where}"] = coefficient(group.read, "ticks", published)
            terms[f"attention_flops_per_context{where}"] = coefficient(group.flops, "ticks", published)
            terms[f"prefill_per_pair{where}"] = coefficient(group.pair, "ticks", published)
        terms["prefill_per_token"] = coefficient(self._prefill_per_token, "ticks", published)
        return terms | {"attention_floor": coefficient(self._floor, "ticks", floor)}


def _windows(group: KvGroup, indexer: Indexer | None) -> list[tuple[int, int]]:
    """Tokens that layers of a group read at most (0: all), and their number."""
    if indexer is None:
        return [(group.span.tokens, group.num_layers)]
    if not indexer.block_tokens:
        return [(indexer.top_k, group.num_layers)]
    chosen = len(set(indexer.layers).intersection(group.layers))
    parts = [(0, group.num_layers - chosen), (indexer.top_k, chosen)]
    return [(window, number) for window, number in parts if number]


def _prefill_flops(shape: AnyAttention, indexer: Indexer | None) -> int:
    """Flops of a pair; prompts attend to chosen latent vectors as decodes do."""
    return shape.decode_flops if indexer else shape.prefill_flops


def ticks(amount: float, per_second: float) -> int:
    """Ticks for ``amount`` bytes or flops, rounded once."""
    return round(amount / per_second * PER_SECOND)
