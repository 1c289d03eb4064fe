"""What a real vLLM server did (``make server-check``, first repetition), against the simulator: no server runs here."""

from __future__ import annotations

import json
import runpy
import shutil

import pytest

from fragmeter.sim import settings
from fragmeter.sim.recording.probe import read_probe
from paths import ROOT
from tools.live.decisions import compare_decisions
from tools.live.loads import SESSIONS
from tools.live.prediction import settings_of
from tools.live.results import LIMITS, mean_error, misses, results, table

DATA = ROOT / "tests" / "data" / "real_server"
TIGHT = DATA / "1" / "tight"
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
            for model in ("simulated", "constant", "line"):
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
def test_prediction_is_better_than_null_models_that_know_the_run(name):
    metrics = KNOWN["loads"][name]["metrics"]
    assert mean_error(metrics, "simulated") < min(mean_error(metrics, model) for model in ("constant", "line"))


def test_the_page_of_the_documentation_is_made_from_the_results():
    page = runpy.run_path(str(ROOT / "docs" / "real_server.py"))["page"](KNOWN)
    assert (ROOT / "docs" / "real-server.md").read_text("utf-8") == page


def test_the_table_names_every_load():
    lines = list(table(KNOWN))
    assert all(any(name in line for line in lines) for name in KNOWN["loads"])
