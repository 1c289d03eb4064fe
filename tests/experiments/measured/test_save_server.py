"""From a benchmark to constants of the server, and from these to answers: ``--save-server`` and ``--server``."""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from bench_files import benchmark
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.measured.evidence import evidence
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import read_server
from fragmeter.sim.types.errors import UserError

MODEL, GPU = "llama-3.1-8b", "h100-80gb"
REPLICA = ["--policy", "vllm-v1", "--model", MODEL, "--gpu", GPU]
SERVE = ["--serve", f"vllm serve {MODEL}", "--vllm", "0.19", "--gpu", GPU, "--cost", "fitted"]
JUDGED = {"mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms", "output_throughput"}
OWN = {
    "gpu": GPU,
    "model": MODEL,
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "enforce_eager": False,
    "async_scheduling": True,
    "vllm_release": "0.19",
    "cost": "fitted",
}
PLANTED = {"outside_ms": 9.0, "step_us": 700.0}


def measured_at(folder: Path, rate: int, server: Path) -> Path:
    """A benchmark of a server with the planted constants."""
    out = folder / f"run-{rate}"
    load = ["--request-rate", str(rate), "--num-prompts", "120"]
    line = ["simulate", *REPLICA, "--vllm-release", "0.19", *load, "--server", str(server), "--out", str(out)]
    assert status(line) == DONE
    requests = pd.read_parquet(out / "requests.parquet")
    return benchmark(folder / f"bench-{rate}.json", requests, model_id="meta-llama/Llama-3.1-8B", request_rate=rate)


def error_of(folder: Path, path: Path, *more: str) -> dict[str, float]:
    """Errors of the means of a replay by metric; gaps between tokens are not planted."""
    target = folder / "error.json"
    assert status(["validate", "--against", str(path), *SERVE, *more, "--json", str(target)]) == DONE
    found = json.loads(target.read_text())
    return {name: abs(row["error"]) for row in found["rows"] if (name := row["metric"]) in JUDGED}


@pytest.fixture(scope="module")
def loop(tmp_path_factory) -> tuple[Path, Path, Path]:
    """The saved constants, the benchmark that they were fitted to, and one of the same server at three times its rate."""
    folder = tmp_path_factory.mktemp("loop")
    document = {"schema_version": 1, "kind": "server", "source": "planted", "server": OWN, "constants": PLANTED}
    planted = folder / "planted.json"
    planted.write_text(json.dumps(document))
    first, second = measured_at(folder, 5, planted), measured_at(folder, 15, planted)
    saved = folder / "my-server.json"
    assert status(["validate", "--against", str(first), *SERVE, "--save-server", str(saved)]) == DONE
    return saved, first, second


@pytest.mark.slow
def test_planted_constants_are_saved(loop):
    document = json.loads(loop[0].read_text())
    assert document["constants"]["outside_ms"] == pytest.approx(PLANTED["outside_ms"], abs=0.3)
    assert document["constants"]["step_us"] == pytest.approx(PLANTED["step_us"], rel=0.03)
    assert document["server"] == OWN
    assert "bench-5.json: 120 requests" in document["source"]


def test_the_fit_is_recorded(loop, tmp_path):
    """Its errors are those of ``validate`` with the constants, on the benchmark that it names."""
    fit = json.loads(loop[0].read_text())["fit"]
    assert fit["benchmark_sha256"] == sha256(loop[1].read_bytes()).hexdigest()
    assert (fit["requests"], fit["max_concurrency"]) == (120, None)
    sent = np.array(json.loads(loop[1].read_text())["start_times"])
    assert fit["request_rate"] == pytest.approx(119 / np.ptp(sent), rel=1e-6)
    after = error_of(tmp_path, loop[1], "--server", str(loop[0]))
    assert {name: abs(error) for name, error in fit["errors"].items()} == pytest.approx(after, abs=2e-6)
    assert max(after.values()) < 0.01 and set(fit["errors_before"]) == JUDGED
    assert fit["errors_before"]["mean_ttft_ms"] < -0.1 and fit["errors_before"]["mean_tpot_ms"] < -0.01


def test_the_evidence_has_the_errors_of_the_fit(loop):
    fit = json.loads(loop[0].read_text())["fit"]
    chosen = {"policy": "vllm-v1", "model": MODEL, "gpu": GPU, "vllm_release": "0.19"}
    line = evidence(settings(**chosen, server=str(loop[0]))).text()
    before = fit["errors_before"]
    assert f"fitted to 120 requests at {fit['request_rate']:.3g} requests/s, there mean throughput " in line
    assert f"(before: throughput {before['output_throughput']:+.1%}, TTFT {before['mean_ttft_ms']:+.1%}" in line
    assert line.endswith(" Another rate was not measured.")


def test_a_file_without_a_record_says_so(loop, tmp_path):
    old = json.loads(loop[0].read_text())
    del old["fit"]
    (tmp_path / "old.json").write_text(json.dumps(old))
    chosen = {"policy": "vllm-v1", "model": MODEL, "gpu": GPU, "vllm_release": "0.19"}
    line = evidence(settings(**chosen, server=str(tmp_path / "old.json"))).text()
    assert "its file does not record the errors of the fit: write it anew with fragmeter validate" in line


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("errors", {"mean_ttft": 0.1}, "fit.errors.mean_ttft"),
        ("errors", {"mean_ttft_ms": -2.0}, "fit.errors.mean_ttft_ms = -2.0: must be at least -1"),
        ("benchmark_sha256", "abc", "fit.benchmark_sha256 = 'abc'"),
        ("requests", 0, "fit.requests = 0: must be at least 1"),
        ("rate", 5, "fit.rate = 5: is not a known field"),
    ],
)
def test_a_damaged_record_is_one_line(field, value, message, loop, tmp_path):
    document = json.loads(loop[0].read_text())
    document["fit"][field] = value
    (tmp_path / "bad.json").write_text(json.dumps(document))
    with pytest.raises(UserError) as error:
        read_server(str(tmp_path / "bad.json"))
    assert message in str(error.value) and "\n" not in str(error.value)


@pytest.mark.slow
def test_they_predict_a_benchmark_at_another_rate(loop, tmp_path):
    saved, _, second = loop
    before, after = error_of(tmp_path, second), error_of(tmp_path, second, "--server", str(saved))
    assert before["mean_ttft_ms"] > 0.1 and before["mean_tpot_ms"] > 0.01
    assert set(after) == JUDGED and max(after.values()) < 0.005


@pytest.mark.slow
def test_every_verb_that_simulates_takes_them(loop, tmp_path, capsys):
    server = ["--vllm-release", "0.19", "--server", str(loop[0])]
    load = ["--request-rate", "4", "--num-prompts", "20"]
    target = tmp_path / "found.json"
    assert status(["simulate", *REPLICA, *server, *load, "--out", str(tmp_path / "run")]) == DONE
    cost = json.loads((tmp_path / "run" / "run.json").read_text())["cost"]
    assert cost["server"] == "my-server.json" and len(cost["server_sha256"]) == 64
    assert cost["server.outside_ms"]["value"] == pytest.approx(9, abs=0.3)
    assert (
        status(
            ["sweep", *REPLICA, *server, *load, "--grid", "seed=0:2", "--jobs", "1", "--out", str(tmp_path / "sweep")]
        )
        == DONE
    )
    assert status(["compare", *REPLICA, *server, *load, "--set", "max-num-seqs=4", "--set", "max-num-seqs=8"]) == DONE
    line = [
        "plan",
        "--serve",
        f"vllm serve {MODEL} --max-model-len 16K",
        "--vllm",
        "0.19",
        "--gpu",
        GPU,
        "--seeds",
        "1",
    ]
    goals = ["--goodput", "ttft:500", "tpot:20", "--num-prompts", "100", "--server", str(loop[0])]
    capsys.readouterr()
    assert status([*line, *goals, "--json", str(target)]) == DONE
    assert "constants of the server my-server.json" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("flag", "value"),
    [
        ("--gpu", "h200"),
        ("--model", "llama-2-7b"),
        ("--tensor-parallel-size", "2"),
        ("--vllm-release", "0.20"),
        ("--cost", "roofline"),
    ],
)
def test_other_servers_are_refused_in_one_line(flag, value, loop, capsys):
    flags = {"--policy": "vllm-v1", "--model": MODEL, "--gpu": GPU, "--vllm-release": "0.19"} | {flag: value}
    line = [each for pair in flags.items() for each in pair]
    assert status(["simulate", *line, "--server", str(loop[0]), "--request-rate", "4"]) == 2
    error = capsys.readouterr().err
    named = flag.removeprefix("--").replace("-", "_")
    assert error.startswith(f"fragmeter: {named} = ") and value in error
    assert "my-server.json was fitted with" in error and error.count("\n") == 1


def test_a_plan_of_another_card_is_refused(loop, capsys):
    line = ["plan", "--serve", f"vllm serve {MODEL}", "--vllm", "0.19", "--gpu", "h200", "--goodput", "ttft:500"]
    assert status([*line, "--num-prompts", "100", "--seeds", "1", "--server", str(loop[0])]) == 2
    assert "gpu = 'h200'" in capsys.readouterr().err
