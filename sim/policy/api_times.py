"""Times of vLLM's API server on a CPU, for the setting ``api_server``: given in microseconds, or those of one machine (``api_server.json``).

``benchmarks/api_server_time.py`` measures them. They are CPU time: on a slower host each is longer.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from math import isfinite

from ..types.errors import SettingError

#: Parts of the time of an event loop: of a request, of each token of its prompt, of a step with outputs, and of each output token and
#: chunk in it.
PARTS = ("request", "prompt_token", "step", "token", "chunk")
#: The value that stands for the measured times.
MEASURED = "measured"
#: Microseconds; more is in another unit.
_MOST_US = 1e6
_FIELD = "api_server"


@cache
def measured_us() -> Mapping[str, Mapping[str, float]]:
    """The measured times of ``PARTS`` by endpoint; the file also has the machine, the date, the release and the loads."""
    document = json.loads(resources.files(__package__).joinpath("api_server.json").read_text("utf-8"))
    found: Mapping[str, Mapping[str, float]] = document["us"]
    return found


def api_server_us(text: str, endpoint: str) -> dict[str, float]:
    """Microseconds of each of ``PARTS``; those that are not given are 0.

    Args:
        text: ``MEASURED``, or a JSON object.
        endpoint: Of the requests, for which ``MEASURED`` has times.

    Raises:
        SettingError: It is neither, or has another part, or a time that is none.
    """
    if text == MEASURED:
        return {name: measured_us()[endpoint][name] for name in PARTS}
    try:
        given = json.loads(text)
    except ValueError:
        given = None
    if not isinstance(given, dict):
        example = '{"request": 1000, "prompt_token": 2, "token": 12, "chunk": 30}'
        raise SettingError(_FIELD, text, f"must be {MEASURED}, or microseconds of each part, as {example}")
    for name, value in given.items():
        if name not in PARTS:
            raise SettingError(f"{_FIELD}.{name}", value, f"is no part; give some of {', '.join(PARTS)}")
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or not 0 <= value <= _MOST_US:
            raise SettingError(f"{_FIELD}.{name}", value, "must be microseconds, from 0 to a second")
    return {name: float(given.get(name, 0)) for name in PARTS}
