"""Contrast of two colours."""

from __future__ import annotations

from fragmeter.reports.style.palette import luminance


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio")."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
