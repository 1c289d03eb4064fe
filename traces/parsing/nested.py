"""Files of JSON values that are no rows: each value holds any number of requests, in its own structure.

values of the file -> requests, as flat objects -> the checks that all rows get
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from .form import Form
from .json_values import Element

Record = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Nested:
    """A format of such values.

    Attributes:
        form: The form of its requests.
        holds: Whether a value is of this format.
        opener: Returns, for one file, the function from a value to its requests, under the names of the form.
        unit: What the errors count: ``"line"`` if a value has at most one request, else ``"request"``.
    """

    form: Form
    holds: Callable[[Record], bool]
    opener: Callable[[], Callable[[Record], Iterable[Any]]]
    unit: str = "request"

    def requests(self, values: Iterable[Element]) -> Iterator[Element]:
        """The requests of the values; a value that is no object is kept, to be refused as a row."""
        opened, number = self.opener(), 0
        for value in values:
            for request in opened(value.value) if isinstance(value.value, dict) else [value.value]:
                number += 1
                yield Element(request, value.line if self.unit == "line" else number)
