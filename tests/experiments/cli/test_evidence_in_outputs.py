"""The class of evidence of step times in every output: each command on a GPU that has only its data sheet."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from bench_files import benchmark
from fragmeter.experiments.cli.app import DONE, status
from fragmeter.reports.data.results import read_result

LINE = "Step times: a roofline from the data sheet of {} (--cost roofline). No measured run was simulated with them."
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
