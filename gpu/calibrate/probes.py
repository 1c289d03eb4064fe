"""Probes of a calibration: one call per point, of the same code that a skeleton's step runs.

In a step, all other layers run between two uses of weights and cache blocks. Probes therefore take the weights of one layer after
the other, and rotate through as much data as a model has weights: where these fit into the last-level cache they stay there from
one step to the next, and elsewhere they are cold. Activations come directly from the previous operation and are warm. On a CPU
the code is cold as well: untimed, a layer runs between two of its GEMMs, and its GEMMs between two calls of any other operation. On
every device some steps run before each step.
"""

from __future__ import annotations

import functools
import itertools
import math
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..devices.timing import Stopwatch, Work
from ..model.batch import Batch, Rows
from ..model.calls import Attention
from ..model.graphs import captured_size
from ..model.layers import Matrix, multiply
from ..model.skeleton import DTYPES, Skeleton
from ..ops.prepared import Call
from . import points
from .grid import Grid
from .points import Point

#: Maximum number of tables and slots that a probe rotates through.
MOST_TURNS = 16
#: The matrices of a layer.
MATRICES = ("qkv", "output", "up", "down")
#: Untimed steps before a step. Of steps of 5 rows on a CPU, the first behind a prompt of 256 tokens took 33 % more than the seventh, the
#: second 16 % and the fourth 4 %. On an H200 decodes took 6.9 ms, and the first behind a prompt 0.5 to 0.9 ms more, the fourth 0.1 to 0.3.
STEPS_BEFORE, CAPTURED_BEFORE = 3, 6
#: Rows of the untimed GEMMs between calls of other operations.
GEMM_BETWEEN_TOKENS = 4

Item = TypeVar("Item")


class Probe(NamedTuple):
    """One point and its call.

    Attributes:
        point: The measured operation and its sizes.
        work: The call.
        captured: Whether a GPU may replay the call as a graph; false if the host takes part.
        parts: Points; the sum of their times is the point's ``apart_us``.
    """

    point: Point
    work: Work
    captured: bool = True
    parts: tuple[Point, ...] = ()


class StepProbe(NamedTuple):
    """A whole step: the point of what it takes beyond its operations, and these with their counts."""

    point: Point
    work: Work
    parts: list[tuple[int, Point]]


class Probes:
    """All probes of a skeleton.

    Args:
        skeleton: The skeleton with the weights and the pool to measure.
        grid: The sizes to measure.
        stopwatch: Gives the size of the buffers that a probe rotates through, and excludes untimed work.
        seed: Seed of lengths, tables and token ids.
    """

    def __init__(self, skeleton: Skeleton, grid: Grid, stopwatch: Stopwatch, seed: int) -> None:
        self._skeleton, self._grid, self._stopwatch = skeleton, grid, stopwatch
        self._model, self._pool, self._device = skeleton.model, skeleton.pool, skeleton.device
        self._seed, self._rng = seed, np.random.default_rng(seed)
        self._dtype, self._kv_cache_dtype = DTYPES[skeleton.dtype], skeleton.kv_cache_dtype
        # More than three caches are as cold as the weights of the largest model.
        self._passing_bytes = min(stopwatch.cold_bytes, self._model.weight_bytes(skeleton.dtype))
        self._between = [self._multiplying(GEMM_BETWEEN_TOKENS, name) for name in MATRICES]
        self._passed = itertools.count()

    def operations(self) -> Iterator[Probe]:
        """All probes of single operations, ordered by operation."""
        step_lens = [lens for lens, _ in self._step_shapes()]
        sizes = sorted({*self._grid.tokens, *map(sum, step_lens)})
        # Every new token needs a slot of its own.
        for tokens in sizes[: bisect_right(sizes, self._pool.num_slots)]:
            layer = self._layer(tokens)
            yield from (self._gemm(tokens, name, layer) for name in MATRICES)
            yield from (self._kv_write(tokens), self._elementwise(tokens), self._embedding(tokens))
        yield from (self._head(rows) for rows in sorted({*self._grid.head_rows, *map(len, step_lens)}))
        yield from self._decodes()
        yield from self._prefills()
        for batch, context, chunk, prefix in self._grid.mixed:
            contexts = self._about(batch, context)
            if self._fits([*contexts, prefix + chunk]):
                yield self._mixed(contexts, chunk, prefix)
        for blocks in self._grid.moved_blocks:
            yield from self._moves(blocks)

    def steps(self) -> Iterator[StepProbe]:
        """Probes of whole steps; each operation of a step also has a probe of its own."""
        yield from (self._step(lens, contexts) for lens, contexts in self._step_shapes())

    def _step_shapes(self) -> Iterator[tuple[list[int], list[int]]]:
        """New tokens and all tokens of each row; shapes that do not fit the pool are left out."""
        for batch, context, prompt in self._grid.steps:
            prompts = [prompt] if prompt else []
            lens, contexts = [1] * batch + prompts, self._about(batch, context) + prompts
            if self._fits(contexts):
                yield lens, contexts

    def _multiplying(self, tokens: int, name: str) -> Work:
        """The same matrix of one layer after the other."""
        layers = self._skeleton.weights.layers
        hidden = self._random(tokens, getattr(layers[0], name).weight.shape[1])
        return lambda number: multiply(hidden, getattr(_turn(layers, number), name))

    def _layer(self, tokens: int) -> Work:
        """One layer after the other, without its attention."""
        layers, hidden = self._skeleton.weights.layers, self._random(tokens, self._model.hidden_size)
        _, rotary = self._skeleton.weights.embed(*self._new_tokens(tokens))
        return lambda number: _turn(layers, number).forward(hidden, rotary, lambda query, *_: query)

    def _gemm(self, tokens: int, name: str, layer: Work) -> Probe:
        multiplying = self._multiplying(tokens, name)
        outputs, inputs = getattr(self._skeleton.weights.layers[0], name).weight.shape

        def work(number: int) -> None:
            # The layer before: its own would leave the matrix in the caches.
            self._stopwatch.aside(lambda: layer(number - 1))
            multiplying(number)

        return Probe(points.gemm(tokens, outputs, inputs), work)

    def _head(self, rows: int) -> Probe:
        """The output head, behind all layers, or as many as three caches hold."""
        weights, layer = self._skeleton.weights, self._layer(rows)
        outputs, inputs = weights.head.weight.shape
        hidden = self._random(rows, inputs)
        each = sum(getattr(weights.layers[0], name).weight.nbytes for name in MATRICES)
        behind = range(min(len(weights.layers), -(-self._stopwatch.cold_bytes // each)))

        def pass_layers() -> None:
            for number in behind:
                layer(number)

        def work(_: int) -> None:
            self._stopwatch.aside(pass_layers)
            multiply(hidden, weights.head)

        return Probe(points.gemm(rows, outputs, inputs), work)

    def _pass(self, gemms: Sequence[Work], *inputs: Tensor) -> None:
        """Run untimed work that a step does between two calls: these GEMMs, and the production of the next call's inputs."""
        number = next(self._passed)

        def between() -> None:
            for gemm in gemms:
                gemm(number)
            for tensor in inputs:
                tensor.clone()

        self._stopwatch.aside(between)

    def _kv_write(self, tokens: int) -> Probe:
        key, value = (self._random(tokens, self._model.num_kv_heads, self._model.head_dim) for _ in range(2))
        slots = [
            self._put(self._rng.choice(self._pool.num_slots, tokens, replace=False))
            for _ in range(self._turns(key.nbytes))
        ]
        layers = [self._pool.layer(number) for number in range(self._model.num_layers)]

        def work(number: int) -> None:
            self._pass(self._between, key, value)
            keys, values, *scales = _turn(layers, number)
            tensors = (key, value, keys, values)
            self._device.run(Call("reshape_and_cache", tensors, (_turn(slots, number),), tuple(scales)))

        return Probe(points.kv_write(self._model, tokens, self._kv_cache_dtype), work)

    def _elementwise(self, tokens: int) -> Probe:
        """A layer without the time of its GEMMs and attention, which return prepared tensors."""
        hidden = self._random(tokens, self._model.hidden_size)
        first = self._skeleton.weights.layers[0]
        matrices = (getattr(first, name) for name in MATRICES)
        ready = {matrix.weight.shape: self._random(tokens, len(matrix.weight)) for matrix in matrices}
        layers, (_, rotary) = self._skeleton.weights.layers, self._skeleton.weights.embed(*self._new_tokens(tokens))
        gemms = itertools.cycle(self._between)

        def multiplied(_: Tensor, matrix: Matrix) -> Tensor:
            self._pass([next(gemms)])
            return ready[matrix.weight.shape]

        def work(number: int) -> None:
            _turn(layers, number).forward(hidden, rotary, lambda query, *_: query, multiplied)

        return Probe(points.elementwise(self._model, tokens), work)

    def _embedding(self, tokens: int) -> Probe:
        drawn = [self._new_tokens(tokens) for _ in range(MOST_TURNS)]

        def work(number: int) -> None:
            self._pass(self._between)
            self._skeleton.weights.embed(*_turn(drawn, number))

        return Probe(points.embedding(self._model, tokens), work)

    def _decodes(self) -> Iterator[Probe]:
        grid, own = self._grid, self._pool.block_size
        for batch in grid.batches:
            alike = (self._about(batch, context) for context in grid.contexts)
            yield from (self._decode(contexts, own) for contexts in alike if self._fits(contexts))
        for batch, mean in grid.ragged:
            if not self._fits([2 * mean] * batch):
                continue
            yield self._decode(self._rng.integers(1, 2 * mean, batch).tolist(), own)
            fitting = (size for size in grid.block_sizes if self._pool.num_slots % size == 0)
            yield from (self._decode(self._about(batch, mean), block_size) for block_size in fitting)

        for batch, context, group in grid.shared:
            if self._fits(contexts := self._about(batch, context)):
                yield self._decode(contexts, own, group=group)
        for batch, context in grid.contiguous:
            if self._fits(contexts := self._about(batch, context)):
                yield self._contiguous(contexts)

    def _decode(self, contexts: list[int], block_size: int, alone: bool = True, group: int = 1) -> Probe:
        """Decode attention, with the padding of a captured step if the skeleton captures steps that decode ``alone``.

        Args:
            group: See ``_repeats``.
        """
        repeated = sum(_repeats(contexts, block_size, group)) * block_size
        point = points.decode_attention(self._model, contexts, block_size, repeated, self._kv_cache_dtype)
        held, longest = contexts, max(contexts)
        if alone and self._skeleton.captures:
            rows, blocks = captured_size(len(contexts), longest, block_size)
            held, longest = contexts + [0] * (rows - len(contexts)), blocks * block_size
        query = self._random(len(held), self._model.num_heads, self._model.head_dim)
        return Probe(point, self._attention(query, held, block_size, longest=longest, group=group))

    def _contiguous(self, contexts: list[int]) -> Probe:
        """Decode attention over one piece for each sequence, at random places of the pool."""
        query = self._random(len(contexts), self._model.num_heads, self._model.head_dim)
        point = points.contiguous_attention(self._model, contexts, self._kv_cache_dtype)
        held, longest = self._put(np.asarray(contexts, np.int32)), max(contexts)

        def rows() -> Rows:
            # Pieces in a random order, and what is left of the pool before, between and behind them.
            order = self._rng.permutation(len(contexts))
            cuts = np.sort(self._rng.integers(self._pool.num_slots - sum(contexts) + 1, size=len(contexts)))
            starts = np.empty(len(contexts), np.int64)
            starts[order] = cuts + np.cumsum([0, *np.asarray(contexts)[order][:-1]])
            every = slice(0, len(contexts))
            return Rows(every, held, longest, self._pool.block_size, slot_starts=self._put(starts))

        return Probe(point, self._attending(query, rows, sum(contexts)))

    def _prefills(self) -> Iterator[Probe]:
        for tokens in self._grid.chunks:
            fitting = (prefix for prefix in self._grid.prefixes if self._fits([prefix + tokens]))
            yield from (self._prefill([tokens], [prefix + tokens]) for prefix in fitting)
        for prompts, tokens in self._grid.prompts:
            if self._fits([tokens] * prompts):
                yield self._prefill([tokens] * prompts, [tokens] * prompts)

    def _prefill(self, lens: list[int], contexts: list[int]) -> Probe:
        query = self._random(sum(lens), self._model.num_heads, self._model.head_dim)
        point = points.prefill_attention(self._model, lens, contexts, self._kv_cache_dtype)
        return Probe(point, self._attention(query, contexts, self._pool.block_size, lens))

    def _mixed(self, contexts: list[int], chunk: int, prefix: int) -> Probe:
        """Attention of a step that decodes and prefills, in the calls that a skeleton makes."""
        decode = self._decode(contexts, self._pool.block_size, alone=False)
        prefill = self._prefill([chunk], [prefix + chunk])
        point = points.mixed_attention(self._model, contexts, chunk, prefix)

        def work(number: int) -> None:
            decode.work(number)
            prefill.work(number)

        return Probe(point, work, parts=(decode.point, prefill.point))

    def _attention(
        self,
        query: Tensor,
        contexts: list[int],
        block_size: int,
        lens: Sequence[int] = (),
        longest: int | None = None,
        group: int = 1,
    ) -> Work:
        """Attention to random blocks of each layer in turn.

        Args:
            lens: New tokens of prompts; none for decodes.
            longest: Upper bound of the lengths; None is the longest context.
            group: See ``_repeats``.
        """
        distinct = sum(contexts) - sum(_repeats(contexts, block_size, group)) * block_size
        held = self._put(np.asarray(contexts, np.int32))
        starts = self._put(np.cumsum([0, *lens], dtype=np.int32)) if lens else None
        most = longest or max(contexts)

        def rows() -> Rows:
            table = self._table(contexts, block_size, most, group)
            return Rows(slice(0, len(query)), held, most, block_size, table, None, starts, max(lens, default=1))

        return self._attending(query, rows, distinct)

    def _attending(self, query: Tensor, draw: Callable[[], Rows], distinct: int) -> Work:
        """Attention in each layer in turn, and then over the next of some rows.

        Args:
            draw: Draws rows.
            distinct: Tokens that they read.
        """
        out, layers = torch.empty_like(query), self._model.num_layers
        read = 2 * distinct * self._pool.keys[0][0, 0].nbytes
        rows = [draw() for _ in range(self._turns(read * layers))]
        attention: Attention | None = None

        def work(number: int) -> None:
            self._pass(self._between, query)
            nonlocal attention
            turn, layer = divmod(number, layers)
            # As in a step, one call for all layers. A capture begins with number 0, so that its buffers are its own.
            if layer == 0 or attention is None:
                attention = Attention(self._device, _turn(rows, turn))
            attention(out, query, *self._pool.layer(layer))

        return work

    def _table(self, contexts: list[int], block_size: int, longest: int | None = None, group: int = 1) -> Tensor:
        """Block ids in random order, in columns for ``longest`` tokens; None is the longest context. They are distinct but for
        those that a group has in common (``_repeats``)."""
        blocks = -(-np.asarray(contexts) // block_size)
        columns = -(-(longest or max(contexts)) // block_size)
        table = np.zeros((len(blocks), columns), np.int32)
        ids = self._rng.permutation(self._pool.num_slots // block_size)
        table[np.arange(columns) < blocks[:, None]] = ids[: blocks.sum()]
        for row, common in enumerate(_repeats(contexts, block_size, group)):
            table[row, :common] = table[row - row % group, :common]
        return self._put(table)

    def _moves(self, blocks: int) -> Iterator[Probe]:
        """Copies on the device, and swaps in both directions, of random blocks."""
        pool, block_size = self._pool, self._pool.block_size
        on_device = [self._rng.permutation(pool.num_blocks)[: 2 * blocks].reshape(2, blocks) for _ in range(MOST_TURNS)]
        on_host = [self._rng.permutation(pool.host_blocks)[:blocks] for _ in range(MOST_TURNS)]
        moves: dict[str, tuple[Callable[[np.ndarray], object], list[tuple[np.ndarray, np.ndarray]]]] = {
            "block_copy": (pool.copy, [(ids[0], ids[1]) for ids in on_device]),
            "swap_out": (pool.swap_out, [(ids[0], host) for ids, host in zip(on_device, on_host, strict=True)]),
            "swap_in": (pool.swap_in, [(host, ids[0]) for ids, host in zip(on_device, on_host, strict=True)]),
        }
        for op, (moving, ends) in moves.items():
            pairs = [np.stack(both, axis=1) for both in ends]
            point = points.move(op, self._model, blocks, block_size, self._kv_cache_dtype)
            yield Probe(point, _moving(moving, pairs), captured=False)

    def _step(self, lens: list[int], contexts: list[int]) -> StepProbe:
        block_size, model = self._pool.block_size, self._model
        token_ids = self._rng.integers(model.vocab_size, size=sum(lens))
        tables = self._table(contexts, block_size).cpu().numpy()
        batch = Batch.paged(lens, contexts, token_ids, tables, block_size)
        kept = self._kv_cache_dtype
        parts = points.operations_of_step(model, lens, contexts, block_size, kv_cache_dtype=kept)

        # On a GPU behind decodes of the same sequences: those are most steps, and short.
        decodes = Batch.paged([1] * len(lens), contexts, token_ids[: len(lens)], tables, block_size)
        before = [decodes] * CAPTURED_BEFORE if self._skeleton.captures else [batch] * STEPS_BEFORE

        def work(_: int) -> None:
            for one in before:
                self._stopwatch.before(functools.partial(self._skeleton.step, one))
            self._skeleton.step(batch)

        # On a GPU weights come from memory in any case.
        evicting = 0 if self._skeleton.captures else sum(contexts) * model.slot_bytes(points.KV_DTYPES[kept])
        return StepProbe(points.step(lens, evicting), work, parts)

    def _about(self, batch: int, tokens: int) -> list[int]:
        """Lengths of ``batch`` sequences within a tenth of ``tokens``; identical at every call."""
        rng = np.random.default_rng((self._seed, batch, tokens))
        lengths = rng.integers(math.ceil(0.9 * tokens), math.floor(1.1 * tokens) + 1, batch)
        return lengths.clip(max=max(tokens, self._model.max_model_len)).tolist()

    def _fits(self, contexts: list[int]) -> bool:
        """Whether the model supports sequences of these lengths, and the pool has room for them."""
        blocks = sum(-(-context // self._pool.block_size) for context in contexts)
        return max(contexts) <= self._model.max_model_len and blocks <= self._pool.num_blocks

    def _turns(self, size: int) -> int:
        """Number of buffers of ``size`` bytes between two uses of which a step's data pass."""
        return max(1, min(MOST_TURNS, -(-self._passing_bytes // size)))

    def _new_tokens(self, tokens: int) -> tuple[Tensor, Tensor]:
        """Random ids and positions."""
        ends = (self._model.vocab_size, self._model.max_model_len)
        ids, positions = (self._put(self._rng.integers(end, size=tokens)) for end in ends)
        return ids, positions

    def _random(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self._device.torch_device, dtype=self._dtype)

    def _put(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(self._device.torch_device)


def _moving(move: Callable[[np.ndarray], object], pairs: Sequence[np.ndarray]) -> Work:
    return lambda number: move(_turn(pairs, number))


def _repeats(contexts: list[int], block_size: int, group: int) -> list[int]:
    """Blocks of each table that it has in common with the first one of its ``group`` consecutive sequences: three quarters of the
    shortest one's."""
    repeats = [0] * len(contexts)
    for row, members in ((row, contexts[row : row + group]) for row in range(0, len(contexts), group)):
        repeats[row + 1 : row + group] = [min(members) * 3 // 4 // block_size] * (len(members) - 1)
    return repeats


def _turn(items: Sequence[Item], number: int) -> Item:
    return items[number % len(items)]
