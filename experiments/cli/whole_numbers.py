"""Integers on the command line: refused unless every verb would take them for the same number.

Left to themselves, cyclopts rounds 1.5 and reads 0x10, and pydantic reads 1.0 and 1_0. So what the user wrote is looked
at before either of them sees it, for all flags of all verbs in one place: decimal digits, with a minus or without.
"""

from __future__ import annotations

import re
from types import NoneType
from typing import Any, get_args

from cyclopts import App, ArgumentCollection

from ...sim.types.errors import SettingError

_WHOLE = re.compile("-?[0-9]+")


def whole_numbers(app: App, commands: tuple[str, ...], arguments: ArgumentCollection) -> None:
    """Look at what integer flags were given, as one of cyclopts' ``config``.

    Args:
        app, commands: The verb; it does not matter.
        arguments: Of one command line, parsed and not yet converted.

    Raises:
        SettingError: One that is no whole number.
    """
    for argument in arguments:
        if is_whole(argument.hint):
            for token in argument.tokens:
                if not _WHOLE.fullmatch(token.value):
                    field = argument.name.lstrip("-").replace("-", "_")
                    raise SettingError(field, token.value, "must be a whole number, in digits")


def is_whole(hint: Any) -> bool:
    """Whether a flag of this type takes an integer and nothing else, if it is given."""
    return hint is int or set(get_args(hint)) == {int, NoneType}
