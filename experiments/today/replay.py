"""Use of the memory by the sequences of one run under other allocators, byte by byte.

``Holdings`` observes a run, step by step: which sequence has how many tokens. The three accounts below divide the same
bytes of KV cache by what these sequences need of them:

    vllm        the run's own ledger, in the bytes of its pages
    jenga       ``TwoLevelPool``: every small page is taken and given back in the order of the steps
    separate    ``separate_pools``

The replay keeps the run's decisions: the sequences of a step, their tokens and preemptions, and the hits of the prefix
cache. It therefore shows what the same sequences pin, not what a server makes of the memory that it saves: other admissions,
larger batches, more hits. ``fits`` bounds the gain from above: sequences like those that ran, at the mean bytes of one.
Nothing is cached by the two replayed allocators, and a sequence has one state: pages that vLLM keeps for prefix look-ups
are cached, or a second state, in its account alone.

Every account is in bytes of one rank, and adds up to the pool and to what the sequences have beyond it:

    live         tokens                        page_padding  bytes of pages that no layer of the group uses
    state        states of fixed size          stranded      free, but only for another kind of layer
    reserved     slots that will be filled     cached        reclaimable, contents kept
    block_tail   slots past the end            free          free; and what is left beside whole pages
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Values
from dataclasses import dataclass
from math import fsum
from typing import NamedTuple

import numpy as np

from ...sim.engine.observer import Observed, Observer
from ...sim.memory.accounting.kv_groups import STATE
from ...sim.memory.accounting.ledger import Leap
from ...sim.memory.paged.paged import PagedMemory
from ...sim.memory.paged.skipped import SkippedBlocks
from ...sim.metrics.kv_groups import group_buckets_at_rows
from ...sim.runs.run import Run
from ...sim.types.errors import SimulationFault
from ...sim.types.sequence import Sequence, StepPlan
from .pools import PageKind, Part, TwoLevelPool, separate_pools

BUCKETS = ("live", STATE, "reserved", "block_tail", "page_padding", "stranded", "cached", "free")


class Held(NamedTuple):
    """What sequences have, one row for each sequence in each step: int64 columns.

    Attributes:
        step: Number of the step.
        sequence: The sequence's index.
        passed: Its blocks of ``BLOCK_SIZE`` tokens that windows have passed; 0 in a model without windows.
        tokens: Its tokens when the step is over.
        target: Its tokens when it ends.
    """

    step: np.ndarray
    sequence: np.ndarray
    passed: np.ndarray
    tokens: np.ndarray
    target: np.ndarray


class Holdings(Observer):
    """Records the tokens of every sequence in every step of a run under a policy with paged memory."""

    every_step = True

    def __init__(self) -> None:
        self._rows: list[tuple[int, int, int, int, int]] = []
        self.start_ticks: list[int] = []
        self._engine: Observed | None = None

    def run_started(self, engine: Observed, refused: np.ndarray) -> None:
        self._engine = engine

    def step_started(self, now: int, ticks: int, leap: Leap, plan: StepPlan) -> None:
        engine = self._engine
        assert engine is not None and isinstance(engine.memory, PagedMemory)
        if not ticks:
            return
        state, memory, step = engine.state, engine.memory, len(self.start_ticks)
        self.start_ticks.append(now)
        # A step without decodes leaves the running sequences as they were.
        decode_step = state.decode_step - (not leap[1])
        windows = memory.giving[0] if memory.groups.sliding else None
        for sequence in state.running:
            passed = 0 if windows is None else _passed(windows, sequence, decode_step)
            tokens = sequence.held_tokens(decode_step) + 1
            self._rows.append((step, sequence.index, passed, tokens, sequence.target_tokens))
        for sequence, part in memory.partial.items():
            passed = 0 if windows is None else part.skipped[0]
            self._rows.append((step, sequence.index, passed, part.computed_tokens, sequence.target_tokens))

    def held(self, run: Run) -> Held:
        """The record of the finished run, without a last step that computes in vain and is no part of the run.

        Raises:
            SimulationFault: The record is of another run.
        """
        rows, steps = run.log.rows, int((run.log.rows["ticks"] > 0).sum())
        if not np.array_equal(rows["start_ticks"][rows["ticks"] > 0], self.start_ticks[:steps]):
            raise SimulationFault("the record of the sequences is of another run")
        held = Held(*np.array(self._rows, dtype=np.int64).reshape(-1, len(Held._fields)).T)
        return Held(*(column[held.step < steps] for column in held))


def _passed(windows: SkippedBlocks, sequence: Sequence, decode_step: int) -> int:
    """Blocks that the window of a running sequence has passed in a step."""
    if sequence.start_step == decode_step:
        return windows.so_far(sequence, decode_step)
    return windows.in_decode(sequence, decode_step)


class Pages(NamedTuple):
    """Pages of one kind, one row for each of ``Held``: the first page that is kept, and the one after the last."""

    first: np.ndarray
    stop: np.ndarray


def pages_of(held: Held, kind: PageKind) -> Pages:
    """The pages of a kind that each sequence has in each step."""
    if not kind.block_tokens:
        return Pages(np.zeros_like(held.tokens), np.ones_like(held.tokens))
    stop = -(-held.tokens // kind.block_tokens)
    if not kind.window_tokens:
        return Pages(np.zeros_like(stop), stop)
    return Pages(held.passed, stop)


def slots_of(held: Held, kind: PageKind, num_steps: int) -> dict[str, np.ndarray]:
    """Slots of a kind's layers by bucket in every step, float64 [steps]; of states their number."""
    pages, size = pages_of(held, kind), kind.block_tokens
    if not size:
        return {STATE: np.bincount(held.step, minlength=num_steps).astype(np.float64)}
    live = held.tokens - pages.first * size
    tail = np.where(pages.stop == -(-held.target // size), -held.target % size, 0)
    parts = {"live": live, "reserved": (pages.stop - pages.first) * size - live - tail, "block_tail": tail}
    return {name: np.bincount(held.step, values, num_steps) for name, values in parts.items()}


def bytes_of(held: Held, kind: PageKind, num_steps: int) -> dict[str, np.ndarray]:
    """As ``slots_of``, in bytes."""
    slot_bytes = kind.page_bytes / max(1, kind.block_tokens)
    return {name: slots * slot_bytes for name, slots in slots_of(held, kind, num_steps).items()}


@dataclass(frozen=True, slots=True)
class Account:
    """Bytes of the KV cache of one rank under one allocator, as means over the measured steps.

    Attributes:
        allocator: Its name.
        buckets: Bytes by the names in ``BUCKETS``; they add up to the pool, and what is ``short``.
        fits: Sequences like those of the run that fit at the mean bytes of one.
        short: Bytes that the sequences have under vLLM and that this allocator does not have for them.
    """

    allocator: str
    buckets: Mapping[str, float]
    fits: float
    short: float = 0.0


def measured_steps(run: Run) -> np.ndarray:
    """bool [steps]: the steps in which requests wait, as the pool or the batch is full then; all if none ever waits."""
    rows = run.log.rows
    waits = rows["waiting"][rows["ticks"] > 0] > 0
    return waits if waits.any() else np.ones_like(waits)


def vllm_account(run: Run, pool_bytes: int) -> Account:
    """The account of the run's own memory, from its ledger."""
    chosen, steps = measured_steps(run), run.log.rows["ticks"] > 0
    at_rows = {name: slots[steps][chosen].mean() for name, slots in run.accounts.at_rows().items()}
    block_bytes = pool_bytes / (run.log.capacity_slots // run.log.block_size)
    slot_bytes = block_bytes / run.log.block_size
    buckets = {name: at_rows.get(name, 0) * slot_bytes for name in BUCKETS}
    layout = run.replica.layout
    if layout is not None:
        padding = {name: layout.page_padding(place) for place, name in enumerate(layout.names)}
        for name, slots in group_buckets_at_rows(run).items():
            group, bucket = name.rsplit(".", 1)
            padded = padding[group] * slots[steps][chosen].mean() * slot_bytes
            buckets[bucket] -= padded
            buckets["page_padding"] += padded
    return _account("vllm", buckets, pool_bytes, _mean_sequences(run))


def _mean_sequences(run: Run) -> float:
    rows, steps = run.log.rows, run.log.rows["ticks"] > 0
    return float(rows["batch_size"][steps][measured_steps(run)].mean())


def _account(
    name: str, buckets: Mapping[str, float], pool_bytes: float, sequences: float, short: float = 0.0
) -> Account:
    """The account, with ``free`` as what is left, and the sequences that fit where all kinds share the pool."""
    others = {bucket: value for bucket, value in buckets.items() if bucket != "free"}
    pinned = fsum(value for bucket, value in others.items() if bucket != "cached")
    free = {"free": pool_bytes + short - fsum(others.values())}
    return Account(name, others | free, sequences * pool_bytes / max(1.0, pinned), short)


def replayed(run: Run, holdings: Holdings, kinds: Values[PageKind], pool_bytes: int) -> list[Account]:
    """The accounts of the two other allocators over the sequences of a run.

    Raises:
        SimulationFault: The record is of another run.
    """
    held, chosen, running = holdings.held(run), measured_steps(run), _mean_sequences(run)
    steps = len(chosen)
    parts = {kind: bytes_of(held, kind, steps) for kind in kinds}
    needed = dict.fromkeys(BUCKETS, 0.0)
    for of_kind in parts.values():
        for bucket, values in of_kind.items():
            needed[bucket] += float(values[chosen].mean())
    if len({kind.layer_bytes for kind in kinds}) == 1:
        # Small and large pages are one size: any page serves any kind.
        stranded, short = 0.0, float(np.maximum(0, _total(parts)[chosen] - pool_bytes).mean())
    else:
        stranded, short = _in_turn(held, kinds, pool_bytes, chosen)
    jenga = _account("jenga", needed | {"stranded": stranded}, pool_bytes, running, short)
    return [jenga, _divided(parts, needed, pool_bytes, chosen, running)]


def _total(parts: Mapping[PageKind, Mapping[str, np.ndarray]]) -> np.ndarray:
    """Bytes of all buckets and kinds in every step."""
    return np.sum([values for of_kind in parts.values() for values in of_kind.values()], axis=0)


def _in_turn(held: Held, kinds: Values[PageKind], pool_bytes: int, chosen: np.ndarray) -> tuple[float, float]:
    """Mean bytes that are stranded under ``TwoLevelPool``, and that were not to be had."""
    pool, tables = TwoLevelPool(kinds, pool_bytes), _Tables(kinds)
    stranded, short = np.zeros(len(chosen)), np.zeros(len(chosen))
    beside_large_pages = pool_bytes - pool.num_large * pool.large_bytes
    for step, rows in _by_step(held, len(chosen)):
        tables.change(pool, Held(*(column[rows] for column in held)))
        stranded[step] = beside_large_pages + sum(pool.stranded_bytes(kind) for kind in kinds)
        short[step] = tables.short_bytes
    return float(stranded[chosen].mean()), float(short[chosen].mean())


def _by_step(held: Held, num_steps: int) -> Iterator[tuple[int, slice]]:
    """The rows of each step; the record is in the order of steps."""
    edges = np.searchsorted(held.step, np.arange(num_steps + 1)).tolist()
    for step in range(num_steps):
        yield step, slice(edges[step], edges[step + 1])


class _Tables:
    """The pages that every sequence has from a ``TwoLevelPool``, by kind and place.

    Attributes:
        short_bytes: Bytes of the pages that were not to be had.
    """

    def __init__(self, kinds: Values[PageKind]) -> None:
        self._kinds, self.short_bytes = kinds, 0
        self._pages: dict[int, list[dict[int, list[Part]]]] = {}
        self._spans: dict[int, tuple[tuple[int, int], ...]] = {}

    def change(self, pool: TwoLevelPool, held: Held) -> None:
        """Take and give back pages until every sequence has those of one step; sequences that are gone come first."""
        spans = [pages_of(held, kind) for kind in self._kinds]
        columns = [zip(pages.first.tolist(), pages.stop.tolist(), strict=True) for pages in spans]
        here = dict(zip(held.sequence.tolist(), zip(*columns, strict=True), strict=True))
        for index in [index for index in self._pages if index not in here]:
            self._leave(pool, index)
        for index, wanted in here.items():
            before = self._spans.get(index)
            if before == wanted:
                continue
            if before and any(new[1] < old[1] for new, old in zip(wanted, before, strict=True)):
                # It was preempted and begins again.
                self._leave(pool, index)
                before = None
            self._spans[index] = wanted
            tables = self._pages.setdefault(index, [{} for _ in self._kinds])
            earlier = before or [(first, first) for first, _ in wanted]
            for kind, table, span, old in zip(self._kinds, tables, wanted, earlier, strict=True):
                for place in range(old[0], min(span[0], old[1])):
                    self._give(pool, kind, table.pop(place))
                for place in range(max(span[0], old[1]), span[1]):
                    table[place] = parts = pool.take(index, kind, kind.layers)
                    self.short_bytes += _short_bytes(kind, parts)

    def _leave(self, pool: TwoLevelPool, index: int) -> None:
        for kind, table in zip(self._kinds, self._pages.pop(index), strict=True):
            for parts in table.values():
                self._give(pool, kind, parts)
        del self._spans[index]
        pool.forget(index)

    def _give(self, pool: TwoLevelPool, kind: PageKind, parts: list[Part]) -> None:
        self.short_bytes -= _short_bytes(kind, parts)
        pool.give(parts)


def _short_bytes(kind: PageKind, parts: Iterable[Part]) -> int:
    """Bytes of the layers that have no page."""
    return kind.layer_bytes * (kind.layers - sum(part.pages for part in parts))


def _divided(
    parts: Mapping[PageKind, Mapping[str, np.ndarray]],
    needed: Mapping[str, float],
    pool_bytes: int,
    chosen: np.ndarray,
    running: float,
) -> Account:
    """Separate pools: what is free in one beyond the room of the fullest is stranded.

    With n sequences that hold h of the p bytes of a kind's pool, n * (p - h) / h more of them fit in it. The least of these
    over the kinds are all that can come; what they leave free is stranded.
    """
    size = {kind: pages * kind.page_bytes for kind, pages in separate_pools(tuple(parts), pool_bytes).items()}
    held = {kind: np.sum(list(of_kind.values()), axis=0)[chosen] for kind, of_kind in parts.items()}
    room = {kind: np.maximum(0, size[kind] - held[kind]) for kind in parts}
    more = np.min([room[kind] / np.maximum(1, held[kind]) for kind in parts], axis=0)
    beside_pages = pool_bytes - sum(size.values())
    stranded = beside_pages + sum(np.maximum(0, room[kind] - held[kind] * more) for kind in parts)
    short = float(sum(np.maximum(0, held[kind] - size[kind]) for kind in parts).mean())
    account = _account("separate", dict(needed) | {"stranded": float(stranded.mean())}, pool_bytes, running, short)
    fits = min(running * size[kind] / max(1.0, float(held[kind].mean())) for kind in parts)
    return Account(account.allocator, account.buckets, fits, short)
