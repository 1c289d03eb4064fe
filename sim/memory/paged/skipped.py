"""The blocks that windows, and states, let go of, and when: counts for one group of layers.

A token attends to itself and the ``window - 1`` before it. So a step that finds c tokens computed
needs none before ``c - window + 1``, and the blocks that lie wholly before that are *skipped*: they
are given back at the start of the step. While a sequence decodes its window moves on by a token a
step, and lets go of a block every ``block_size`` steps, from its *turn* on:

    block size 4, window 6      c = 8         9         10        13        17
    first token needed            3         4         5         8         12
    blocks                        0 1 2     . 1 2     . 1 2     . . 2 3   . . . 3 4
                                            turn

What a step gives back is thus a histogram by step modulo the block size, as what it takes is, of the
sequences past their turn; the turns of the others wait in a heap. A prefill attends to all of its
prompt: the blocks that lie before the window of the first decode are given back by that step, all at
once. Until then the sequence is one of ``prompts``.
"""

from __future__ import annotations

from heapq import heappop, heappush

from ...types.sequence import Sequence
from ..accounting.kv_groups import STATE_WINDOW, skipped_blocks

#: More steps than any leap has.
_FOR_EVER = 1 << 40


class SkippedBlocks:
    """Blocks given back, in one group, by the sequences that decode.

    Attributes:
        prompts: Sequences with a prompt longer than the window that have not decoded yet, with the
            blocks that their prefill's chunks gave back.
    """

    __slots__ = ("_due_steps", "_phases", "_settled", "_size", "_turns", "_window_tokens", "prompts")

    def __init__(self, window_tokens: int, block_size: int) -> None:
        self._window_tokens, self._size = window_tokens, block_size
        self.prompts: dict[Sequence, int] = {}
        # By step modulo the block size; twice over, so that a span shorter than a block is one slice.
        self._phases = [0] * (2 * block_size)
        # Sequences with a turn in a step that is not settled yet; its decode steps, in order.
        self._turns: dict[int, int] = {}
        self._due_steps: list[int] = []
        self._settled = -1

    def of(self, tokens: int) -> int:
        """Blocks skipped by a step that finds so many tokens computed."""
        return skipped_blocks(tokens, self._window_tokens, self._size)

    def in_prefill(self, computed: int, tokens: int) -> int:
        """Blocks skipped in a step that finds ``computed`` tokens of a prompt, and computes it up to ``tokens``."""
        return self.of(computed)

    def join(self, sequence: Sequence, lag: int, skipped: int) -> None:
        """A sequence with ``skipped`` blocks given back ends its prefill, and decodes from then on."""
        if self.of(sequence.start_tokens):
            self.prompts[sequence] = skipped
        else:
            self._wait(lag)

    def leave(self, sequence: Sequence, decode_step: int) -> int:
        """A sequence leaves before ``decode_step``; blocks that it had given back."""
        skipped = self.so_far(sequence, decode_step)
        if self.prompts.pop(sequence, None) is None:
            self._change(self._turn(sequence.lag), -1)
        return skipped

    def so_far(self, sequence: Sequence, decode_step: int) -> int:
        """Blocks that a decoding sequence has given back before ``decode_step``."""
        prompt = self.prompts.get(sequence)
        return self.of(sequence.held_tokens(decode_step) - 1) if prompt is None else prompt

    def in_step(self, decode_step: int) -> int:
        """Blocks given back by ``decode_step``, before a sequence admitted in it has joined."""
        self.settle(decode_step)
        blocks = self._phases[decode_step % self._size]
        for sequence, skipped in self.prompts.items():
            blocks += self.of(sequence.held_tokens(decode_step)) - skipped
        return blocks

    def settle(self, decode_step: int) -> None:
        """Sequences with a turn up to ``decode_step`` give back blocks in phase from now on."""
        self._settled = decode_step
        while self._due_steps and self._due_steps[0] <= decode_step:
            turn = heappop(self._due_steps)
            self._change(turn, self._turns.pop(turn))

    def cycle(self, decode_step: int) -> list[int]:
        """Blocks given back in phase in each of the ``block_size`` steps from ``decode_step`` on."""
        start = decode_step % self._size
        return self._phases[start : start + self._size]

    def steps_alike(self, decode_step: int) -> int:
        """Steps from ``decode_step`` on of which ``cycle`` tells the truth; at least one."""
        if self.prompts:
            return 1
        return self._due_steps[0] - decode_step if self._due_steps else _FOR_EVER

    def advance(self, decode_step: int, steps: int) -> tuple[int, int]:
        """Let a leap pass, which ``steps_alike`` bounds: blocks given back by its first step, and by all."""
        self.settle(decode_step)
        size, start = self._size, decode_step % self._size
        first = self._phases[start]
        cycles, rest = divmod(steps, size)
        in_phase = cycles * sum(self._phases[:size]) + sum(self._phases[start : start + rest])
        prompts = self._end_prompts(decode_step) if self.prompts else 0
        return first + prompts, in_phase + prompts

    def _end_prompts(self, decode_step: int) -> int:
        """Those that decode for the first time in ``decode_step`` give back what their prompts need no more."""
        blocks = 0
        for sequence in [sequence for sequence in self.prompts if sequence.start_step < decode_step]:
            blocks += self.of(sequence.held_tokens(decode_step)) - self.prompts.pop(sequence)
            self._wait(sequence.lag)
        return blocks

    def _turn(self, lag: int) -> int:
        """The step in which a sequence gives back its first block by decoding: ``window - 1 + block_size`` tokens are
        computed before it."""
        return self._window_tokens + self._size - lag

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
        phase = turn % self._size
        self._phases[phase] += number
        self._phases[phase + self._size] += number


class SkippedStates(SkippedBlocks):
    """As ``SkippedBlocks``, of a group that keeps the state at the end of each block until the one after it is there.

    A prefill keeps none of the blocks within its chunks: only the state that it begins with and the one that it ends with.
    """

    __slots__ = ()

    def __init__(self, block_size: int) -> None:
        super().__init__(STATE_WINDOW, block_size)

    def in_prefill(self, computed: int, tokens: int) -> int:
        """See ``SkippedBlocks``."""
        before, blocks = -(-computed // self._size), -(-tokens // self._size)
        return blocks - 1 - (0 < before < blocks)
