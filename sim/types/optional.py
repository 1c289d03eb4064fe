"""Optional values that are never None where they are read."""

from __future__ import annotations

from typing import TypeVar

_Value = TypeVar("_Value")


def not_none(value: _Value | None) -> _Value:
    """``value``, with None removed from its type.

    For conditions that the caller ensures but a type checker cannot follow, such as two fields with exactly one set.
    Input of a user needs a check with its own error instead.

    Raises:
        TypeError: ``value`` is None, a defect of the caller.
    """
    if value is None:
        raise TypeError("a value is None where it must be set")
    return value
