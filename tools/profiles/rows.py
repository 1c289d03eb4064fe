"""What the fits of all tables share."""

from __future__ import annotations

from collections.abc import Mapping

from fragmeter.gpu.calibrate.fitting import LEAST_POINTS_FOR_RESIDUALS, Points, is_possible
from fragmeter.sim.types.errors import UserError


def silent(line: str) -> None:
    """Says nothing."""


def require_rows(path: str, points: Points, limits: Mapping[str, float], sizes: str, card: str) -> None:
    """Refuse too few points for a fit.

    Args:
        path: Of their table.
        sizes: Which rows were selected, in words.
        card: Where the data sheet is from.

    Raises:
        UserError: There are too few, or too few that the data sheet allows.
    """
    operation, count, least = points.operation, len(points.us), LEAST_POINTS_FOR_RESIDUALS
    if count < least:
        raise UserError(f"{path}: has {count} rows of {operation} with {sizes}; measure {least} or more")
    if count - (faster := int((~is_possible(points, limits)).sum())) < least:
        remedy = f"latency is in milliseconds; check fp16_tflops and memory_gb_per_s of {card}"
        raise UserError(
            f"{path}: {faster} of {count} rows of {operation} are faster than the data sheet allows; {remedy}"
        )
