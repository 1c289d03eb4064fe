"""GPUs of a user's JSON file: figures, profile, achieved shares, and what is refused."""

from __future__ import annotations

import json
import re
import shutil

import pytest

from fragmeter.experiments.capacity.prices import prices
from fragmeter.experiments.cli.app import DONE, MISTAKE, status
from fragmeter.experiments.measured.evidence import evidence
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import default_cost
from fragmeter.sim.cost.calibration import PROFILES
from fragmeter.sim.cost.shares import ASSUMED_SHARES, SHARES, origin, shares_of, speedup
from fragmeter.sim.engine.replica import build
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.spec.gpu import gpu_names
from fragmeter.sim.types.errors import SettingError, UserError

SHEET = {
    "name": "my-gpu",
    "memory_bytes": 25_250_627_584,
    "memory_gb_per_s": 1008,
    "fp16_tflops": 165.2,
    "pcie_gb_per_s": 32,
    "source": "data sheet",
}


@pytest.fixture
def path(tmp_path):
    return tmp_path / "my-gpu.json"


def written(path, **changed) -> str:
    path.write_text(json.dumps({**SHEET, **changed}))
    return str(path)


def test_the_figures_of_a_preset_give_the_preset(path):
    card, preset = gpu(written(path, architecture="rtx-4090")), gpu("rtx-4090")
    for field in (
        "memory_bytes",
        "memory_bytes_per_s",
        "fp16_flops_per_s",
        "pcie_bytes_per_s",
        "nvlink_bytes_per_s",
        "architecture",
    ):
        assert getattr(card, field) == getattr(preset, field)
    run = {"policy": "vllm-v1", "model": "llama-3.1-8b", "max_model_len": 8192, "cost": "roofline"}
    mine, theirs = (build(settings(gpu=name, **run)) for name in (str(path), "rtx-4090"))
    assert mine.num_blocks == theirs.num_blocks
    assert mine.cost.step_ticks(8, 8000, 100, 5050) == theirs.cost.step_ticks(8, 8000, 100, 5050)


def test_a_run_names_it_as_its_file_does(path, capsys):
    load = ["--policy", "vllm-v1", "--model", "llama-3.1-8b", "--max-model-len", "8192", "--num-prompts", "2"]
    assert status(["simulate", "--gpu", written(path), *load]) == DONE
    assert capsys.readouterr().out.startswith("vllm-v1: llama-3.1-8b on 1 x my-gpu serves ")


def test_flops_by_number_format(path):
    """Formats that a file leaves out are multiplied in 16 bits."""
    card = gpu(written(path, fp8_tflops=330.3))
    assert (card.fp8_flops_per_s, card.int8_flops_per_s) == (330_300_000_000_000, None)
    assert speedup(card, "fp8") > 1 and {speedup(card, form) for form in ("int8", "awq", "mxfp4", "nvfp4")} == {1}


def test_fp4_is_faster_where_the_card_has_it(path):
    blackwell = gpu(written(path, fp8_tflops=419, fp4_tflops=1676))
    assert 1 < speedup(blackwell, "fp8") < speedup(blackwell, "nvfp4") < 1676 / 165.2


def test_links_default_to_pcie(path):
    assert gpu(written(path)).nvlink_bytes_per_s == 32 * 10**9
    assert gpu(written(path, nvlink_gb_per_s=56.25)).nvlink_bytes_per_s == 56_250_000_000


def test_an_unknown_architecture_has_the_median_shares():
    assert shares_of("unknown") == ASSUMED_SHARES and origin("unknown").endswith("assumed")
    below = [known.gemm_flops < ASSUMED_SHARES.gemm_flops for known in SHARES.values()]
    assert abs(below.count(True) - below.count(False)) <= 1


def test_the_profile_of_a_file_is_its_default_cost(path):
    shutil.copy(PROFILES / "rtx-4090.json", path.parent / "measured.json")
    card = gpu(written(path, profile="measured.json"))
    assert default_cost(model("llama-3.1-8b"), card) == "fitted"
    run = {"policy": "vllm-v1", "model": "llama-3.1-8b", "max_model_len": 8192}
    mine, theirs = (build(settings(gpu=name, **run)).cost for name in (str(path), "rtx-4090"))
    assert mine.step_ticks(8, 8000, 100, 5050) == theirs.step_ticks(8, 8000, 100, 5050)
    found = evidence(settings(gpu=str(path), **run))
    assert (found.basis, found.origin) == (
        "kernel tables",
        "kernel times from tables, the profile measured.json of my-gpu",
    )


def test_without_a_profile_it_is_the_roofline_and_a_data_sheet(path):
    found = evidence(settings(gpu=written(path), policy="vllm-v1", model="llama-3.1-8b"))
    assert (found.cost, found.basis) == ("roofline", "a data sheet")
    assert [each.server_class for each in found.like.predicted] == ["NVIDIA cards, simulated from data sheets"]


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"memory_gb_per_s": 0}, "my-gpu.json: memory_gb_per_s = 0: must be at least 50"),
        ({"memory_gb_per_s": 3.35}, "my-gpu.json: memory_gb_per_s = 3.35: must be at least 50"),
        ({"memory_bytes": "25250627584"}, "my-gpu.json: memory_bytes = '25250627584': must be a whole number"),
        ({"fp16_tflops": "165"}, "my-gpu.json: fp16_tflops = '165': must be a number"),
        ({"fp16_tflops": 0.165}, "my-gpu.json: fp16_tflops = 0.165: must be at least 1"),
        ({"fp8_tflops": True}, "my-gpu.json: fp8_tflops = True: must be a number"),
        ({"pcie_gb_per_s": 0.032}, "my-gpu.json: pcie_gb_per_s = 0.032: must be at least 1"),
        ({"profile": "none.json"}, "my-gpu.json: profile = "),
        ({"architecture": "fermi"}, "my-gpu.json: architecture = 'fermi': of a GPU's file must be one of a100"),
        ({"memory_gb_per_s": 1.008e12}, "my-gpu.json: memory_gb_per_s = 1008000000000.0: must be at most 1000000"),
        ({"fp16_tflops": "fast"}, "my-gpu.json: fp16_tflops = 'fast': must be a number"),
        ({"fp8_tflops": 0}, "my-gpu.json: fp8_tflops = 0: must be at least 1"),
        ({"l2_mib": 100_663_296}, "my-gpu.json: l2_mib = 100663296: must be at most 4096"),
        ({"memory_bytes": 24}, "my-gpu.json: memory_bytes = 24: must be at least 1073741824"),
        ({"name": "h200"}, "my-gpu.json: name = 'h200': is a preset of the package; give the GPU another name"),
        ({"flops": 1}, "my-gpu.json: flops"),
        ({"source": ""}, "my-gpu.json: source"),
    ],
)
def test_figures_that_cannot_be(changed, message, path, capsys):
    run = ["--policy", "vllm-v1", "--model", "llama-3.1-8b", "--max-model-len", "8192", "--num-prompts", "2"]
    tokens = ["simulate", "--gpu", written(path, **changed), *run]
    assert status(tokens) == MISTAKE
    assert message in capsys.readouterr().err


def test_a_missing_figure_and_a_missing_file(path, capsys):
    path.write_text(json.dumps({name: value for name, value in SHEET.items() if name != "pcie_gb_per_s"}))
    with pytest.raises(UserError, match=r"^my-gpu.json: pcie_gb_per_s = None: is missing; give it$"):
        gpu(str(path))
    # A misspelled field is both unknown and missing: the misspelling is named.
    path.write_text(json.dumps({name.replace("pcie_gb", "pci_gb"): value for name, value in SHEET.items()}))
    with pytest.raises(
        UserError, match=r"^my-gpu.json: pci_gb_per_s = .*: is not a known field; correct its name, or leave it out$"
    ):
        gpu(str(path))
    with pytest.raises(UserError, match=r"gpu = 'none.json': cannot be read"):
        gpu("none.json")
    with pytest.raises(SettingError, match="or a JSON file of a GPU"):
        gpu("h300")


def test_an_architecture_that_does_not_exist(path):
    with pytest.raises(SettingError, match="must be one of a100, h100, h200"):
        build(
            settings(
                gpu=written(path, architecture="fermi"), policy="vllm-v1", model="llama-3.1-8b", max_model_len=8192
            )
        )


@pytest.mark.slow
def test_a_plan_for_it_counts_gpus_until_it_has_a_price(path, tmp_path, capsys):
    load = ["--goodput", "ttft:2000", "tpot:200", "--num-prompts", "100", "--seeds", "1"]
    tokens = ["plan", "--serve", "vllm serve llama-3.1-8b --max-model-len 16384", "--gpu", written(path), *load]
    assert status(tokens) == DONE
    without = " ".join(capsys.readouterr().out.split())
    assert "USD" not in without
    written_there = re.search(r"none of my-gpu .* such as (.*), and give it with --prices", without)
    (tmp_path / "prices.json").write_text(written_there[1])
    assert status([*tokens, "--prices", str(tmp_path / "prices.json")]) == DONE
    assert "USD/h" in capsys.readouterr().out


@pytest.mark.parametrize("name", gpu_names())
def test_every_preset_serves_a_model_and_says_what_its_times_rest_on(name):
    chosen = settings(gpu=name, policy="vllm-v1", model="toy-llama")
    assert build(chosen).num_blocks > 1000
    has_profile = (PROFILES / f"{name}.json").is_file()
    tables = "kernel tables of a100-80gb, scaled" if name == "a100-40gb" else "kernel tables"
    assert evidence(chosen).basis == (tables if has_profile else "a data sheet")
    assert "data sheet" in gpu(name).source
    # A GB300 is not for rent by itself: a plan for it needs a price.
    if has_profile and name != "gb300":
        assert prices(None).of(name) > 0
