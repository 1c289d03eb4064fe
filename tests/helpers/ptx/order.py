"""Which writes of a block other blocks see, by the PTX ISA's memory model for the way the kernels use it: ``membar.gl``, and atomics.

Blocks run one after the other. Writes of a block reach the blocks after it only if a thread counted them by an atomic, with a fence
before it: its own writes, and those that other threads of the block made before a barrier that it had passed at the fence. All
others arrive when the grid has ended. A thread that loads what another block has written needs an atomic and a fence after it, its
own or those of a thread of its block before a barrier.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NO_BLOCK = -1


class Order:
    """The writes of a launch to one array.

    Args:
        memory: The bytes of the array.
    """

    def __init__(self, memory: np.ndarray) -> None:
        self._memory, self._before = memory, memory.copy()
        self._block, self._thread, self._barriers = (np.full(len(memory), NO_BLOCK, np.int32) for _ in range(3))
        self._fenced, self._visible = np.zeros((2, len(memory)), np.bool_)
        self._late: list[tuple[np.ndarray, np.ndarray]] = []

    def note(self, places: np.ndarray, block: int, threads: np.ndarray, barriers: int) -> None:
        """``[accesses, bytes]`` were written by these threads, after so many barriers."""
        self._block[places], self._thread[places], self._barriers[places] = block, threads[:, None], barriers
        self._fenced[places] = self._visible[places] = False

    def is_of_others(self, places: np.ndarray, block: int) -> np.ndarray:
        """Of each access, whether another block of this launch has written there."""
        return ((self._block[places] != NO_BLOCK) & (self._block[places] != block)).any(axis=1)

    def fence(self, block: int, threads: np.ndarray, barriers: int) -> None:
        """A fence of these threads."""
        known = (self._barriers < barriers) | np.isin(self._thread, threads)
        self._fenced |= (self._block == block) & known

    def count(self) -> None:
        """An atomic after the fences so far."""
        self._visible |= self._fenced

    def end_block(self, block: int) -> None:
        """What is not visible is kept from the blocks to come."""
        late = np.flatnonzero((self._block == block) & ~self._visible)
        self._late.append((late, self._memory[late].copy()))
        self._memory[late] = self._before[late]
        self._before[:] = self._memory

    def end(self) -> None:
        """The grid has ended."""
        for places, values in self._late:
            self._memory[places] = values


class Orders:
    """The writes of a launch to all arrays.

    Args:
        memory_of: The bytes of the array with a number.
        threads: Threads of a block.
    """

    def __init__(self, memory_of: Callable[[int], np.ndarray], threads: int) -> None:
        self._memory_of, self._orders = memory_of, dict[int, Order]()
        self._block, self._barriers = NO_BLOCK, 0
        self._counted, self._sees = np.zeros((2, threads), np.bool_)

    def begin_block(self) -> None:
        self._block, self._barriers = self._block + 1, 0
        self._counted[:] = self._sees[:] = False

    def barrier(self) -> None:
        """All threads of the block have come."""
        self._barriers += 1
        self._sees[:] = self._sees.any()

    def fence(self, threads: np.ndarray) -> None:
        self._sees[threads] |= self._counted[threads]
        for order in self._orders.values():
            order.fence(self._block, threads, self._barriers)

    def count(self, threads: np.ndarray) -> None:
        """An atomic of these threads."""
        self._counted[threads] = True
        for order in self._orders.values():
            order.count()

    def note(self, array: int, places: np.ndarray, threads: np.ndarray) -> None:
        """As :meth:`Order.note`."""
        if array not in self._orders:
            self._orders[array] = Order(self._memory_of(array))
        self._orders[array].note(places, self._block, threads, self._barriers)

    def allows(self, array: int, places: np.ndarray, threads: np.ndarray) -> np.ndarray:
        """Of each load by one of these threads, whether it sees what it may read."""
        if array not in self._orders:
            return np.ones(len(places), np.bool_)
        return self._sees[threads] | ~self._orders[array].is_of_others(places, self._block)

    def end_block(self) -> None:
        for order in self._orders.values():
            order.end_block(self._block)

    def end(self) -> None:
        for order in self._orders.values():
            order.end()
