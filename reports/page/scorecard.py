"""The scorecard of a comparison: its main picture beside one row a figure, with a grade and all errors as dots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import plotly.graph_objects as go

#: Width of the strip of dots, in its own units, and half of what it spans, in multiples of the limit of a pass.
_STRIP, _SPAN = 130.0, 2.5


@dataclass(frozen=True, slots=True)
class Score:
    """A row.

    Attributes:
        anchor: Key of the section that has the figure.
        name, title: Short name, and heading of that section.
        grade: pass, near or miss.
        worst: Largest error with its unit, as text.
        predicted, fitted: Numbers of values.
        errors: Errors of the predicted values, in multiples of the limit of a pass.
    """

    anchor: str
    name: str
    title: str
    grade: str
    worst: str
    predicted: int
    fitted: int
    errors: Sequence[float]

    @property
    def dots(self) -> list[tuple[float, bool]]:
        """Place of each error on the strip, and whether it is beyond its end."""
        half = _STRIP / 2 - 5
        return [
            (round(_STRIP / 2 + half * max(-1.0, min(1.0, error / _SPAN)), 1), abs(error) > _SPAN)
            for error in self.errors
        ]


@dataclass(frozen=True, eq=False)
class Scorecard:
    """A widget of a page: the picture, and beside it the rows.

    Attributes:
        picture: The main picture.
        rows: A row a figure.
        notes: Sentences below the rows.
    """

    picture: go.Figure | None
    rows: Sequence[Score]
    notes: Sequence[str] = ()
    kind: ClassVar[str] = "scorecard"

    @property
    def figures(self) -> Sequence[go.Figure]:
        """The picture."""
        return [] if self.picture is None else [self.picture]

    @property
    def data(self) -> Any:
        """No script reads any."""
        return None

    @property
    def constants(self) -> Mapping[str, Any]:
        """Measures of the strip: its width, and the band in which an error passes."""
        half = _STRIP / 2 - 5
        return {"strip": _STRIP, "band": (_STRIP / 2 - half / _SPAN, 2 * half / _SPAN)}
