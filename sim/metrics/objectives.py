"""Service level objectives of requests, as in ``vllm bench serve --goodput``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import isfinite

import numpy as np

from ..types.errors import SettingError
from .requests import RequestTimes

#: As ``vllm bench serve`` calls them.
NAMES = ("ttft", "tpot", "e2el")
_EXAMPLE = f"must be KEY:MILLISECONDS with KEY one of {', '.join(NAMES)}, such as ttft:500"


@dataclass(frozen=True)
class Objectives:
    """Upper limits of a request's latencies, in ms; None is no limit.

    Attributes:
        ttft: Time to first token.
        tpot: Time per output token after the first; an output of one token has 0.
        e2el: End-to-end latency.
    """

    ttft: float | None = None
    tpot: float | None = None
    e2el: float | None = None

    @property
    def limits(self) -> dict[str, float]:
        """The limits that are set, by name."""
        return {name: limit for name in NAMES if (limit := getattr(self, name)) is not None}

    def scaled(self, factor: float) -> Objectives:
        """These with all limits times a factor."""
        return Objectives(**{name: limit * factor for name, limit in self.limits.items()})

    def missed(
        self,
        arrival_ticks: np.ndarray,
        first_token_ticks: np.ndarray,
        finish_ticks: np.ndarray,
        output_tokens: np.ndarray,
    ) -> dict[str, np.ndarray]:
        """The requests that miss each limit, bool [n] by name, from int64 [n].

        With lower bounds for the times of unfinished requests, the result has those that have already missed a limit.
        """
        after_first = np.where(output_tokens > 1, finish_ticks - first_token_ticks, 0)
        taken_ms = {
            "ttft": (first_token_ticks - arrival_ticks) / 1e9,
            "tpot": after_first / np.maximum(output_tokens - 1, 1) / 1e9,
            "e2el": (finish_ticks - arrival_ticks) / 1e9,
        }
        return {name: taken_ms[name] > limit for name, limit in self.limits.items()}

    def met(self, times: RequestTimes) -> dict[str, np.ndarray]:
        """The served requests that meet each limit, bool [served] by name, and under ``all`` those that meet all."""
        columns = (times.arrival_ticks, times.first_token_ticks, times.finish_ticks, times.output_tokens)
        found = {name: ~missed for name, missed in self.missed(*columns).items()}
        return found | {"all": np.logical_and.reduce(list(found.values()))}

    def __str__(self) -> str:
        return " ".join(f"{name}:{limit:g}" for name, limit in self.limits.items())


def objectives(texts: Sequence[str]) -> Objectives:
    """Read ``--goodput ttft:500 tpot:50``, in ms as in ``vllm bench serve``; or with commas, or repeated.

    Raises:
        SettingError: None, an unknown one, one given twice, or a limit that is no positive number.
    """
    found: dict[str, float] = {}
    for text in (each for given in texts for each in given.split(",")):
        name, colon, value = text.partition(":")
        if name not in NAMES or not colon:
            raise SettingError("goodput", text, _EXAMPLE)
        if name in found:
            raise SettingError("goodput", text, f"gives {name} a second time; leave one out")
        found[name] = _limit(text, value)
    if not found:
        raise SettingError("goodput", "", _EXAMPLE)
    return Objectives(**found)


def _limit(text: str, value: str) -> float:
    try:
        limit = float(value)
    except ValueError:
        raise SettingError("goodput", text, _EXAMPLE) from None
    if not (limit > 0 and isfinite(limit)):
        raise SettingError("goodput", text, "the limit must be above 0, in ms")
    return limit
