"""Which requests each replica was sent: every replica numbers them for itself, as they come."""

from __future__ import annotations

import numpy as np

from ..types.sequence import Sequence
from ..workload.content import Run as TokenRun
from ..workload.content import TokenRuns
from ..workload.workload import Workload


class Lengths:
    """How long requests are, as Python ints, which are quicker one by one.

    Attributes:
        outputs: Output tokens by row of the workload.
    """

    def __init__(self, workload: Workload, max_model_len: int) -> None:
        limits = max_model_len - workload.prompt_tokens if workload.max_tokens is None else workload.max_tokens
        columns = (workload.prompt_tokens, workload.output_tokens, limits)
        self._prompts, self.outputs, self._limits = (column.tolist() for column in columns)

    def sequence(self, row: int) -> Sequence:
        """The sequence of a request, to be numbered where it goes."""
        return Sequence(row, self._prompts[row], self.outputs[row], self._limits[row])


class Sent:
    """The requests that a replica is sent: what their prompts are made of, by the replica's numbers.

    Attributes:
        rows: Their rows in the workload.
    """

    def __init__(self, workload: Workload, whole: TokenRuns | None) -> None:
        self.rows: list[int] = []
        self.may_share_prefixes = workload.may_share_prefixes
        self._whole = whole

    def number(self, row: int, sequence: Sequence) -> Sequence:
        """The sequence of a request that comes now, with its number."""
        sequence.index = sequence.order = len(self.rows)
        self.rows.append(row)
        return sequence

    def token_runs(self) -> Sent:
        """Itself: it answers as ``TokenRuns`` does."""
        return self

    def runs(self, request: int) -> tuple[TokenRun, ...]:
        """The prompt of the replica's request of that number."""
        return self._whole.runs(self.rows[request])

    def output_runs(self, request: int) -> tuple[TokenRun, ...]:
        """Its output."""
        return self._whole.output_runs(self.rows[request])


def part_of(workload: Workload, rows: np.ndarray, **columns: np.ndarray) -> Workload:
    """Some requests, without what their prompts are made of; ``columns`` stand in for those of the workload."""
    fields = ("arrival_ticks", "prompt_tokens", "output_tokens", "max_tokens")
    own = {field: None if getattr(workload, field) is None else getattr(workload, field)[rows] for field in fields}
    return Workload(workload.name, **(own | columns))
