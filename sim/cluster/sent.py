"""The requests that each replica received. Each replica numbers them in their order of arrival."""

from __future__ import annotations

import numpy as np

from ..types.sequence import Sequence
from ..workload.content import Run as TokenRun
from ..workload.content import TokenRuns
from ..workload.workload import Workload


class Lengths:
    """Lengths of requests as Python ints, which are faster to read one by one.

    Attributes:
        outputs: Output tokens by row of the workload.
    """

    def __init__(self, workload: Workload, max_model_len: int) -> None:
        limits = max_model_len - workload.prompt_tokens if workload.max_tokens is None else workload.max_tokens
        columns = (workload.prompt_tokens, workload.output_tokens, limits)
        self._prompts, self.outputs, self._limits = (column.tolist() for column in columns)
        self._ignores_eos = None if workload.ignore_eos is None else workload.ignore_eos.tolist()
        self._priorities = None if workload.priority is None else workload.priority.tolist()

    def sequence(self, row: int) -> Sequence:
        """The sequence of a request, without a number."""
        made = Sequence(row, self._prompts[row], self.outputs[row], self._limits[row])
        made.ignores_eos = self._ignores_eos is not None and bool(self._ignores_eos[row])
        if self._priorities is not None:
            made.urgency = self._priorities[row], row
        return made


class Sent:
    """The requests of a replica, with the contents of their prompts by the replica's numbers.

    Attributes:
        rows: Their rows in the workload.
        unshared: Of each whether no other can begin with its first token.
    """

    def __init__(self, workload: Workload, whole: TokenRuns) -> None:
        self.rows: list[int] = []
        self.unshared: list[bool] = []
        self.may_share_prefixes = workload.may_share_prefixes
        self._whole = whole

    def number(self, row: int, sequence: Sequence) -> Sequence:
        """Number the sequence of an arriving request."""
        sequence.index = sequence.order = len(self.rows)
        sequence.urgency = sequence.urgency[0], sequence.index
        self.add(row)
        return sequence

    def add(self, row: int) -> None:
        """The request of a row comes next."""
        self.rows.append(row)
        self.unshared.append(self._whole.unshared[row])

    def token_runs(self) -> Sent:
        """Itself: it has the methods of ``TokenRuns``."""
        return self

    def runs(self, request: int) -> tuple[TokenRun, ...]:
        """The prompt of a request by the replica's number."""
        return self._whole.runs(self.rows[request])

    def output_runs(self, request: int) -> tuple[TokenRun, ...]:
        """Its output."""
        return self._whole.output_runs(self.rows[request])


def part_of(
    workload: Workload,
    rows: np.ndarray,
    arrival_ticks: np.ndarray | None = None,
    output_tokens: np.ndarray | None = None,
) -> Workload:
    """Rows of a workload without the contents of prompts; given columns replace the workload's."""
    return Workload(
        workload.name,
        workload.arrival_ticks[rows] if arrival_ticks is None else arrival_ticks,
        workload.prompt_tokens[rows],
        workload.output_tokens[rows] if output_tokens is None else output_tokens,
        None if workload.max_tokens is None else workload.max_tokens[rows],
        n=None if workload.n is None else workload.n[rows],
        priority=None if workload.priority is None else workload.priority[rows],
        # With other outputs than it asks for, a request asks for none of its own.
        ignore_eos=None if workload.ignore_eos is None or output_tokens is not None else workload.ignore_eos[rows],
    )
