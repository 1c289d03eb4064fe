"""Grades of simulated values beside published ones: one rule for the scorecard, the cards and the findings.

A share of the pool, a percentage itself, differs in points; any other value in percent of the published one.
"""

from __future__ import annotations

POINTS, PERCENT = "points", "%"
GRADES = PASS, NEAR, MISS = "pass", "near", "miss"
#: Largest error of a pass and of a near, by unit.
LIMITS = {PERCENT: (20.0, 40.0), POINTS: (4.0, 8.0)}
#: Errors are compared as reports round them.
_DECIMALS = 3


def grade(error: float, unit: str) -> str:
    """The grade of an error in ``POINTS`` or ``PERCENT``."""
    far = round(abs(error), _DECIMALS)
    return next((name for name, limit in zip(GRADES, LIMITS[unit]) if far <= limit), MISS)
