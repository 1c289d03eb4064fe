"""Released blocks of windows and states: counts by step for one KV group.

A token attends to itself and the ``window - 1`` tokens before it. A step with c computed tokens needs no
token before ``c - window + 1``. Blocks that lie completely before this token are *skipped*: they are released
at the start of the step. The window of a decoding sequence moves by one token per step and skips a block
every ``block_size`` steps, from its *turn* on:

    block size 4, window 6      c = 8         9         10        13        17
    first token needed            3         4         5         8         12
    blocks                        0 1 2     . 1 2     . 1 2     . . 2 3   . . . 3 4
                                            turn

For sequences past their turns, the blocks released in a step are a histogram (``phases``), like the blocks taken. The turns of the other sequences are in a heap. A prefill attends to its whole prompt:
the first decode step releases all blocks before its window at once. Until then the sequence is in ``prompts``.

With asynchronous scheduling (``ahead``) blocks are released for the tokens that are known to be computed when a step is
decided: all but those of the step in flight. The first decode step then releases blocks for the tokens before the last chunk
of the prompt, the second one for the whole prompt, and each later one as if the window were one token longer.
"""

from __future__ import annotations

from heapq import heappop, heappush
from sys import maxsize

from ...types.sequence import Sequence
from ..accounting.kv_groups import STATE_WINDOW, PageGroups, skipped_blocks
from .phases import Phases

#: More steps than in any leap.
_FOR_EVER = maxsize


class SkippedBlocks:
    """Manager of the groups of one kind that release blocks of running sequences; all of them release the same blocks.

    Args:
        window_tokens, block_size: Tokens that a token attends to, itself included, and tokens per block.
        number: Number of groups.
        ahead: Whether a step is decided while the step before it runs.

    Attributes:
        released: Number of blocks that one of the groups has released, over all sequences.
        prompts: Sequences with a prompt longer than the window before their first decode, with the number
            of blocks that their prefill's chunks released.
    """

    __slots__ = (
        "_ahead", "_due_steps", "_phases", "_settled", "_size", "_turns", "_window_tokens", "number", "prompts", "released",
    )  # fmt: skip

    def __init__(self, window_tokens: int, block_size: int, number: int, ahead: bool) -> None:
        self.number, self.released = number, 0
        self._window_tokens, self._size, self._ahead = window_tokens, block_size, ahead
        self.prompts: dict[Sequence, int] = {}
        self._phases = Phases(block_size)
        # Sequences with a turn in a later step, by decode step; and a heap of these steps.
        self._turns: dict[int, int] = {}
        self._due_steps: list[int] = []
        self._settled = -1

    def of(self, tokens: int) -> int:
        """Number of blocks skipped by a step with ``tokens`` computed tokens."""
        return skipped_blocks(tokens, self._window_tokens, self._size)

    def in_chunk(self, known: int, computed: int, tokens: int, prefill_end: int) -> int:
        """Number of blocks skipped in a step that computes a prompt from ``computed`` up to ``tokens`` tokens.

        Args:
            known: Tokens that are known to be computed when the step is decided.
            prefill_end: See ``Sequence``.
        """
        return self.of(known)

    def in_decode(self, sequence: Sequence, decode_step: int) -> int:
        """Number of blocks that a decoding sequence has released after it was scheduled for ``decode_step``."""
        known, held = known_tokens(sequence, decode_step, self._ahead), sequence.held_tokens(decode_step)
        return self.in_chunk(known, held, held + 1, sequence.prefill_end)

    def join(self, sequence: Sequence, lag: int, skipped: int) -> None:
        """Add a sequence that ends its prefill, with ``skipped`` released blocks; it then decodes."""
        if self.of(sequence.start_tokens):
            self.prompts[sequence] = skipped
        else:
            self._wait(lag)

    def leave(self, sequence: Sequence, decode_step: int) -> int:
        """Remove a sequence before ``decode_step``. Returns the number of blocks that it had released."""
        skipped = self.so_far(sequence, decode_step)
        if self.prompts.pop(sequence, None) is None:
            self._change(self._turn(sequence.lag), -1)
        return skipped

    def so_far(self, sequence: Sequence, decode_step: int) -> int:
        """Number of blocks that a decoding sequence has released before ``decode_step``."""
        prompt = self.prompts.get(sequence)
        return self.of(sequence.held_tokens(decode_step) - 1 - self._ahead) if prompt is None else prompt

    def in_step(self, decode_step: int) -> int:
        """Number of blocks released in ``decode_step``, before sequences admitted in it have joined."""
        self.settle(decode_step)
        blocks = self._phases.counts[decode_step % self._size]
        for sequence, skipped in self.prompts.items():
            blocks += self.in_decode(sequence, decode_step) - skipped
        return blocks

    def settle(self, decode_step: int) -> None:
        """Add sequences with a turn up to ``decode_step`` to the histogram."""
        self._settled = decode_step
        while self._due_steps and self._due_steps[0] <= decode_step:
            turn = heappop(self._due_steps)
            self._change(turn, self._turns.pop(turn))

    def cycle(self, decode_step: int) -> list[int]:
        """Blocks released by the histogram in each of the ``block_size`` steps from ``decode_step`` on."""
        return self._phases.cycle(decode_step)

    def steps_alike(self, decode_step: int) -> int:
        """Number of steps from ``decode_step`` on for which ``cycle`` is exact; at least one."""
        if self.prompts:
            return 1
        return self._due_steps[0] - decode_step if self._due_steps else _FOR_EVER

    def advance(self, decode_step: int, steps: int) -> tuple[int, int]:
        """Advance by a leap within ``steps_alike``. Returns the blocks released by its first step and by all steps."""
        self.settle(decode_step)
        first, in_phase = self._phases.counts[decode_step % self._size], self._phases.total(decode_step, steps)
        prompts = self._end_prompts(decode_step) if self.prompts else 0
        return first + prompts, in_phase + prompts

    def _end_prompts(self, decode_step: int) -> int:
        """Release the prompt blocks of sequences with their first decode in ``decode_step``. Returns their number."""
        blocks = 0
        for sequence in [sequence for sequence in self.prompts if sequence.start_step < decode_step]:
            skipped = self.in_decode(sequence, decode_step)
            blocks += skipped - self.prompts[sequence]
            if sequence.start_step < decode_step - self._ahead:
                del self.prompts[sequence]
                self._wait(sequence.lag)
            else:
                self.prompts[sequence] = skipped
        return blocks

    def _turn(self, lag: int) -> int:
        """The step in which a sequence releases its first block by decoding: ``window - 1 + block_size`` tokens are
        computed before it."""
        return self._window_tokens + self._size - lag + self._ahead

    def _wait(self, lag: int) -> None:
        turn = self._turn(lag)
        if turn > self._settled and turn not in self._turns:
            self._turns[turn] = 0
            heappush(self._due_steps, turn)
        self._change(turn, 1)

    def _change(self, turn: int, number: int) -> None:
        if turn > self._settled:
            self._turns[turn] += number
            return
        self._phases.add(turn % self._size, number)


class SkippedStates(SkippedBlocks):
    """As ``SkippedBlocks``, for a group that keeps the state at the end of a block until the next state exists.

    A prefill keeps no states within its chunks: only the state at the end of a chunk, and the states before it that the chunk
    starts from, or may yet start from as it is not known to be computed. The last chunk may export one more from within
    (``PageGroups.exports``), which is kept until the chunk is known to be computed:

        block size 4, prompt 11     chunk to 11     decodes
        steps in turn               . x x           . . x
        steps ahead                 . x x           . x x    . . x
    """

    __slots__ = ("_groups",)

    def __init__(self, block_size: int, groups: PageGroups) -> None:
        super().__init__(STATE_WINDOW, block_size, groups.states, groups.ahead)
        self._groups = groups

    def in_chunk(self, known: int, computed: int, tokens: int, prefill_end: int) -> int:
        size, exports = self._size, self._groups.exports
        ends = {-(-at // size) for at in (known, computed, tokens)}
        # Of the chunk in flight, and of this one.
        for start, end in ((known, computed), (computed, tokens)):
            if exports(start, end, prefill_end, size):
                ends.add(-(-end // size) - 1)
        return -(-tokens // size) - len(ends - {0})


def known_tokens(sequence: Sequence, decode_step: int, ahead: bool) -> int:
    """Tokens of a decoding sequence that are known to be computed when ``decode_step`` is decided.

    Args:
        ahead: Whether it is decided while the step before it runs.
    """
    if ahead and sequence.start_step == decode_step - 1:
        # The step in flight is the last one of its prompt.
        return sequence.computed_tokens
    return sequence.held_tokens(decode_step) - ahead
