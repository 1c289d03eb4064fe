"""Step times fitted to a server's recording."""

from __future__ import annotations

import json

import pytest

from fragmeter.sim import settings, simulate
from fragmeter.sim.cost import cost
from fragmeter.sim.cost.steps import FittedSteps, StepCoefficients
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import UserError
from fragmeter.traces import paper_workload, synthetic_pairs

FOUND = StepCoefficients(base_us=100, token_us=(10, 5, 2, 1), row_us=3, context_us=0.5, chunk_us=50, pair_us=0.25)
FILE = {"schema_version": 1, "kind": "steps", "source": "a test", "coefficients": dict(vars(FOUND))}


def written(tmp_path, **changed):
    path = tmp_path / "steps.json"
    path.write_text(json.dumps(FILE | changed))
    return str(path)


def read(path):
    return cost(path, model("opt-13b"), gpu("a100-40gb"))


@pytest.mark.parametrize(
    "step, us",
    [
        ((0, 0, 0, 0), 100),
        ((1, 40, 0, 0), 100 + 10 + 3 + 20),
        # Tokens 1, 2, 3 and 4, 5 to 7: the last value holds for all further ones.
        ((7, 700, 0, 0), 100 + 10 + 5 + 2 * 2 + 3 * 1 + 21 + 350),
        ((0, 0, 6, 21), 100 + 10 + 5 + 2 * 2 + 2 * 1 + 50 + 21 / 4),
        ((2, 10, 6, 21), 100 + 10 + 5 + 2 * 2 + 4 * 1 + 6 + 5 + 50 + 21 / 4),
    ],
)
def test_a_step_is_the_sum_of_its_terms(step, us, tmp_path):
    assert read(written(tmp_path)).step_ticks(*step) == us * ticks.PER_US


def test_a_line_of_decodes_is_the_step(tmp_path):
    found = read(written(tmp_path))
    for decodes in range(12):
        base, slope, until = found.decode_line(decodes, 1)
        assert until is None
        for context in (1, 17, 4000):
            assert base + slope * context == found.step_ticks(decodes, context, 0, 0)


def test_leaps_equal_steps(tmp_path):
    work = paper_workload(synthetic_pairs("alpaca52k_opt", 200, 3, 2048), 6.0, 20.0)
    runs = [simulate(settings(policy="vllm-v1", cost=written(tmp_path), leap=leap), work) for leap in (True, False)]
    one, other = (run.log for run in runs)
    assert one.end_ticks == other.end_ticks
    assert one.release_ticks.tolist() == other.release_ticks.tolist()
    assert len(one.rows["ticks"]) < len(other.rows["ticks"])


@pytest.mark.parametrize(
    "changed, message",
    [
        ({"coefficients": {"base_us": 0, "token_us": [1]}}, "base_us = 0.0: must be above 0"),
        ({"coefficients": {"base_us": 1, "token_us": []}}, "token_us = 0: must have 1 to 17 values"),
        ({"coefficients": {"base_us": 1, "token_us": [1, -2]}}, "token_us = -2.0: must be from 0 to 1e9"),
        ({"coefficients": {"base_us": 1}}, "steps.json: coefficients.token_us"),
        ({"schema_version": 2}, "this version reads 1"),
    ],
)
def test_an_invalid_file_names_the_field(changed, message, tmp_path):
    with pytest.raises(UserError, match=r"(?s)^[^\n]*$") as caught:
        read(written(tmp_path, **changed))
    assert message in str(caught.value)


def test_swaps_are_refused():
    with pytest.raises(UserError, match="no time for copies of blocks"):
        FittedSteps(FOUND).swap_out_ticks(3)


def test_the_run_says_where_its_times_come_from(tmp_path):
    about = read(written(tmp_path)).describe()
    assert about["name"] == "steps" and about["source"] == "a test" and len(str(about["sha256"])) == 64
    assert about["row_us"] == {"value": 3.0, "unit": "us", "source": "a test"}
    assert about["token_us[3]"] == {"value": 1.0, "unit": "us", "source": "a test"}


def test_slots_that_are_read_again_take_their_share(tmp_path):
    found = read(written(tmp_path, repeated_reads=0.25))
    assert found.effective_context(1000, 400) == 1000 - 400 * 3 // 4
    assert found.describe()["repeated_reads"]["value"] == 0.25
    # Files of before say nothing of them, and price all reads alike.
    assert read(written(tmp_path)).effective_context is None


@pytest.mark.parametrize("share", [-0.1, 1.5, "all", float("nan")])
def test_a_share_of_repeated_reads_is_refused_by_name(share, tmp_path):
    with pytest.raises(UserError, match=r"steps.json: repeated_reads = "):
        read(written(tmp_path, repeated_reads=share))
