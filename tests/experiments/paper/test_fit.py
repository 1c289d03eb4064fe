"""The scan that fits the step time, on responses with a known best scale."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import numpy as np
import pytest

from fragmeter.experiments.paper.fit import CONTEXT_STEP_SCALE, SCALES, fit
from fragmeter.experiments.paper.paper import Source
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.traces import LengthPairs

PUBLISHED = 30.42


@dataclass
class Response:
    """Stands for a bench: vLLM's mean batch as a function of s."""

    of: Callable[[float], float]

    def __post_init__(self) -> None:
        self.source = Source((3,), LengthPairs("made up", np.ones(1), np.ones(1)))
        self.cases = []

    def measure(self, cases: list, subject: str) -> list:
        self.cases += cases
        return [SimpleNamespace(values={"batched_requests": self.of(case.scale)}) for case in cases]


def test_a_rising_response_is_met_at_the_nearest_fine_step():
    bench = Response(lambda s: PUBLISHED + 40 * (s - 1.1237))
    found = fit(bench)
    assert found.scale == 1.125
    # 1.00 to 1.25 by 0.05, then 1.105 to 1.145 by 0.005: where it crosses, and nowhere else.
    assert [s for s, _ in found.scan] == sorted([*SCALES, *np.round(np.arange(1.105, 1.1451, 0.005), 3)])
    assert {(case.policy, case.experiment.figure, case.seed) for case in bench.cases} == {("vllm-sosp23", "fig13a", 3)}


def test_a_response_that_falls_again_is_met_where_it_first_crosses():
    # Met within 0.01 at s = 1.105, and exactly at s = 1.20.
    falls = fit(Response(lambda s: PUBLISHED + 20 * (s - 1.1055) * (1.2 - s)))
    assert falls.scale == 1.105


def test_a_wiggle_does_not_lead_the_fit_astray():
    rough = Response(lambda s: PUBLISHED + 40 * (s - 1.123) + (0.1 if round(1000 * s) % 10 == 5 else 0))
    assert fit(rough).scale == 1.12


def test_a_tie_takes_the_smaller_scale():
    assert fit(Response(lambda s: PUBLISHED + (-1 if s < 1.0775 else 1))).scale == 1.05


def test_a_value_that_is_never_reached_takes_the_nearest_of_the_coarse_scan():
    found = fit(Response(lambda s: 10 + s))
    assert (found.scale, [s for s, _ in found.scan]) == (1.25, list(SCALES))
    assert (
        "Fig 13a's vLLM mean batch, exact pairs, alone: 30.42 requests published, 11.25 simulated."
        in found.description()
    )


def test_drawn_lengths_are_not_fitted_on():
    bench = Response(lambda s: pytest.fail("was measured"))
    bench.source = Source((0,))
    found = fit(bench)
    assert (found.scale, found.scan) == (CONTEXT_STEP_SCALE, ())
    assert fit(bench, by_context=False).scale == FITTED_STEP_SCALE
    assert "These lengths took no part in the fit." in found.description()
