"""A grid of settings: ``name=values`` for each axis, and every combination of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from decimal import Decimal
from itertools import product

from pydantic import ValidationError

from ...sim.config.settings import SHARED, setting_error
from ...sim.policy.registry import options_by_policy
from ...sim.types.errors import SettingError
from .inputs import Inputs

#: Points of the largest grid: days of work, and one file per point.
MOST_POINTS = 1_000_000
#: Text of a value that stands for the default.
NONE = "none"
_EXAMPLE = "must be NAME=VALUE,VALUE or NAME=FIRST:LAST:STEP, such as block_size=8,16,32 or request_rate=1:8:0.5"
#: The part of the inputs that has each setting.
PART_OF = dict.fromkeys((*SHARED, *options_by_policy()), "settings") | {
    field.name: part.name
    for part in fields(Inputs)
    if part.name != "settings"
    for field in fields(getattr(Inputs(), part.name))
}


@dataclass(frozen=True)
class Point:
    """One combination.

    Attributes:
        axis_values: Its value on each axis, as the user wrote it.
        inputs: The inputs of its run.
    """

    axis_values: dict[str, str]
    inputs: Inputs


def axes(texts: Sequence[str], flag: str = "grid", also: Sequence[str] = ()) -> dict[str, list[str]]:
    """Values of each axis, by name.

    Args:
        flag: The flag that gives them, for errors.
        also: Names that are allowed beside those of settings.

    Raises:
        SettingError: An axis is invalid, names no setting, or is given twice.
    """
    found: dict[str, list[str]] = {}
    for text in texts:
        name, equals, values = text.partition("=")
        if equals and name not in also:
            name = known_name(name, flag, text)
        if not name or not values:
            raise SettingError(flag, text, _EXAMPLE)
        if name in found:
            raise SettingError(flag, text, f"gives {name} a second time; put all its values into one")
        found[name] = axis_values(values, text)
    return found


def axis_values(values: str, text: str) -> list[str]:
    """The values of one axis, from ``8,16,32`` or ``1:8:0.5``; ``text`` is the user's text for errors.

    Raises:
        SettingError: A range without values.
    """
    return [value for part in listed(values) for value in _values(part, text)]


def listed(text: str) -> list[str]:
    """The parts of a text between its commas, those within an object or a list of JSON apart."""
    parts, depth = [""], 0
    for letter in text:
        depth += (letter in "{[") - (letter in "}]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


def known_name(name: str, flag: str, text: str) -> str:
    """The name of a setting, from the name or the flag.

    Raises:
        SettingError: The name is unknown; ``text`` is the user's text for ``flag``.
    """
    name = name.strip().removeprefix("--").replace("-", "_")
    if name not in PART_OF:
        raise SettingError(flag, text, f"{name} is not a setting of fragmeter simulate; see its --help-all")
    return name


def points(base: Inputs, grid: Mapping[str, Sequence[str]]) -> list[Point]:
    """Every combination; the last axis changes fastest.

    Raises:
        SettingError: An invalid value, or more points than the limit.
    """
    total = 1
    for values in grid.values():
        total *= len(values)
    if total > MOST_POINTS:
        raise SettingError("grid", total, f"are more points than {MOST_POINTS}; leave some out")
    combinations = (dict(zip(grid, combination, strict=True)) for combination in product(*grid.values()))
    return [Point(values, changed(base, values)) for values in combinations]


def changed(base: Inputs, values: Mapping[str, str]) -> Inputs:
    """The inputs with some settings changed, from text as on a command line.

    Raises:
        SettingError: An invalid value.
    """
    by_part: dict[str, dict[str, str | None]] = {}
    for name, text in values.items():
        by_part.setdefault(PART_OF[name], {})[name] = None if text == NONE else text
    try:
        return replace(base, **{part: replace(getattr(base, part), **new) for part, new in by_part.items()})
    except ValidationError as error:
        raise setting_error(error) from None


def _values(part: str, text: str) -> Iterator[str]:
    """A single value, or the values of a range, its end included."""
    try:
        first, last, *steps = (Decimal(number) for number in part.split(":"))
        step = steps[0] if steps else Decimal(1)
        count = (last - first) // step
        fits = 0 <= count < MOST_POINTS
    except (ValueError, ArithmeticError):
        # A name, not a range.
        yield part.strip()
        return
    if not fits:
        raise SettingError("grid", text, f"the range {part} has no values, or too many; {_EXAMPLE}")
    for place in range(int(count) + 1):
        yield f"{first + place * step:f}"
