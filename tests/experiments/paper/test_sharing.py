"""Memory saved by sharing: how it is measured, the closed form of samples, and the fit of beams."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fragmeter.experiments.paper.figures.fig15 import (
    BEAMS_ALPACA,
    BEAMS_SHAREGPT,
    CLOSED,
    FITTED_ON_BEAMS,
    SAMPLES_ALPACA,
    SHAREGPT_BEAM_SURVIVAL,
    SURVIVALS,
    compare_sharing,
)
from fragmeter.experiments.paper.paper import ALPACA_SET, FIG15, FIG15_SHAREGPT, Experiment, Source, source
from fragmeter.experiments.paper.sharing import (
    CLOSED_FORM,
    SAVED,
    SharingCase,
    closed_form_pct,
    measure,
    measure_sharing,
)
from fragmeter.experiments.runs.crossing import scan
from fragmeter.sim import Workload
from fragmeter.sim.policy.options import FITTED_BEAM_SURVIVAL
from fragmeter.traces import read

#: The lengths that the survival is fitted on.
ALPACA = Source((0,), drawn_from=ALPACA_SET)
SHORT = replace(FIG15, duration_s=90, window_s=(30, 90))
needs_traces = pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")


def served(*rows: tuple[int, int]) -> Workload:
    """Requests of (prompt_tokens, output_tokens) that arrive at once."""
    prompt, output = np.array(rows).T
    return Workload("made up", np.zeros(len(rows)), prompt, output)


def test_a_request_of_two_samples_by_hand():
    """The prefill's two blocks are named once. In each of the four steps that decode, both tables have three entries,
    and the two blocks of the prompt are named twice: six entries, four blocks."""
    found = measure(served((32, 5)), SharingCase(replace(FIG15, window_s=(0, 10)), 0, 2))
    assert found.values[SAVED] == pytest.approx(100 * (1 - 5 / (1 + 4 * 6 / 4)))
    assert found.values[CLOSED_FORM] == pytest.approx(100 * 2 / 6)
    # The prefill is the longest step.
    assert 0 < found.over_time[SAVED] < found.values[SAVED]


def test_only_the_window_counts():
    """The request is served within a second."""
    early, late = (replace(FIG15, window_s=span) for span in ((0, 10), (0.001, 10)))
    whole, decodes = (measure(served((32, 5)), SharingCase(span, 0, 2)).values[SAVED] for span in (early, late))
    assert decodes == pytest.approx(100 * 2 / 6) != whole


@given(
    rows=st.lists(st.tuples(st.integers(1, 100), st.integers(2, 100)), min_size=1, max_size=5),
    n=st.integers(1, 6),
    size=st.sampled_from((1, 3, 16)),
)
def test_the_closed_form_is_what_adding_up_step_by_step_gives(rows, n, size):
    saved = logical = 0
    for prompt, output in rows:
        for tokens in range(prompt + 1, prompt + output):
            saved += (n - 1) * (prompt // size)
            logical += n * -(-tokens // size)
    prompts, outputs = np.array(rows).T
    assert closed_form_pct(prompts, outputs, n, size) == pytest.approx(100 * saved / logical)


@needs_traces
def test_the_closed_form_on_the_papers_pairs():
    pairs = read(Path(os.environ["FRAGMETER_TRACES"]) / "sosp23_sharegpt_opt.csv.gz").pairs.capped(2048, strict=True)
    found = [closed_form_pct(pairs.prompt_tokens, pairs.output_tokens, n) for n in (2, 4, 6)]
    assert found == pytest.approx([17.4, 26.2, 29.1], abs=0.15)


@pytest.mark.slow
def test_samples_on_sharegpt_save_what_the_closed_form_says():
    """Few samples and many; the slow tests have those between, here and in the next."""
    cases = [SharingCase(FIG15_SHAREGPT, 0, n) for n in (2, 6)]
    for found in measure_sharing(cases, {FIG15_SHAREGPT: source(seeds=1)}, "").values():
        assert found.values[SAVED] == pytest.approx(found.values[CLOSED_FORM], abs=1)


@pytest.mark.slow
def test_samples_on_alpaca_save_what_was_published():
    cases = {n: SharingCase(FIG15, 0, n) for n in (2, 6)}
    found = measure_sharing(list(cases.values()), {FIG15: ALPACA}, "")
    for n, case in cases.items():
        assert found[case].values[SAVED] == pytest.approx(FIG15.published()[SAMPLES_ALPACA, n], abs=1.5)


@pytest.mark.slow
def test_beams_in_a_minute_of_alpaca_save_nearly_what_was_published():
    """Within two points, as the measurement is short; the slow test holds the whole one to its limits."""
    cases = {n: SharingCase(SHORT, 0, n, FITTED_BEAM_SURVIVAL) for n in (2, 4)}
    found = measure_sharing(list(cases.values()), {SHORT: ALPACA}, "")
    for n, case in cases.items():
        assert found[case].values[SAVED] == pytest.approx(FIG15.published()[BEAMS_ALPACA, n], abs=2)


@pytest.mark.slow
def test_the_fewer_beams_live_on_the_more_they_share():
    cases = [SharingCase(SHORT, 0, 4, survival) for survival in (1.0, 0.95, 0.9)]
    values = [found.values[SAVED] for found in measure_sharing(cases, {SHORT: ALPACA}, "").values()]
    assert values == sorted(values)
    # Beams that all live are samples.
    assert values[0] == pytest.approx(measure(ALPACA.workload(SHORT, 0), SharingCase(SHORT, 0, 4)).values[SAVED])


def fitted(experiment: Experiment, lengths: Source, series: str, coarse: range) -> tuple[float, dict[int, float]]:
    """The survival nearest to the published value of two beams, and all scanned values by thousandths."""

    def measured(thousandths: range) -> dict[int, float]:
        cases = {at: SharingCase(experiment, lengths.seeds[0], FITTED_ON_BEAMS, at / 1000) for at in thousandths}
        found = measure_sharing(list(cases.values()), {experiment: lengths}, "")
        return {at: found[case].values[SAVED] for at, case in cases.items()}

    best, values = scan(measured, FIG15.published()[series, FITTED_ON_BEAMS], coarse, 1)
    return best / 1000, values


@pytest.mark.slow
def test_the_survival_that_comes_with_the_simulator_is_the_one_that_is_fitted():
    survival, values = fitted(FIG15, ALPACA, BEAMS_ALPACA, range(900, 951, 10))
    assert survival == FITTED_BEAM_SURVIVAL
    coarse = [value for thousandths, value in values.items() if thousandths / 1000 in SURVIVALS]
    assert coarse == sorted(coarse, reverse=True)


@pytest.mark.slow
@needs_traces
def test_sharegpt_s_survival_is_the_one_that_is_fitted_on_the_pairs():
    pairs = Path(os.environ["FRAGMETER_TRACES"]) / "sosp23_sharegpt_opt.csv.gz"
    survival, _ = fitted(FIG15_SHAREGPT, source(pairs), BEAMS_SHAREGPT, range(940, 991, 10))
    assert survival == SHAREGPT_BEAM_SURVIVAL


def check(rows: list[dict]) -> None:
    """What the simulator has to show."""
    errors = {(row["series"], row["x"]): row["error"] for row in rows}
    assert all(abs(errors[SAMPLES_ALPACA, n]) <= 1.5 for n in (2, 4, 6))
    assert abs(errors[BEAMS_ALPACA, 2]) <= 0.1
    assert abs(errors[BEAMS_ALPACA, 4]) <= 3 and abs(errors[BEAMS_ALPACA, 6]) <= 5
    assert all(abs(errors[CLOSED, n]) <= 1 for n in (2, 4, 6))


@pytest.mark.slow
def test_fig15_with_drawn_lengths():
    check(compare_sharing(source(seeds=1))["rows"])


@needs_traces
@pytest.mark.slow
def test_fig15_on_the_papers_pairs():
    check(compare_sharing(source(Path(os.environ["FRAGMETER_TRACES"]) / "sosp23_sharegpt_opt.csv.gz"))["rows"])
