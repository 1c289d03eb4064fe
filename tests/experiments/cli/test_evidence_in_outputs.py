"""The class of evidence of step times in every output: each command on a GPU that has only its data sheet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

import fragmeter
from bench_files import benchmark
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.reports.data.results import read_result

LINE = "Step times: a roofline from the data sheet of {} (--cost roofline). 9 of 10 servers like this: TPOT"
SERVER = ["--policy", "vllm-v1", "--model", "toy-llama", "--outside-ms", "0"]
LOAD = ["--num-prompts", "4", "--request-rate", "4"]


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> dict[str, Path]:
    """A folder of each kind that ``report`` reads, all on an L4."""
    here = tmp_path_factory.mktemp("outputs")
    found = {name: here / name for name in ("simulate", "sweep", "validate")}
    chosen = [*SERVER, "--gpu", "l4"]
    assert status(["simulate", *chosen, *LOAD, "--out", str(found["simulate"])]) == DONE
    sweep = ["sweep", *SERVER, *LOAD, "--jobs", "1", "--grid", "gpu=l4,a10"]
    assert status([*sweep, "--out", str(found["sweep"])]) == DONE
    bench = benchmark(here / "bench.json", read_result(found["simulate"]).requests)
    assert status(["validate", "--against", str(bench), *chosen, "--out", str(found["validate"])]) == DONE
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["simulate", "sweep", "validate"])
def test_every_page_names_the_data_sheet(kind, folders, tmp_path):
    page = tmp_path / "page.html"
    assert status(["report", str(folders[kind]), "--out", str(page)]) == DONE
    for card in ("l4", "a10") if kind == "sweep" else ("l4",):
        assert LINE.format(card) in page.read_text("utf-8")


def test_validate_and_compare_name_it(folders, capsys, tmp_path):
    found = json.loads((folders["validate"] / "against.json").read_text("utf-8"))
    assert (found["evidence"]["basis"], found["evidence"]["load"]) == ("a data sheet", "light")
    run = str(folders["simulate"])
    assert status(["compare", run, run]) == DONE
    bench = benchmark(tmp_path / "bench.json", read_result(folders["simulate"]).requests)
    assert status(["validate", "--against", str(bench), *SERVER, "--gpu", "a10"]) == DONE
    out = " ".join(capsys.readouterr().out.split())
    assert out.count(LINE.format("l4")) == out.count(LINE.format("a10")) == 1


@pytest.mark.slow
def test_a_run_of_a_file_that_is_gone_has_its_cost_model(folders, tmp_path, capsys):
    gone = tmp_path / "gone"
    shutil.copytree(folders["simulate"], gone)
    about = json.loads((gone / "run.json").read_text("utf-8"))
    about["settings"]["gpu"] = str(tmp_path / "my-gpu.json")
    (gone / "run.json").write_text(json.dumps(about))
    assert status(["report", str(gone), "--out", str(tmp_path / "page.html")]) == DONE
    assert "Step times: --cost roofline. The files that the settings name" in capsys.readouterr().out


def test_a_scaled_profile_is_not_called_the_tables_of_its_card(capsys):
    assert status(["list", "gpus", "--json", "-"]) == DONE
    found = {row["gpu"]: row["basis"] for row in json.loads(capsys.readouterr().out)["gpus"]}
    assert found["a100-40gb"] == "kernel tables of a100-80gb, scaled"
    assert (found["a100-80gb"], found["l4"]) == ("kernel tables", "a data sheet")


QWEN = ["--policy", "vllm-v1", "--model", "qwen3-14b", "--gpu", "h100-80gb", "--num-prompts", "40"]


def interval_of(found: dict, metric: str) -> tuple[float, float, float]:
    """A value in the data of an output, and its interval."""
    each = next(each for each in found["evidence"]["like"]["predicted"] if each["metric"] == metric)
    return each["value"], each["low"], each["high"]


@pytest.mark.slow
def test_simulate_has_the_interval_below_its_first_line(capsys):
    assert status(["simulate", *QWEN, "--request-rate", "4", "--json", "-"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert status(["simulate", *QWEN, "--request-rate", "4"]) == DONE
    first = " ".join(capsys.readouterr().out.split()).partition(" Synthetic")[0]
    value, low, high = interval_of(found, "tpot")
    assert value == found["mean_tpot_ms"] and 0.9 * value < low < value < high < 1.15 * value
    assert first.startswith("vllm-v1: qwen3-14b on 1 x h100-80gb serves ")
    assert f" idle. In the mean TPOT {value:.1f} ms ({low:.1f} to {high:.1f} for 9 of 10" in first
    assert f"TTFT {found['mean_ttft_ms']:.1f} ms (" in first
    run = fragmeter.simulate(policy="vllm-v1", model="qwen3-14b", gpu="h100-80gb", num_prompts=40, request_rate=4)
    assert (run.evidence.like.predicted[0].low, run.evidence.headline() in first) == (low, True)


def test_a_burst_is_of_its_class_and_in_overload(capsys):
    """TTFT of a queue is not that of an open loop, and throughput counts."""
    flags = ["--max-num-seqs", "1", "--output-len", "300", "--input-len", "100"]
    assert status(["simulate", *QWEN, *flags, "--request-rate", "inf", "--json", "-"]) == DONE
    found = json.loads(capsys.readouterr().out)["evidence"]
    assert found["load"] == "overload"
    assert {each["metric"] for each in found["like"]["predicted"]} == {"tpot", "ttft"}
    ttft = next(each for each in found["like"]["predicted"] if each["metric"] == "ttft")
    assert ttft["factors"] is None and set(ttft["errors"]) == {"h100-80gb codellama-34b x2 reasoning 4/s"}


@pytest.mark.slow
def test_plan_has_the_interval_in_its_recommendation(capsys):
    load = ["--dataset", "alpaca", "--request-rate", "4", "--num-prompts", "100", "--seeds", "1"]
    model = ["--policy", "vllm-v1", "--model", "qwen3-14b", "--gpu", "h100-80gb"]
    assert status(["plan", *model, *load, "--goodput", "ttft:500", "tpot:50", "--json", "-"]) == DONE
    found = json.loads(capsys.readouterr().out)
    value, low, high = interval_of(found["candidates"][0], "tpot")
    assert value == pytest.approx(found["candidates"][0]["median_tpot_ms"])
    assert f"TPOT {value:.1f} ms ({low:.1f} to {high:.1f} for 9 of 10 servers like this)" in found["recommendation"]


@pytest.mark.parametrize(
    ("line", "asked"),
    [
        ("vllm serve Qwen/Qwen3-14B", None),
        ("vllm serve Qwen/Qwen3-14B --quantization fp8 --linear-backend marlin", "--linear-backend"),
        ("VLLM_ATTENTION_BACKEND=FLASHINFER vllm serve Qwen/Qwen3-14B", "VLLM_ATTENTION_BACKEND=FLASHINFER"),
    ],
)
def test_diagnose_has_the_interval_below_its_answer(line, asked, capsys):
    """Not of a line that asks for kernels that are not simulated: it is said which."""
    load = ["--gpu", "h100-80gb", "--request-rate", "4", "--num-prompts", "50", "--seeds", "1"]
    assert status(["diagnose", "--serve", line, *load]) == DONE
    shown = capsys.readouterr().out
    if asked is None:
        second = shown.splitlines()[1]
        assert second.startswith("As served: TPOT ") and "for 9 of 10 servers" in second
    else:
        assert "9 of 10" not in shown
        assert f"No interval: none of the measured servers of its class has {asked}." in " ".join(shown.split())
