"""Requests of several sequences: samples or beams that share blocks.

    prefill      b0 b1 b2            only the leader computes the prompt; the last block is half full
    fork         b0 b1 b2   twice    in the next step its siblings reference the same blocks
    first write  b0 b1 b2            a sequence that writes to a shared block copies it first (b3);
                 b0 b1 b3            the last sequence that references it writes in place
    a beam dies  b0 b1 b2   twice    its own block is freed (b3), and it continues as a copy of a surviving beam

All sequences of a group have outputs of one length, so they fork, are preempted and finish together.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from itertools import chain
from random import Random
from threading import Lock
from typing import ClassVar

import numpy as np

from ..types.sequence import FORKED, RECOMPUTED, Group, Lineage, Replaced, Sequence, leads
from ..types.state import State
from .source import OpenLoop
from .workload import Workload


class Ancestry:
    """A model of beam search with one parameter.

    In every step each beam survives with the same probability. A beam that does not becomes a copy of a survivor, chosen
    uniformly; if none would survive, one does. Every request draws from its own random stream, so its beams are the same
    under every policy. Runs of a process share what the last requests drew.

    Args:
        survival: The probability, from 0 to 1.
        seed: Of the run.
        request: Which request.
    """

    def __init__(self, survival: float, seed: int, request: int) -> None:
        self._stream = survival, seed, request
        self._drawn: _Drawn | None = None
        self._step = 0

    def replaced(self, beams: int) -> Replaced:
        """See ``Lineage``."""
        drawn = self._drawn = self._drawn or _drawn(*self._stream, beams)
        if self._step == len(drawn.steps):
            drawn.draw(self._step)
        self._step += 1
        return drawn.steps[self._step - 1]


class _Drawn:
    """The steps of the beams of a request that were drawn so far."""

    #: The steps that differ, and how many steps are kept.
    _known: ClassVar[dict[Replaced, Replaced]] = {}
    _kept: ClassVar[int] = 0
    #: Several threads may serve the same requests.
    _lock: ClassVar[Lock] = Lock()

    def __init__(self, survival: float, seed: int, request: int, beams: int) -> None:
        self._survival, self._beams = survival, range(beams)
        entropy = np.random.SeedSequence(seed, spawn_key=(_STREAM, request)).generate_state(4)
        self._random = Random(entropy.tobytes()).random
        self.steps: list[Replaced] = []

    def draw(self, step: int) -> None:
        """Draw some steps after those drawn so far, unless another run has drawn ``step`` by now."""
        with self._lock:
            if step < len(self.steps):
                return
            draw, beams, survival, known = self._random, self._beams, self._survival, self._known
            for _ in range(_STEPS_AT_ONCE):
                replaced: Replaced = ()
                dead = [beam for beam in beams if draw() >= survival]
                if dead:
                    survivors = [beam for beam in beams if beam not in dead] or [int(draw() * len(beams))]
                    number = len(survivors)
                    replaced = tuple(
                        [(beam, survivors[int(draw() * number)]) for beam in dead if beam not in survivors]
                    )
                    replaced = known.setdefault(replaced, replaced)
                self.steps.append(replaced)
            _Drawn._kept += _STEPS_AT_ONCE
            if _Drawn._kept > _MOST_KEPT or len(known) > _MOST_KNOWN:
                _drawn.cache_clear()
                known.clear()
                _Drawn._kept = 0


#: Sets the streams of beams apart from others that are spawned from the same seed.
_STREAM = 15
_STEPS_AT_ONCE = 16
#: Requests that are kept, their steps (32 MiB), and those of them that differ.
_MOST_DRAWN, _MOST_KEPT, _MOST_KNOWN = 1 << 12, 1 << 22, 1 << 16
_drawn = lru_cache(_MOST_DRAWN)(_Drawn)


class GroupState(State):
    """A state for sequences that may be members of groups.

    Args:
        preempted_first: See ``State``.
        block_size: Tokens of a block, to the start of which siblings share their prompt; 1 where no sequence shares.
        prefix_tokens: Tokens at the start of every prompt that are always there.

    Attributes:
        forking: Groups with a prefilled leader and siblings that have not begun.
    """

    __slots__ = ("_block_size", "_prefix_tokens", "forking")
    shares = True

    def __init__(self, preempted_first: bool, block_size: int, prefix_tokens: int = 0) -> None:
        super().__init__(preempted_first)
        self._block_size, self._prefix_tokens = block_size, prefix_tokens
        self.forking: dict[Group, None] = {}

    def start(self, sequence: Sequence, decode_step: int, padded_tokens: int = 0) -> None:
        """See ``State``; a leader with more than one token to come forks as soon as it can."""
        super().start(sequence, decode_step, padded_tokens)
        group = sequence.group
        if group is not None and not group.forked and sequence.finish_step > decode_step + 1:
            self.forking[group] = None

    def fork(self, sibling: Sequence, decode_step: int) -> None:
        """A sibling decodes from ``decode_step`` on; it has the leader's prompt, and a first token of its own."""
        self._begin(sibling)
        sibling.kind = FORKED
        sibling.computed_tokens = sibling.prompt_tokens
        self.start(sibling, decode_step)

    def _begin(self, sibling: Sequence) -> None:
        """A sibling has its first token, drawn where the leader's prefill ended."""
        if sibling.group is not None:
            self.forking.pop(sibling.group, None)
            sibling.group.forked = True
        sibling.generated_tokens = 1
        sibling.start_tokens = sibling.prompt_tokens + 1

    def take_finished(self) -> list[Sequence]:
        """See ``State``; what was drawn for the beams of a request ends with them: a group and its sequences refer to each other, so they
        last as long as the run."""
        finished = super().take_finished()
        for sequence in finished:
            if sequence.group is not None:
                sequence.group.ancestry = None
        return finished

    def preempt(self, preempted: tuple[Sequence, ...], swapped_out: tuple[Sequence, ...]) -> None:
        """See ``State``; siblings that had not begun wait from now on beside a leader that is computed again."""
        groups = [sequence.group for sequence in preempted]
        unforked = [group for group in groups if group is not None and not group.forked]
        super().preempt(preempted, swapped_out)
        for sequence in preempted + swapped_out:
            if sequence.group is not None:
                self.forking.pop(sequence.group, None)
        for group in unforked:
            place = self.waiting.index(group.leader) + 1
            for sibling in group.siblings:
                self._begin(sibling)
                sibling.kind = RECOMPUTED
                self.waiting.insert(place, sibling)
                place += 1
        for sequence in chain(preempted, *(group.siblings for group in unforked)):
            sequence.computed_tokens = self._shared_tokens(sequence)

    def _shared_tokens(self, sequence: Sequence) -> int:
        """Tokens that a prefill finds there: of the leader's prompt, or of the prefix that all share."""
        if leads(sequence):
            return self._prefix_tokens
        return sequence.prompt_tokens // self._block_size * self._block_size


class Grouping:
    """Makes groups of the sequences of requests.

    Args:
        prefix_tokens: Tokens at the start of every prompt that are always there.
        ancestry: Makes the ancestry of a request's beams from its row; None for samples.
    """

    def __init__(self, prefix_tokens: int = 0, ancestry: Callable[[int], Lineage] | None = None) -> None:
        self._prefix_tokens, self._ancestry = prefix_tokens, ancestry

    def leader(self, request: int, members: tuple[Sequence, ...]) -> Sequence:
        """The sequence that arrives for all sequences of a request: the first of them."""
        members[0].computed_tokens = self._prefix_tokens
        if len(members) > 1:
            Group(members, self._ancestry(request) if self._ancestry else None)
        return members[0]


class GroupLoop(OpenLoop):
    """As ``OpenLoop``, for requests of several sequences: their leaders arrive.

    Args:
        requests: The workload, a row a request.
        refused: bool [n], by request.
        max_model_len: See ``OpenLoop``.
        grouping: Makes a group of a request's sequences.
    """

    def __init__(self, requests: Workload, refused: np.ndarray, max_model_len: int, grouping: Grouping) -> None:
        self._served = np.flatnonzero(~refused).tolist()
        self._counts = requests.num_sequences.tolist()
        self._first = requests.first_sequences
        self._grouping = grouping
        super().__init__(requests.sequences, np.repeat(refused, requests.num_sequences), max_model_len)

    @property
    def delivered(self) -> int:
        """Requests that have arrived so far."""
        return int(np.searchsorted(self._first, super().delivered))

    def _arrivals(self) -> Iterator[tuple[int, Sequence]]:
        """Leaders and their times of arrival."""
        each = super()._arrivals()
        for request in self._served:
            ticks, leader = next(each)
            siblings = [next(each)[1] for _ in range(self._counts[request] - 1)]
            yield ticks, self._grouping.leader(request, (leader, *siblings))
