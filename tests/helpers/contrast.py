"""Contrast of two colours."""

from __future__ import annotations


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``, from 0 to 1 (WCAG 2.2, "relative luminance")."""
    channels = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    """Contrast ratio of two colours, from 1 to 21 (WCAG 2.2, "contrast ratio")."""
    brighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (brighter + 0.05) / (darker + 0.05)
