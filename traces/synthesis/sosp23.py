"""The workload rule of the SOSP'23 paper's experiments, with identical random numbers.

Source: ``generate_text_completion_requests`` in the artifact (sosp-ae-39/sosp-ae-astra,
orca/benchmark/trace.py). One seed initialises both of its generators: numpy's legacy one for the arrivals
and Python's own for the shuffle. The shuffle permutes the selected rows, not the whole set.
"""

from __future__ import annotations

import random

import numpy as np

from ...sim.types import ticks
from ...sim.types.errors import SettingError
from ...sim.workload.workload import Workload
from ..types.pairs import LengthPairs

_QUANTUM_S, _QUANTA_PER_SECOND = 0.01, 100
_QUANTUM_TICKS = ticks.PER_SECOND // _QUANTA_PER_SECOND
_MOST_REQUESTS = 10**9


def paper_workload(
    pairs: LengthPairs, rate: float, duration_s: float, seed: int = 0, max_model_len: int = 2048
) -> Workload:
    """The workload that the paper's experiments would draw from ``pairs``.

    Rows with prompt + output below ``max_model_len`` are kept in file order. Each 10 ms quantum has a
    Poisson(rate * 0.01) number of arrivals, at its start. The first N rows, repeated from the top if there are
    fewer, are shuffled among the arrivals. ``rate`` is in requests/s. Requests declare no max_tokens.

    Raises:
        SettingError: ``rate`` or ``duration_s`` is not positive and finite, no request fits the model, or none arrives.
    """
    _check("request_rate", rate)
    _check("duration_s", duration_s)
    if rate * duration_s > _MOST_REQUESTS:
        raise SettingError("request_rate", rate, f"over {_MOST_REQUESTS:,} requests in {duration_s:g} s; lower it")
    fitting = pairs.capped(max_model_len, strict=True)
    if not len(fitting):
        raise SettingError("max_model_len", max_model_len, f"no request of {pairs.name} is shorter; raise it")
    arrivals = _arrival_ticks(rate, duration_s, seed)
    if not len(arrivals):
        raise SettingError("request_rate", rate, f"no request arrives in {duration_s:g} s; raise it or the duration")
    rows = np.array(_shuffled(len(arrivals), seed), dtype=np.int64) % len(fitting)
    name = f"{pairs.name}, {rate:g} req/s, {duration_s:g} s, seed {seed}"
    return Workload(name, arrivals, fitting.prompt_tokens[rows], fitting.output_tokens[rows])


def _check(field: str, value: float) -> None:
    if not 0 < value < np.inf:
        raise SettingError(field, value, "must be positive and finite")


def _arrival_ticks(rate: float, duration_s: float, seed: int) -> np.ndarray:
    quanta = int(duration_s * _QUANTA_PER_SECOND)
    counts = np.random.RandomState(seed).poisson(rate * _QUANTUM_S, size=quanta)
    return np.repeat(np.arange(quanta, dtype=np.int64) * _QUANTUM_TICKS, counts)


def _shuffled(count: int, seed: int) -> list[int]:
    # random.shuffle permutes by position alone, so shuffling positions is equivalent to shuffling rows.
    positions = list(range(count))
    random.Random(seed).shuffle(positions)
    return positions
