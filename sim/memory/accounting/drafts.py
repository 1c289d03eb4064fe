"""Which drafts of speculative decoding are accepted, and a log of it.

It is drawn for each place of an output from the request's own stream, so that it depends neither on the schedule nor on other
requests.
"""

from __future__ import annotations

import numpy as np

from ...spec.speculative import SpeculativeConfig
from ...types.sequence import Sequence
from .ledger import DRAFT, Table

#: Sets the streams of accepted drafts apart from others that are spawned from the same seed.
_STREAM = 24


class Speculation:
    """Draws which drafts are accepted, and logs it.

    Args:
        config: The drafter, and its acceptance rates.
        seed: Of the run.

    Attributes:
        log: A record of every sequence with drafts in every step (``DRAFT``).
    """

    def __init__(self, config: SpeculativeConfig, seed: int) -> None:
        self.config, self.log = config, Table(DRAFT)
        self._seed = seed
        # Of place i: the probability that more than i drafts are accepted, rising.
        self._rates = np.array(config.acceptance_rates[::-1])
        self._accepted: dict[int, list[int]] = {}

    def accepted(self, sequence: Sequence, generated: int) -> int:
        """Drafts that a step accepts in which a sequence has ``generated`` output tokens before, if enough are verified."""
        drawn = self._accepted.get(sequence.index)
        if drawn is None:
            stream = np.random.SeedSequence(self._seed, spawn_key=(_STREAM, sequence.index))
            uniform = np.random.default_rng(stream).random(sequence.output_tokens)
            # As many as there are rates above the draw.
            found = len(self._rates) - np.searchsorted(self._rates, uniform, side="right")
            drawn = self._accepted[sequence.index] = found.tolist()
        return drawn[generated]

    def forget(self, sequence: Sequence) -> None:
        """A sequence has finished."""
        self._accepted.pop(sequence.index, None)
