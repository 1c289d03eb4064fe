"""Errors of pydantic in the words of this package: what a value must be, without the name of a Python type."""

from __future__ import annotations

from math import isnan
from typing import TYPE_CHECKING

from .errors import SettingError, UserError

if TYPE_CHECKING:
    from pydantic import ValidationError
    from pydantic_core import ErrorDetails

#: Pydantic's types of errors for a field that there is not.
UNKNOWN = ("extra_forbidden", "unexpected_keyword_argument")
#: Pydantic's types of errors for a value beyond a bound, which a NaN is of each.
_BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
#: Requirement by pydantic's error type; {names} are those of the error's context.
_REQUIREMENTS = {
    "greater_than": "must be above {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be below {lt}",
    "less_than_equal": "must be at most {le}",
    "literal_error": "must be {expected}",
    "finite_number": "must be finite",
    "missing": "is missing",
    **dict.fromkeys(("int_type", "int_parsing", "int_from_float"), "must be a whole number"),
    **dict.fromkeys(("float_type", "float_parsing"), "must be a number"),
    **dict.fromkeys(("bool_type", "bool_parsing"), "must be true or false"),
    **dict.fromkeys(("string_type", "bytes_type"), "must be text"),
    **dict.fromkeys(("list_type", "tuple_type"), "must be a list"),
    **dict.fromkeys(("dict_type", "model_type", "dataclass_type"), "must be an object"),
    **dict.fromkeys(UNKNOWN, "is not a known field"),
}


def requirement(error: ErrorDetails) -> str:
    """What pydantic requires of a value; errors of other kinds keep pydantic's message."""
    if error["type"] in _BOUNDS and _is_nan(error["input"]):
        return "must be a number"
    known = _REQUIREMENTS.get(error["type"])
    if known is None:
        return error["msg"].removeprefix("Value error, ")
    # Bounds of floats are given as floats: 1.0 is written as 1.
    context = {
        name: f"{value:.15g}" if isinstance(value, float) else value for name, value in error.get("ctx", {}).items()
    }
    return known.format(**context)


def _is_nan(value: object) -> bool:
    """Whether a value is not a number, or text that is read as that."""
    return isinstance(value, float) and isnan(value) or isinstance(value, str) and value.strip().lower() == "nan"


def complaint(name: str, error: ValidationError, what: str = "calibration file") -> UserError:
    """The first validation error of a file as one line; ``what`` the file should be."""
    # An unknown field is often a misspelled one: it explains a missing one.
    first = min(error.errors(), key=lambda each: each["type"] not in UNKNOWN)
    message = requirement(first)
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    if not where:
        return UserError(f"{name}: is not a {what}: {message}")
    # The input of a missing field is the object without it.
    value = None if first["type"] == "missing" else first["input"]
    shown = value if isinstance(value, str | int | float | None) else f"a {type(value).__name__}"
    if where == "schema_version" and first["type"] == "literal_error":
        message = (
            f"this version reads {first['ctx']['expected']}; write it anew, or use the fragmeter that wrote the file"
        )
    remedy = (
        "give it"
        if first["type"] == "missing"
        else "correct its name, or leave it out"
        if first["type"] in UNKNOWN
        else ""
    )
    return SettingError(f"{name}: {where}", shown, f"{message}; {remedy}" if remedy else message)
