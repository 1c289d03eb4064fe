"""A load: statistics of a trace in a small file, from which requests can be drawn, without any request of the trace.

``fitting.fit`` stores quantiles of both lengths and a grid that counts requests by the ranks of the two. Of the
arrivals it stores the number of requests at one instant, the gaps between instants, and the correlation of successive
gaps, and of shared prefixes what ``reuse`` describes. ``fitting.draw`` draws any number of requests.

Changes of the load over hours are not stored. The extremes are those of single requests.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from os import PathLike
from typing import Annotated

import numpy as np
from pydantic import AfterValidator, ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ...sim.output.files import as_utf8, write_whole
from ...sim.types.errors import TraceError
from ...sim.types.user_files import json_value
from ...sim.types.validation import requirement
from ..parsing.files import TraceFile
from ..parsing.table import shown
from ..types.trace import MOST_REQUESTS
from .marginal import inverse, summary

VERSION = 1
#: 64 strata; the last ones are finer, since the longest requests matter most.
LEVELS = (*(place / 64 for place in range(64)), 0.99, 0.995, 0.999, 1.0)
GRID = 16
#: Title of the format, and the maximum size of a load, in bytes.
LOAD, _MOST_BYTES = "load", 2**20
_STRICT = ConfigDict(extra="forbid")
Counts = tuple[tuple[Annotated[int, Field(ge=0, le=2**31)], ...], ...]
Numbers = Annotated[tuple[float, ...], Field(min_length=len(LEVELS) - 1, max_length=len(LEVELS))]


@dataclass(frozen=True, config=_STRICT)
class Marginal:
    """Distribution of one quantity: its quantiles at ``LEVELS``, and the mean of each stratum between them."""

    quantiles: Numbers
    stratum_means: Numbers

    @model_validator(mode="after")
    def _check(self) -> Marginal:
        ascending = all(low <= high for low, high in zip(self.quantiles, self.quantiles[1:]))
        if len(self.quantiles) != len(LEVELS) or len(self.stratum_means) != len(LEVELS) - 1 or not ascending:
            raise ValueError(f"must have {len(LEVELS)} ascending quantiles and {len(LEVELS) - 1} means")
        if not all(0 <= value < 2**31 for value in (*self.quantiles, *self.stratum_means)):
            raise ValueError("must lie between 0 and 2**31")
        return self

    @classmethod
    def of(cls, values: np.ndarray) -> Marginal:
        """The marginal of some values, to six significant digits."""
        return cls(*(tuple(float(f"{value:.6g}") for value in column) for column in summary(values, LEVELS)))

    def at(self, ranks: np.ndarray) -> np.ndarray:
        """The values at ranks in [0, 1), float64."""
        return inverse(LEVELS, self.quantiles, self.stratum_means, ranks)

    def occurring(self, ranks: np.ndarray) -> np.ndarray:
        """The quantile at or below each rank in [0, 1), as whole numbers, int64: a value that occurs."""
        return np.array(self.quantiles, dtype=np.int64)[np.searchsorted(LEVELS, ranks, side="right") - 1]

    def whole(self, ranks: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """The values at ``ranks`` as whole numbers, int64, rounded at random so that the mean is preserved."""
        return np.floor(self.at(ranks) + rng.random(len(ranks))).astype(np.int64)


@dataclass(frozen=True, config=_STRICT)
class Arrivals:
    """Distribution of arrivals.

    Attributes:
        gap_s: Gap between two instants with arrivals, in seconds.
        batch: Requests that arrive at one instant.
        persistence: Share of the variance of a gap's rank that is correlated with the next gaps.
        gaps: Gaps over which that correlation decays to 1/e.
    """

    gap_s: Marginal
    batch: Marginal
    persistence: Annotated[float, Field(ge=0, lt=1)]
    gaps: Annotated[float, Field(ge=1, le=2**20)]


@dataclass(frozen=True, config=_STRICT)
class Reuse:
    """Shared prefixes (``traces.synthesis.reuse``).

    Attributes:
        block_tokens: Divisor of the lengths of shared prefixes that end before their prompts.
        system_tokens: Tokens of system prompts, of requests that begin as an earlier one.
        system_distance: Requests since the last one with the same system prompt.
        session_share: Share of the tokens after the system prompt that continue an earlier request, where some do.
        session_distance: Requests since the last one with this prefix, where some do.
        grid: Request counts by sixteenth of the prompts (rows), and by sixteenth of ``session_share`` (columns 1 to 16);
            column 0 counts those that continue no session.
        answers: Whether prefixes go on into outputs.
    """

    block_tokens: Annotated[int, Field(ge=1, le=2**31)]
    system_tokens: Marginal
    system_distance: Marginal
    session_share: Marginal
    session_distance: Marginal
    grid: Counts
    answers: bool

    @model_validator(mode="after")
    def _check(self) -> Reuse:
        if np.shape(self.grid) != (GRID, GRID + 1) or self.session_share.quantiles[-1] > 1:
            raise ValueError(f"must have {GRID} x {GRID + 1} counts, and shares up to 1")
        return self


@dataclass(frozen=True, config=_STRICT)
class Load:
    """Statistics of a trace.

    Attributes:
        fragmeter_load: Version of the file format.
        name: Name of the trace.
        requests: Number of requests of the trace, and default number of a draw.
        prompt_tokens, output_tokens: Lengths.
        rank_grid: Request counts by sixteenth of the prompts (rows) and of the outputs (columns).
        arrivals: None if the trace has no times.
        reuse: None if no prompts with the same beginning are known.
    """

    fragmeter_load: Annotated[int, Field(ge=VERSION, le=VERSION)]
    name: Annotated[str, AfterValidator(as_utf8)]
    requests: Annotated[int, Field(ge=1, le=MOST_REQUESTS)]
    prompt_tokens: Marginal
    output_tokens: Marginal
    rank_grid: Counts
    arrivals: Arrivals | None
    reuse: Reuse | None = None

    @model_validator(mode="after")
    def _check(self) -> Load:
        if np.shape(self.rank_grid) != (GRID, GRID) or not np.sum(self.rank_grid):
            raise ValueError(f"rank_grid must be {GRID} x {GRID} counts")
        return self


def read_load(path: str | PathLike[str]) -> Load:
    """The load in a file.

    Raises:
        TraceError: The file is not a load, or has an invalid number.
    """
    try:
        return Load(**json_value(TraceFile(path, _MOST_BYTES).whole()))
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or None
        raise TraceError(
            path, None, field, shown(first["input"]), f"{requirement(first)}; fit the load again"
        ) from None
    except (ValueError, TypeError) as error:
        complaint = " ".join(str(error).split())[:80]
        raise TraceError(path, None, None, None, f"is not a load ({complaint}); make one with traces synth") from None


def write_load(load: Load, path: str | PathLike[str]) -> None:
    """Write a load atomically.

    Raises:
        UserError: The file cannot be written.
    """
    write_whole(path, json.dumps(asdict(load)) + "\n")
