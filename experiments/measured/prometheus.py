"""Readings from Prometheus: its answer to ``/api/v1/query_range``, asked for or saved.

Prometheus has one list of times and values for each series; a reading is all samples of one time. The series are those of the
server itself, so that a query with a function or a sum has no name to read them by. A counter that falls is that of a server
that was restarted: its readings begin with the restart.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator, Mapping
from math import isfinite
from typing import Any
from urllib.parse import urlencode

from ...sim.types.errors import SettingError, UserError
from .get import get
from .scrapes import COUNTERS, READ, RUNNING, SERVERS, Readings, Samples, canonical, number, timed, total

#: Points of a window, at most, and the least seconds between them.
_POINTS, _LEAST_STEP_S = 240, 5
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_REMEDY = "save the answer of /api/v1/query_range to a query of the server's own metrics"


def window_s(text: str) -> int:
    """The seconds of a window such as ``30m``; raises SettingError for anything else."""
    found = re.fullmatch(r"([1-9]\d{0,5})([smhd])", text)
    if found is None:
        raise SettingError("window", text, "must be a number with its unit, as 30m or 2h")
    return int(found[1]) * _UNITS[found[2]]


def asked(url: str, seconds: int, now_s: float | None = None) -> Readings:
    """What a Prometheus has of its servers in the last seconds.

    Args:
        url: Its address, with or without ``/api/v1/query_range``.
        now_s: End of the window; None for now.

    Raises:
        SettingError: It does not answer, or refuses the query.
        UserError: It has no metrics of a server.
    """
    end = round(time.time() if now_s is None else now_s, 3)
    step = max(_LEAST_STEP_S, -(-seconds // _POINTS))
    names = "|".join(dict.fromkeys(each.replace(":", ".", 1) for each in READ))
    values = {"query": f'{{__name__=~"(ray_)?({names})"}}', "start": end - seconds, "end": end, "step": step}
    address = url.rstrip("/").removesuffix("/api/v1/query_range")
    return readings_of(address, get(f"{address}/api/v1/query_range?{urlencode(values)}", "prometheus"))


def readings_of(source: str, text: str) -> Readings:
    """The readings in one or several answers of Prometheus, one behind the other.

    Raises:
        UserError: They are none, or have no metrics of a server.
    """
    by_time: dict[float, Samples] = {}
    server: str | None = None
    for series in _series(source, text):
        labels = series.get("metric")
        if not isinstance(labels, dict) or "__name__" not in labels:
            raise UserError(f"{source}: has a series without a name, of a query with a function; {_REMEDY}")
        name = canonical(str(labels["__name__"]))
        begin = name.partition(":")[0]
        if begin not in SERVERS or begin != (server := server or begin):
            continue
        key = (name, tuple((str(label), str(value)) for label, value in sorted(labels.items()) if label != "__name__"))
        for at_s, value in _values(source, series):
            by_time.setdefault(at_s, {})[key] = value
    if not by_time:
        names = ", ".join(SERVERS.values())
        raise UserError(f"{source}: has no metrics of {names} in this window; give another --window, or --metrics")
    if any(total(samples, RUNNING) is not None for samples in by_time.values()):
        # Answers to several queries may have times of their own.
        by_time = {at_s: samples for at_s, samples in by_time.items() if total(samples, RUNNING) is not None}
    return timed(source, _since_restart(by_time))


def _series(source: str, text: str) -> Iterator[Mapping[str, Any]]:
    decoder, place = json.JSONDecoder(), 0
    text = text.strip()
    while place < len(text):
        try:
            answer, place = decoder.raw_decode(text, place)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{source}: is no JSON ({error}); {_REMEDY}") from None
        while place < len(text) and text[place].isspace():
            place += 1
        data = answer.get("data") if isinstance(answer, dict) else None
        if isinstance(answer, dict) and answer.get("status") == "error":
            raise UserError(f"{source}: Prometheus answers {str(answer.get('error'))[:120]!r}; {_REMEDY}")
        found = data.get("result") if isinstance(data, dict) else None
        if not isinstance(found, list) or not all(isinstance(each, dict) for each in found):
            raise UserError(f"{source}: is no answer of Prometheus: data.result is missing; {_REMEDY}")
        yield from found


def _values(source: str, series: Mapping[str, Any]) -> Iterator[tuple[float, float]]:
    """Times in seconds and values of a series; an answer to ``query`` has one."""
    pairs = series.get("values", [series["value"]] if "value" in series else None)
    for pair in pairs if isinstance(pairs, list) else [None]:
        at_s, value = pair if isinstance(pair, list) and len(pair) == 2 else (None, None)
        found = (number(str(at_s)), number(str(value)))
        if found[0] is None or found[1] is None or not isfinite(found[0]):
            raise UserError(f"{source}: values has {str(pair)[:60]!r} in place of a time and a number; {_REMEDY}")
        yield found[0], found[1]


def _since_restart(by_time: dict[float, Samples]) -> dict[float, Samples]:
    """The readings since the last one at which a counter is lower than before."""
    begin, before = float("-inf"), Samples()
    for at_s in sorted(by_time):
        samples = by_time[at_s]
        if any(value < before.get(key, value) for key, value in samples.items() if key[0] in COUNTERS):
            begin = at_s
        before = samples
    return {at_s: samples for at_s, samples in by_time.items() if at_s >= begin}
