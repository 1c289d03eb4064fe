"""Runs a block of threads. Every thread has a program counter; those at the lowest one run together, as far as their paths agree.

Threads that leave a loop or a branch early wait at a higher address until the others come, so structured code converges again.
Instructions of a whole warp (matrices, shuffles, barriers) wait until all 32 threads are there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from . import decoding
from .memory import Fault, Global, Shared
from .order import Orders
from .text import Program

WARP = 32
Extent = tuple[int, int, int]
#: True: the threads have a new program counter, and others may be lower.
Step = Callable[["Threads", np.ndarray | None], bool | None]
Exchange = Callable[["Threads", np.ndarray | None], None]


class Machine:
    """Runs the blocks of one launch.

    Args:
        program: The kernel.
        arguments: Bits of each parameter, as an unsigned integer.
        arrays: Global memory.
        grid, block: Extents.
        shared_bytes: Dynamic shared memory.
        apart: Run one warp after another, each until it waits for the others, in place of all warps together.
        last_first: Run the blocks from the last one to the first.
    """

    def __init__(
        self,
        program: Program,
        arguments: Sequence[np.ndarray],
        arrays: Global,
        grid: Extent,
        block: Extent,
        shared_bytes: int,
        apart: bool,
        last_first: bool = False,
    ) -> None:
        threads = block[0] * block[1] * block[2]
        if threads % WARP:
            raise ValueError(f"{threads} threads: only whole warps are run")
        self.grid, self.block, self.memory, self._shared_bytes = grid, block, arrays, shared_bytes
        self.program, self._count, self._last_first = program, threads, last_first
        #: Numbers of the instructions of whole warps that a warp executed in parts, one part waiting for another.
        self.divided: set[int] = set()
        self._together = WARP if apart else threads
        parameters = dict(zip(program.parameter_types, arguments, strict=True))
        self.code = decoding.decoded(program, parameters, self._together)

    def run(self) -> None:
        """Run the grid, block by block.

        Raises:
            Fault: The first one; names block, thread, line and statement.
        """
        orders = self.memory.begin(self._count)
        with np.errstate(all="ignore"):
            places = [*np.ndindex(*self.grid[::-1])]
            for place in places[::-1] if self._last_first else places:
                orders.begin_block()
                self._run_block(place[::-1], orders)
                orders.end_block()
        orders.end()

    def _run_block(self, place: Extent, orders: Orders) -> None:
        shared = Shared(self._shared_bytes)
        firsts = range(0, self._count, self._together)
        groups = [Threads(self, shared, place, np.arange(first, first + self._together)) for first in firsts]
        while any(group.alive.any() for group in groups):
            for group in groups:
                group.run()
            ended = sum(int((~group.alive).sum()) for group in groups)
            waiting = sum(int(group.at_barrier.sum()) for group in groups)
            if self._count not in (ended, waiting):
                rest = self._count - ended - waiting
                counts = f"{waiting} wait at bar.sync, {rest} for their warp, {ended} have ended"
                raise Fault(f"block {place}: deadlock: of {self._count} threads {counts}")
            orders.barrier()
            for group in groups:
                group.at_barrier[:] = False


class Threads:
    """Threads that run together: registers, program counters, copies in flight.

    Attributes:
        registers: The bits of each register, over the threads; all ones before it is written.
    """

    def __init__(self, machine: Machine, shared: Shared, place: Extent, numbers: np.ndarray) -> None:
        self.machine, self.shared, self.place, self.numbers = machine, shared, place, numbers
        count = len(numbers)
        self.registers = [np.full(count, -1).astype(kind) for kind in machine.code.register_types]
        self.counters = np.zeros(count, np.int64)
        self.alive = np.ones(count, np.bool_)
        self.at_barrier, self.waiting = np.zeros((2, count), np.bool_)
        self.groups = np.zeros(count, np.int64)
        #: What each thread gave to an instruction of its warp: words by name.
        self.given = {name: np.zeros(count, np.uint32) for name in ("value", "b", "c")}
        self._takes: dict[int, tuple[object, Exchange | None]] = {}
        self.copies: list[Copies] = []

    def run(self) -> None:
        """Run until every thread has ended or waits at a barrier, or for its warp."""
        steps, ends = self.machine.code.steps, self.machine.code.ends
        while True:
            free = self.alive & ~self.at_barrier & ~self.waiting
            if not free.any():
                return
            first = int(self.counters[free].min())
            mask = free & (self.counters == first)
            some = None if mask.all() else mask
            for now in range(first, ends[first]):
                try:
                    if steps[now](self, some):
                        break
                except Fault as fault:
                    raise Fault(self._located(fault, now, mask)) from fault
            else:
                self.counters[mask] = ends[first]

    def _located(self, fault: Fault, now: int, mask: np.ndarray) -> str:
        instruction = self.machine.program.instructions[now]
        thread = self.numbers[mask][fault.place]
        return f"block {self.place}, thread {thread}: {fault.why}, in line {instruction.line}: {instruction.text}"

    def write(self, register: int, value: np.ndarray, mask: np.ndarray | None) -> None:
        """Write a register of the threads of ``mask``, all if it is None. Arrays of registers are never changed in place."""
        kind = self.machine.code.register_types[register]
        value = value if value.dtype == kind else value.view(kind)
        self.registers[register] = value if mask is None else np.where(mask, value, self.registers[register])

    def expand(self, values: np.ndarray, mask: np.ndarray | None) -> np.ndarray:
        """Values of the threads of ``mask`` at their places, beside undefined ones."""
        if mask is None:
            return values
        whole = np.zeros((len(mask), *values.shape[1:]), values.dtype)
        whole[mask] = values
        return whole

    def meet(
        self, key: object, now: int, mask: np.ndarray | None, give: Exchange | None = None, take: Exchange | None = None
    ) -> bool:
        """An instruction of whole warps: each thread gives its operands, and takes its result when all of its warp has come.

        Instructions with the same key meet: the compiler may put a shuffle into both branches that a warp takes.

        Returns:
            Whether some threads wait, so that all have a new program counter.
        """
        if give:
            give(self, mask)
        if mask is None or (mask.reshape(-1, WARP).all(axis=1) == mask.reshape(-1, WARP).any(axis=1)).all():
            if take:
                take(self, mask)
            return False
        self.machine.divided.add(now)
        self.counters[mask], self.waiting[mask] = now, True
        self._takes[now] = key, take
        here = self.waiting & np.isin(self.counters, [one for one, (other, _) in self._takes.items() if other == key])
        ready = np.repeat(here.reshape(-1, WARP).all(axis=1), WARP)
        for one in np.unique(self.counters[ready]):
            _, take = self._takes[one]
            if take:
                take(self, ready & (self.counters == one))
        self.counters[ready] += 1
        self.waiting[ready] = False
        return True

    def issue(self, chunks: np.ndarray, data: np.ndarray, mask: np.ndarray | None) -> None:
        """Copies by cp.async of the threads of ``mask``, into their open groups."""
        threads = np.arange(len(self.numbers)) if mask is None else np.flatnonzero(mask)
        self.copies.append(Copies(threads, self.groups[threads], chunks, data))

    def await_groups(self, pending: int, mask: np.ndarray | None) -> None:
        """Copies of all but the last ``pending`` closed groups of each thread arrive."""
        kept = []
        for copies in self.copies:
            done = copies.groups + pending < self.groups[copies.threads]
            if mask is not None:
                done &= mask[copies.threads]
            if done.any():
                self.shared.arrive(copies.chunks[done], copies.data[done])
            if not done.all():
                kept.append(copies.kept(~done))
        self.copies = kept


class Copies:
    """Copies that one instruction issued: thread, group, chunk of shared memory and the four words of each."""

    def __init__(self, threads: np.ndarray, groups: np.ndarray, chunks: np.ndarray, data: np.ndarray) -> None:
        self.threads, self.groups, self.chunks, self.data = threads, groups, chunks, data

    def kept(self, some: np.ndarray) -> Copies:
        return Copies(self.threads[some], self.groups[some], self.chunks[some], self.data[some])
