"""What a real vLLM server did (``make server-check``, first repetition), against the simulator: no server runs here."""

from __future__ import annotations

import json
import runpy
import shutil

import numpy as np
import pytest

from fragmeter.experiments.measured.step_fit import step_table
from fragmeter.reports.page.table import filled
from fragmeter.sim import settings, simulate
from fragmeter.sim.cost.steps import FittedSteps, StepCoefficients
from fragmeter.sim.engine.observer import Observer
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.ticks import PER_US
from paths import ROOT
from tools.live.decisions import compare_decisions, workload_in_steps
from tools.live.loads import CALIBRATION, SESSIONS
from tools.live.prediction import NULL_MODELS, null_models, predict, recorded, settings_of
from tools.live.results import LIMITS, mean_error, misses, results, table

DATA = ROOT / "tests" / "data" / "real_server"
TIGHT = DATA / "1" / "tight"
ONE_TICK = FittedSteps(StepCoefficients(base_us=1 / PER_US, token_us=(0.0,)))
KNOWN = json.loads((DATA / "results.json").read_text())


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    folder = tmp_path_factory.mktemp("server")
    shutil.copytree(DATA / "1", folder / "1")
    return results(folder, 1, SESSIONS, None)


@pytest.mark.slow
def test_every_decision_of_the_server_is_the_simulators(found):
    assert [each["difference"] for each in found["decisions"]] == [None, None]
    assert sum(each["steps"] for each in found["decisions"]) > 20_000
    assert sum(each["preemptions"] for each in found["decisions"]) > 50
    for each in found["decisions"]:
        for measured, simulated in each["waste"].values():
            assert measured == pytest.approx(simulated, abs=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize(
    "changed",
    [
        pytest.param({"num_gpu_blocks_override": 129}, id="blocks"),
        pytest.param({"max_num_seqs": 31}, id="sequences", marks=pytest.mark.slow),
        pytest.param({"max_num_batched_tokens": 511}, id="budget", marks=pytest.mark.slow),
        pytest.param({"enable_prefix_caching": False}, id="no caching", marks=pytest.mark.slow),
        pytest.param({"vllm_release": "0.20"}, id="release", marks=pytest.mark.slow),
        pytest.param({"async_scheduling": True}, id="asynchronous", marks=pytest.mark.slow),
    ],
)
def test_another_server_is_noticed(changed):
    probe = read_probe(TIGHT / "probe.jsonl.gz", digests=True)
    chosen = settings_of(probe.header, TIGHT / "model" / "config.json")
    assert compare_decisions(probe, settings(**chosen.as_dict() | changed)).difference


def test_the_block_size_is_that_of_groups_that_keep_tokens():
    header = read_probe(TIGHT / "probe.jsonl.gz").header
    groups = [["CircularBufferSpec", 4], ["MambaSpec", 640], *header["groups"]]
    chosen = settings_of(header | {"groups": groups}, TIGHT / "model" / "config.json")
    assert chosen.value("block_size") == header["groups"][0][1] not in (4, 640)


@pytest.mark.slow
def test_predictions_are_those_of_the_published_results(found):
    assert found["loads"].keys() == KNOWN["loads"].keys()
    for name, load in found["loads"].items():
        for metric, row in load["metrics"].items():
            for model in ("simulated", *NULL_MODELS):
                assert row[model] == pytest.approx(KNOWN["loads"][name]["metrics"][metric][model], rel=1e-6)


@pytest.mark.slow
def test_saturated_throughput_is_predicted_and_a_constant_step_fails(found):
    """Limits of before the prediction was made; the published table has the rest, misses included."""
    load = KNOWN["loads"]["ample/random-saturated"]["metrics"]
    assert not misses({"output_throughput": load["output_throughput"]})
    assert mean_error(load, "simulated") < mean_error(load, "constant")
    off = {
        metric: dict(row, simulated_error=2 * LIMITS[metric], noise=0.0)
        for metric, row in load.items()
        if metric in LIMITS
    }
    assert misses(off) == [metric for metric in LIMITS if metric in off]


#: Where requests queue or are preempted.
LOADED = [
    name
    for name, load in KNOWN["loads"].items()
    if name.endswith("-saturated") or load["metrics"]["num_preemptions"]["measured"]
]


@pytest.mark.parametrize("name", LOADED)
def test_prediction_is_better_than_null_models_of_the_same_calibration(name):
    metrics = KNOWN["loads"][name]["metrics"]
    assert mean_error(metrics, "simulated") < min(mean_error(metrics, model) for model in ("constant", "tokens"))
    # The page says why.
    nearer = mean_error(metrics, "simulated") < mean_error(metrics, "contexts")
    assert nearer == (name != "tight/prefixes-saturated")


@pytest.mark.parametrize("name", [name for name in KNOWN["loads"] if name.endswith(("-saturated", "-closed"))])
def test_throughput_of_a_full_server_is_nearer_than_by_a_constant_and_by_tokens(name):
    row = KNOWN["loads"][name]["metrics"]["output_throughput"]
    assert abs(row["simulated_error"]) < min(abs(row[f"{model}_error"]) for model in ("constant", "tokens"))


@pytest.mark.slow
def test_null_models_know_the_calibration_alone(found):
    """The mean step of the calibration, for every load."""
    probe = read_probe(DATA / "1" / "ample" / "probe.jsonl.gz")
    model = DATA / "1" / "ample" / "model" / "config.json"
    loads = recorded(SESSIONS[0], DATA / "1" / "ample", model, probe)
    table = step_table(loads[CALIBRATION[1]].steps)
    nulls = null_models(loads[CALIBRATION[1]], found["calibration"]["outside_ms"])
    assert nulls["constant"].step_ticks(7, 900, 20, 300) == pytest.approx(table["ns"].mean() * PER_US / 1e3)
    served = predict(loads["random-saturated"], nulls["constant"]).run
    assert not np.ptp(np.unique(served.log.rows["ticks"][served.log.rows["steps"] == 1]))


class Repeats(Observer):
    """Slots that the decodes of each step read again."""

    every_step = True

    def run_started(self, engine, refused):
        self.memory, self.slots = engine.memory, []

    def step_started(self, now, ticks, leap, plan):
        if ticks:
            self.slots.append(self.memory.repeated_slots(plan.admitted))


@pytest.mark.slow
@pytest.mark.parametrize("session", ["ample", "tight"])
def test_the_server_reads_again_what_the_simulator_reads_again(session):
    probe = read_probe(DATA / "1" / session / "probe.jsonl.gz")
    chosen = settings_of(probe.header, DATA / "1" / session / "model" / "config.json")
    steps = [step for step in probe.steps if step.tokens or step.preempted]
    repeats = Repeats()
    simulate(chosen, workload_in_steps(probe, steps), ONE_TICK, observers=[repeats])
    of_server = [step.repeated_slots for step in steps if step.tokens]
    assert sum(of_server) > 100_000
    assert repeats.slots == of_server


def test_the_page_of_the_documentation_is_made_from_the_results():
    parts = runpy.run_path(str(ROOT / "docs" / "real_server.py"))["parts"](KNOWN)
    page = (ROOT / "docs" / "results" / "real-server.md").read_text("utf-8")
    assert filled(page, parts) == page


def test_the_table_names_every_load():
    lines = list(table(KNOWN))
    assert all(any(name in line for line in lines) for name in KNOWN["loads"])
