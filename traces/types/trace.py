"""A trace: the requests of a file, with the file position of each request."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from ...sim.types.errors import SettingError, TraceError
from ...sim.workload.content import PromptContent
from ...sim.workload.dialogue import Dialogue
from .pairs import LengthPairs, frozen_column
from .start import Start

#: Maximum number of requests in a trace.
MOST_REQUESTS = 2**31
_COLUMNS = (
    "prompt_tokens",
    "output_tokens",
    "arrival_ticks",
    "max_tokens",
    "n",
    "delay_ticks",
    "priority",
    "ignore_eos",
    "spawner",
)


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """File positions of the rows of a trace.

    Attributes:
        unit: ``"line"`` for text, ``"row"`` for formats without lines.
        lines: int64 [n], the line number of each row, as in an editor; None if row i has number i + 1.
    """

    unit: str = "row"
    lines: np.ndarray | None = None

    def number(self, row: int) -> int:
        """The line or row number of the row at index ``row``."""
        return row + 1 if self.lines is None else int(self.lines[row])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows of a file that are not in its trace.

    Attributes:
        failed: Number of requests that the file marks as failed.
        bad: Number of invalid rows.
        first_bad: The error of the first invalid row, or None.
    """

    failed: int = 0
    bad: int = 0
    first_bad: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests as columns, in order of arrival (without times: of the file). Arrays are int64 [n] and read-only.

    Attributes:
        name: The file's name without suffixes, for titles.
        prompt_tokens: Prompt lengths, at least 1.
        output_tokens: True output lengths, at least 1.
        arrival_ticks: Arrival times in ticks, not decreasing; a file's begin at 0. None without times.
        max_tokens: Declared maximum output of each request; None if the file has none.
        rows: Line or row of each request in its file.
        n: Sequences of each request; None if the file has none.
        dialogue: The request that each prompt continues; None if the file has none.
        content: Prompt contents; None if they were not read (``read_with_content`` reads them).
        left_out: Rows of the file that are not in the trace.
        delay_ticks: The user's delay before each turn of a session, after the answer to the previous turn; None if the
            file has none.
        priority: Priority of each request, lower first; None if the file has none.
        ignore_eos: 1 for a request that generates all of its ``max_tokens``, else 0; None if the file does not say.
        spawner: As of ``Users``, of sessions of agents; None without sub-agents.
        remarks: Sentences that a reader of results must know about how the file was read.
        start: First arrival by the file's own clock; None if the file has no times.
        max_concurrency: Most requests in flight, from a summary without send times; None without a limit.
    """

    name: str
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    arrival_ticks: np.ndarray | None = None
    max_tokens: np.ndarray | None = None
    rows: Rows = Rows()
    content: PromptContent | None = None
    n: np.ndarray | None = None
    dialogue: Dialogue | None = None
    left_out: LeftOut = LeftOut()
    delay_ticks: np.ndarray | None = None
    priority: np.ndarray | None = None
    ignore_eos: np.ndarray | None = None
    spawner: np.ndarray | None = None
    start: Start | None = None
    max_concurrency: int | None = None
    remarks: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for field in _COLUMNS:
            values = getattr(self, field)
            if values is None:
                continue
            object.__setattr__(self, field, frozen_column(values))
            if len(values) != len(self.prompt_tokens):
                raise SettingError(field, len(values), f"must have {len(self.prompt_tokens)} values")

        if self.ignore_eos is not None and self.max_tokens is None:
            raise SettingError("ignore_eos", "given", "is of requests with max_tokens; give them, too")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, requests: int) -> Trace:
        """The first ``requests`` requests as a trace."""
        columns = {field: values[:requests] for field in _COLUMNS if (values := getattr(self, field)) is not None}
        content = None if self.content is None else self.content.first(requests)
        dialogue = None if self.dialogue is None else self.dialogue.first(requests)
        return replace(self, **columns, content=content, dialogue=dialogue)

    @property
    def pairs(self) -> LengthPairs:
        """The lengths as length pairs."""
        return LengthPairs(self.name, self.prompt_tokens, self.output_tokens)


def check_fits(trace: Trace, max_model_len: int, path: str | PathLike[str]) -> None:
    """Refuse a trace with a request longer than the model's context.

    Raises:
        TraceError: A request has more prompt + output tokens than ``max_model_len``; names the first one of ``path``.
    """
    total_tokens = trace.prompt_tokens + trace.output_tokens
    too_long = total_tokens > max_model_len
    if too_long.any():
        row = int(too_long.argmax())
        remedy = f"longer than the model's {max_model_len} tokens; shorten or drop the request, or take a longer model"
        field, unit = "prompt_tokens + output_tokens", trace.rows.unit
        raise TraceError(path, trace.rows.number(row), field, int(total_tokens[row]), remedy, unit)


def require_count(num_prompts: int) -> None:
    """Refuse a number of requests that a trace cannot have.

    Raises:
        SettingError: The number is below 1 or above ``MOST_REQUESTS``.
    """
    if num_prompts < 1:
        raise SettingError("num_prompts", num_prompts, "must be 1 or more")
    if num_prompts > MOST_REQUESTS:
        raise SettingError("num_prompts", num_prompts, f"must be at most {MOST_REQUESTS}; ask for fewer")
