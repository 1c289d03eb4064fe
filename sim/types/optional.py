"""Values that are always there where they are read, although their declared type allows None."""

from __future__ import annotations

from typing import TypeVar

_Value = TypeVar("_Value")


def not_none(value: _Value | None) -> _Value:
    """``value``, with None taken out of its type.

    For what the caller has made sure of in a way that a type checker does not follow, as of two fields of which
    exactly one is set. A user's input is checked with an error that names it instead.

    Raises:
        TypeError: ``value`` is None: a defect of the caller.
    """
    if value is None:
        raise TypeError("a value is None where it must be set")
    return value
