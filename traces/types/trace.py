"""A trace: requests as a file gives them, and the way back from a request to its line."""

from __future__ import annotations

from dataclasses import dataclass, replace
from os import PathLike

import numpy as np

from ...sim.types.errors import SettingError, TraceError
from ...sim.workload.content import PromptContent
from ...sim.workload.dialogue import Dialogue
from .pairs import LengthPairs, frozen_column

#: Requests of a trace.
MOST_REQUESTS = 2**31
_COLUMNS = ("prompt_tokens", "output_tokens", "arrival_ticks", "max_tokens", "n", "delay_ticks")


@dataclass(frozen=True, slots=True, eq=False)
class Rows:
    """Where the rows of a trace stand in its file.

    Attributes:
        unit: ``"line"`` for text, ``"row"`` for formats without lines.
        lines: int64 [n], the line of each row as an editor counts it, or None where row i is i + 1.
    """

    unit: str = "row"
    lines: np.ndarray | None = None

    def number(self, row: int) -> int:
        """What to call the row at index ``row``."""
        return row + 1 if self.lines is None else int(self.lines[row])


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Rows of a file that are not in its trace.

    Attributes:
        failed: Requests that were not answered, as the file says itself.
        bad: Rows that cannot be true.
        first_bad: What is wrong with the first of those, or None.
    """

    failed: int = 0
    bad: int = 0
    first_bad: str | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in file order, as columns; int64 [n], read-only.

    Attributes:
        name: The file's name without its endings, for titles.
        prompt_tokens: At least 1.
        output_tokens: At least 1: the true output.
        arrival_ticks: Not decreasing, or None where the file has no times.
        max_tokens: The longest output that each request declares, or None where the file has none.
        rows: The line or row of each request in its file.
        n: Sequences of each request, or None where the file has none.
        dialogue: The request that each prompt continues, or None where the file has none.
        content: The tokens of the prompts, or None where it was not read (``read_with_content`` does).
        left_out: Rows of the file that are not here.
        delay_ticks: How long the user waits before each turn of a session, after the answer to the turn before it; or
            None where the file is silent.
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

    def __post_init__(self) -> None:
        for field in _COLUMNS:
            values = getattr(self, field)
            if values is None:
                continue
            object.__setattr__(self, field, frozen_column(values))
            if len(values) != len(self.prompt_tokens):
                raise SettingError(field, len(values), f"must have {len(self.prompt_tokens)} values")

    def __len__(self) -> int:
        return len(self.prompt_tokens)

    def first(self, requests: int) -> Trace:
        """The first requests alone."""
        columns = {field: values[:requests] for field in _COLUMNS if (values := getattr(self, field)) is not None}
        content = None if self.content is None else self.content.first(requests)
        dialogue = None if self.dialogue is None else self.dialogue.first(requests)
        return replace(self, **columns, content=content, dialogue=dialogue)

    @property
    def pairs(self) -> LengthPairs:
        """The lengths alone."""
        return LengthPairs(self.name, self.prompt_tokens, self.output_tokens)


def check_fits(trace: Trace, max_model_len: int, path: str | PathLike[str]) -> None:
    """Refuse a trace with a request longer than the model.

    Raises:
        TraceError: names the first request of ``path`` with more prompt + output than ``max_model_len`` tokens.
    """
    total_tokens = trace.prompt_tokens + trace.output_tokens
    too_long = total_tokens > max_model_len
    if too_long.any():
        row = int(too_long.argmax())
        remedy = f"longer than the model's {max_model_len} tokens; shorten or drop the request, or take a longer model"
        field, unit = "prompt_tokens + output_tokens", trace.rows.unit
        raise TraceError(path, trace.rows.number(row), field, int(total_tokens[row]), remedy, unit)


def require_count(num_prompts: int) -> None:
    """Refuse a number of requests that no trace can have.

    Raises:
        SettingError: It is below 1 or above ``MOST_REQUESTS``.
    """
    if num_prompts < 1:
        raise SettingError("num_prompts", num_prompts, "must be 1 or more")
    if num_prompts > MOST_REQUESTS:
        raise SettingError("num_prompts", num_prompts, f"must be at most {MOST_REQUESTS}; ask for fewer")
