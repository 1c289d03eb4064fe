"""A real vLLM server on a card, without one: what is asked of it, and what its results say."""

from __future__ import annotations

import copy
import json
from types import SimpleNamespace

import pytest

from paths import ROOT
from tools.live import card
from tools.live.loads import SESSIONS, SHORT, short, write_data

KNOWN = json.loads((ROOT / "tests" / "data" / "real_server" / "results.json").read_text())


def test_the_rehearsal_serves_loads_of_the_cpu():
    session = short()
    assert session.flags == SESSIONS[0].flags
    assert [load.name for load in session.loads] == ["speed", *SHORT]
    assert all(load in SESSIONS[0].loads for load in session.loads[1:])


def test_a_card_serves_more_at_a_time_over_its_own_pool(tmp_path):
    small, large = short(), short(card.TIMES)
    assert large.flags["max-num-seqs"] == 8 * small.flags["max-num-seqs"] == 256
    assert "num-gpu-blocks-override" not in large.flags
    assert [load.requests for load in large.loads] == [8 * load.requests for load in small.loads]
    closed = large.loads[[load.name for load in large.loads].index("sharegpt-closed")].arguments
    assert closed[closed.index("--max-concurrency") + 1] == "96"
    write_data(tmp_path, large.times)
    lines = (tmp_path / "ramp.jsonl").read_text().splitlines()
    assert len(lines) == large.loads[1].requests
    assert len(json.loads((tmp_path / "sharegpt.json").read_text())) >= 400


def test_rates_follow_the_speed_that_a_burst_has(tmp_path, monkeypatch):
    served = []

    class Server:
        url, start_s = "http://card", 3.0

        def __init__(self, python, model, flags, folder, on_cpu):
            assert not on_cpu

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

    def serve_all(session, url, python, model, folder, start_s):
        assert not (folder / "session.json").exists()
        served.extend(session.loads)
        (folder / "speed.json").write_text(json.dumps({"output_throughput": 5000.0}))
        (folder / "session.json").write_text("{}")

    monkeypatch.setattr(card, "Server", Server)
    monkeypatch.setattr(card, "serve_all", serve_all)
    session = short(8)
    card.record(session, tmp_path / "python", tmp_path / "out", {"hidden_size": 4096})
    config = json.loads((tmp_path / "out" / "model" / "config.json").read_text())
    assert (config["hidden_size"], config["vocab_size"]) == (4096, 4096)
    assert [load.name for load in served] == [load.name for load in session.loads]
    medium = served[2].arguments
    assert medium[medium.index("--request-rate") + 1] == "30.0"
    assert served[0] == session.loads[0] and "inf" in served[0].arguments


def test_without_a_card_one_line_says_so_and_nothing_is_installed(tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert card.main(["--out", str(tmp_path / "out")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "nvidia-smi: tells of no card; --device cpu rehearses without one"
    assert not (tmp_path / "out").exists()


def perfect():
    """The recorded results, with predictions that are the measured values, and null models that are off."""
    found = copy.deepcopy(KNOWN)
    for load in found["loads"].values():
        for row in load["metrics"].values():
            row.update(simulated_error=0.0, constant_error=0.2, tokens_error=-0.1, contexts_error=0.01)
    return found


def test_the_verdict_has_a_reason_for_each_limit_and_for_null_models_where_a_server_is_full():
    found = perfect()
    assert card.verdict(found)["passes"]
    metrics = found["loads"]["ample/random-saturated"]["metrics"]
    metrics["output_throughput"]["simulated_error"] = -0.02
    assert card.verdict(found)["reasons"] == [
        "ample/random-saturated: output_throughput is off by -2.0%, and by +1.0% with the null model contexts"
    ]
    # No null model is asked of a server that waits for requests.
    found = perfect()
    metrics = found["loads"]["ample/random-medium"]["metrics"]
    metrics["output_throughput"]["simulated_error"] = -0.02
    assert card.verdict(found)["passes"]
    metrics["mean_ttft_ms"]["simulated_error"] = 0.11
    assert card.verdict(found)["reasons"] == ["ample/random-medium: mean_ttft_ms is off by +11.0%, allowed are 10%"]
    found["decisions"][0]["difference"] = "step 3"
    assert card.verdict(found)["reasons"][0] == "ample: decisions differ, step 3"


@pytest.mark.parametrize("metric", card.LIMITS)
def test_the_calibration_is_not_judged(metric):
    found = perfect()
    found["loads"]["ample/ramp"]["metrics"][metric]["simulated_error"] = 0.5
    assert card.verdict(found)["passes"]


def test_the_same_step_at_another_time_tells_the_machines_own_pace():
    """Steps of 4 sequences take 20 ms, and 30 ms a minute later; those of 2 sequences, and with prompts, have other shapes."""

    def steps(sequences, begin_s, ms, prefill=0, context=1000):
        times = [int(1e9 * (begin_s + 0.1 * place)) for place in range(6)]
        shape = {"tokens": range(sequences), "prefill_tokens": prefill, "decode_context": context}
        return [SimpleNamespace(**shape, start_ns=at, end_ns=at + int(1e6 * ms)) for at in times]

    same = [*steps(4, 0, 20), *steps(2, 25, 90), *steps(4, 30, 90, prefill=64), *steps(4, 61, 30)]
    assert card.pace(same) == {"times": 1.5, "sequences": 4, "least_ms": 20.0, "most_ms": 30.0}
    # More context is another step.
    assert card.pace([*steps(4, 0, 20), *steps(4, 61, 30, context=9000)]) is None
    found = perfect() | {"pace": card.pace(same)}
    found["acceptance"] = card.verdict(found)
    assert "sequences, and alike, took 20.0 to 30.0 ms" in " ".join(card.text(found))
    found["pace"]["times"] = 1.05
    assert "pace" not in " ".join(card.text(found))
