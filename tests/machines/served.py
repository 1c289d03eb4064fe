"""What the models of memories share: a memory served as the engine serves it, and every token counted one by one.

In each step victims leave first, then others come back or are admitted, then the step passes, alone or as the first
of a leap. Steps in which a sequence is admitted and running ones pause end at once, and the decode step stands still.
"""

from __future__ import annotations

from random import Random
from typing import Any

from fragmeter.sim.types.sequence import Replaced, Sequence
from fragmeter.sim.types.state import State


def chosen(sequences: list[Sequence], pick: int) -> list[Sequence]:
    """One or two of several, by a number."""
    return list(dict.fromkeys(sequences[place % len(sequences)] for place in (pick, pick // 8)))


class Script:
    """Which beams die and which they become copies of, in each step; the last word is remembered."""

    def __init__(self, seed: int) -> None:
        self._random = Random(seed)
        self.last: Replaced = ()

    def replaced(self, beams: int) -> Replaced:
        survivors = self._random.sample(range(beams), self._random.randint(1, beams))
        dead = [beam for beam in range(beams) if beam not in survivors]
        self.last = tuple((beam, self._random.choice(survivors)) for beam in dead)
        return self.last


class Served:
    """The state of the engine, and beside it the model.

    Attributes:
        tokens: Tokens with a slot of each running sequence; with that of the coming step once it has begun.
        begun: Whether the running sequences have their slots of the coming step: none may leave before it is over.
    """

    memory: Any

    def serve(self, memory: Any) -> None:
        self.memory, self.state = memory, State(preempted_first=True)
        self.tokens: dict[Sequence, int] = {}
        self.begun = False
        self.arrived = 0

    def arrive(self, prompt: int, output: int) -> Sequence:
        """A new request that declares its true output."""
        self.arrived += 1
        return Sequence(self.arrived, prompt, output, output)

    def blocks(self, tokens: int) -> int:
        return -(-tokens // self.memory.block_size)

    def begin(self) -> None:
        """The running sequences have their slots of the coming step."""
        if not self.begun:
            self.tokens = {sequence: tokens + 1 for sequence, tokens in self.tokens.items()}
            self.begun = True

    def start(self, sequence: Sequence, pauses: bool, padded_tokens: int = 0) -> None:
        """A prefill ends in the coming step, or in one in which running sequences pause."""
        if not pauses:
            self.begin()
        decode_step = self.state.decode_step - pauses
        self.memory.admit(sequence, decode_step, padded_tokens, pauses)
        self.state.start(sequence, decode_step, padded_tokens)
        self.tokens[sequence] = sequence.start_tokens

    def steps_to_finish(self) -> int:
        """Steps until the next running sequence has all its tokens."""
        return min(s.target_tokens - 1 - tokens for s, tokens in self.tokens.items()) + self.begun

    def step_on(self, steps: int) -> None:
        """Let the first step pass, which has begun, and those that follow it."""
        for _ in range(steps - 1):
            self.begun = False
            self.begin()
        self.begun = False
        self.state.decode_step += steps

    def finished(self) -> list[Sequence]:
        """Finished sequences; the last token of each needs no slot."""
        done = [s for s, tokens in self.tokens.items() if tokens == s.target_tokens - 1]
        return sorted(done, key=lambda sequence: sequence.index)
