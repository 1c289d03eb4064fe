"""What is computed from an object once, and kept with it."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import TypeVar

Source = TypeVar("Source")
Result = TypeVar("Result")


def once(compute: Callable[[Source], Result]) -> Callable[[Source], Result]:
    """Decorate a function of one object, such as a finished run: a second call returns the result of the first.

    As ``functools.cached_property``, for functions outside of the class: the result is an attribute of the object, and goes
    with it. The object must not change, nor may the result.
    """
    name = f"{compute.__module__}.{compute.__qualname__}"

    @wraps(compute)
    def kept(source: Source) -> Result:
        found = vars(source)
        if name not in found:
            found[name] = compute(source)
        result: Result = found[name]
        return result

    return kept
