"""Results of cards: what their files say of themselves follows from their raw times, and the pages have their figures."""

from __future__ import annotations

import csv
import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fragmeter.gpu.calibrate.points import spread
from paths import ROOT

RESULTS = ROOT / "gpu" / "results"
FOLDERS = sorted(path for path in RESULTS.iterdir() if path.is_dir())
#: The runs that docs/results/gpu.md cites. Of an H200: for step times the third one, which is validated, and for the rest the fourth one, which is not;
#: the fifth one is validated. And the one of an H100, which is.
THIRD, FOURTH, FIFTH = (RESULTS / name for name in ("2026-11-26-h200", "2026-11-26-h200-fourth", "2026-11-27-h200"))
H100 = RESULTS / "2026-11-27-h100"
VALIDATED = [folder for folder in FOLDERS if (folder / "validation").is_dir()]


def document(folder: Path, name: str) -> dict[str, Any]:
    """A file of a run; empty where its part did not run."""
    path = folder / name
    return json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_nothing_that_a_card_computed_was_wrong(folder):
    for name in ("smoke.json", "grid.json"):
        found = document(folder, name)
        for row in found.get("summary", ()):
            assert row["points"] and not row["failed"], (name, row)
    assert document(folder, "replay.json").get("wrong_rows", 0) == 0
    assert all(check["passes"] for check in document(folder, "graphs.json").get("checks", ()))
    kernels = document(folder, "modules.json").get("kernels", ())
    assert all(kernel["error"] is None and kernel["local_bytes"] == 0 for kernel in kernels)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_rates_are_bytes_over_time(folder):
    for row in document(folder, "bench.json").get("rows", ()):
        if (mine := row.get("fragmeter")) and mine["us"]:
            assert mine["bytes_per_s"] == pytest.approx(row["kv_bytes"] / mine["us"] * 1e6)
    for copy in document(folder, "ceiling.json").get("copies", ()):
        assert copy["bytes_per_s"] == pytest.approx(copy["moved_bytes"] / copy["us"] * 1e6)


@pytest.mark.parametrize("folder", VALIDATED, ids=lambda path: path.name)
def test_errors_of_steps_follow_from_the_steps(folder):
    """Computed here from each repetition of each step, without the program's code."""
    found = document(folder, "validation/validation.json")
    with (folder / "validation" / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    failing = []
    for run in found["runs"]:
        mine = [row for row in rows if row["run"] == run["run"]]
        predicted = np.array([float(row["predicted_us"]) for row in mine])
        repeated = np.array([[float(row[f"repetition_{number}_us"]) for number in (1, 2, 3)] for row in mine])
        measured = np.median(repeated, axis=1)
        assert run["step"]["mape"] == pytest.approx(np.abs(predicted / measured - 1).mean(), abs=1e-4)
        throughput = measured.sum() / predicted.sum() - 1
        assert run["throughput_error"] == pytest.approx(throughput, abs=1e-4)
        # No constant is nearer to these steps than the null model, to its four digits.
        constants = np.quantile(measured, np.linspace(0, 1, 400))
        best = min(np.abs(constant / measured - 1).mean() for constant in constants)
        assert run["nulls"]["constant"]["mape"] <= best + 1e-4
        if run["step"]["mape"] > 0.1 or abs(throughput) > 0.05:
            failing.append(run["run"])
    assert [name for name in failing if not any(name in reason for reason in found["acceptance"]["reasons"])] == []
    assert found["acceptance"]["validated"] == (not found["acceptance"]["reasons"])


def validations() -> Any:
    """docs/validations.py."""
    spec = importlib.util.spec_from_file_location("docs_validations", ROOT / "docs" / "validations.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_the_page_has_the_verdicts_by_todays_rules():
    pytest.importorskip("torch")
    found = validations()
    assert found.folders() == VALIDATED
    text = found.PAGE.read_text()
    assert found.page(text, ["verdicts"]) == text, "python docs/validations.py --write"


@pytest.mark.slow
def test_the_page_has_what_a_validation_reads_on_cards():
    pytest.importorskip("torch")
    found = validations()
    text = found.PAGE.read_text()
    assert found.page(text, ["cards"]) == text, "python docs/validations.py --write"


@pytest.mark.slow
@pytest.mark.parametrize("card", ["a100-40gb", "rtx-5080"])
def test_three_runs_show_errors_of_attention_on_small_cards(card):
    pytest.importorskip("torch")
    names = ["long contexts", "tight pool", "shared prefixes"]
    assert all(read.shows for read in validations().reads_of(card, names).values())


@pytest.mark.slow
@pytest.mark.parametrize(("what", "error"), [("time", 0.03), ("attention", 0.1)])
def test_a_planted_error_makes_the_validated_card_fail(what, error):
    pytest.importorskip("torch")
    from fragmeter.gpu.validate.acceptance import acceptance

    runs = validations().runs_of(H100)
    assert acceptance(runs)["validated"]
    for sign in (1, -1):
        assert not acceptance([run.planted(what, sign * error) for run in runs])["validated"]


def percent(share: float, form: str = ".1f") -> str:
    return f"{100 * share:{form}} %"


def test_the_page_has_the_steps_of_the_runs_that_it_cites():
    page = (ROOT / "docs" / "results" / "gpu.md").read_text()
    for folder, text in (
        (THIRD, "In the third run `validated` is `yes`:"),
        (H100, "`validated` is `yes`, and the prediction beats"),
    ):
        found = document(folder, "validation/validation.json")
        for run in found["runs"]:
            step, nulls, noise = run["step"], run["nulls"], run["noise"]
            errors = (step["mape"], step["p95"], nulls["constant"]["mape"], nulls["line"]["mape"], noise["step_mape"])
            share, throughput = percent(run["read_bytes"]["kv_share"], ".0f"), percent(run["throughput_error"], "+.1f")
            row = (run["run"], *map(percent, errors), share, throughput, percent(noise["throughput"]))
            assert f"| {' | '.join(row)} |\n" in page, row
        assert found["acceptance"]["validated"] and text in page
    assert all(run["times_better"] > 1 for run in found["runs"])

    found = document(FOURTH, "validation/validation.json")
    for run in found["runs"]:
        step, nulls, noise = run["step"], run["nulls"], run["noise"]
        errors = (nulls["constant"]["mape"], nulls["line"]["mape"], noise["step_mape"])
        throughput = (percent(run["throughput_error"], "+.1f"), percent(noise["throughput"]))
        row = (run["run"], percent(step["mape"]), percent(step["bias"], "+.1f"), *map(percent, errors), *throughput)
        assert f"| {' | '.join(row)} |\n" in page, row
    assert not found["acceptance"]["validated"] and "calibration of its own, `validated` is `no`:" in page


@pytest.mark.parametrize("folder", [FOURTH, H100], ids=lambda path: path.name)
def test_the_page_has_the_times_of_the_runs_that_it_cites(folder):
    page = (ROOT / "docs" / "results" / "gpu.md").read_text()
    of_cards = page.split("## Measured on an H100\n")
    lines = of_cards[folder == H100].splitlines()
    shown = [line for line in lines if re.match(r"\| \d+ x [\d,]+ \| \d+, ", line)]
    rows = []
    others = document(folder, "compare.json").get("rows", document(folder, "bench.json")["rows"])
    for row, other in zip(document(folder, "bench.json")["rows"], others, strict=True):
        if not row.get("fragmeter"):
            continue
        heads = f"{row['heads']}, {'latent vectors' if row['latent_dim'] else row['kv_heads']}"
        cache, mine = {"float16": "fp16", "float8_e4m3fn": "fp8"}[row["kv_dtype"]], row["fragmeter"]
        sizes = (f"| {row['batch']} x {row['context']:,}", heads, cache, f"{mine['us']:,.1f}")
        rates = (f"{mine['bytes_per_s'] / 1e9:,.0f}", percent(row["share_of_data_sheet"]))
        theirs = [other[name]["us"] for name in ("torch", "flashinfer") if other.get(name, {}).get("us")]
        rows.append(" | ".join([*sizes, *rates, *(f"{us:,.1f}" for us in theirs)]))
    assert len(shown) == 12 and all(line.startswith(tuple(f"{row} |" for row in rows)) for line in shown)


def test_the_page_has_the_spread_of_calibrations():
    """The host of the fourth run was disturbed while it was calibrated: copies to it and steps show it, and no GEMM."""
    page = (ROOT / "docs" / "results" / "gpu.md").read_text()
    third, fourth = (spread(document(folder, "calibration.json")["points"]) for folder in (THIRD, FOURTH))
    for name, text in (("swap_out", "copies to the host"), ("prefill_step", "steps with prompts"), ("gemm", "GEMMs")):
        assert f"{percent(third[name])} and {percent(fourth[name])} of {text}" in page


def test_the_page_has_the_times_of_variants():
    """With several tiles in flight and with one, in one call on one card."""
    page = (ROOT / "docs" / "results" / "gpu.md").read_text()
    *_, call = document(FOURTH, "variants.json")["calls"]
    several, one = ({row["variant"]: row["us"] for row in call["variants"]}[name] for name in ("72K", "16K"))
    faster = [shape for shape in several if one[shape] < several[shape]]
    assert (len(faster), len(several)) == (21, 23) and "in 21 of 23 shapes, by up to 17 %" in page
    for heads, name in (("64, 32, fp16", "64 g4"), ("128, 32, fp8", "128 g4 fp8"), ("112, 32, fp8", "112 g4 fp8")):
        sizes = (f"{name} {size}" for size in ("8x4096", "32x4096", "128x512", "128x4096"))
        cells = (f"{several[shape]:.1f}, {one[shape]:.1f}" for shape in sizes)
        assert f"| {heads} | {' | '.join(cells)} |\n" in page


def test_the_page_has_what_the_fifth_run_showed():
    page = (ROOT / "docs" / "results" / "gpu.md").read_text()
    found = document(FIFTH, "validation/validation.json")
    assert found["acceptance"]["validated"]
    mapes = [run["step"]["mape"] for run in found["runs"]]
    off = [abs(run["throughput_error"]) for run in found["runs"]]
    ranges = [f"{100 * min(each):.1f} to {percent(max(each))}" for each in (mapes, off)]
    assert f"steps are {ranges[0]} off (MAPE) and throughputs {ranges[1]}, all too slow" in page
    assert all(run["throughput_error"] < 0 for run in found["runs"])
    assert (
        f"took {min(found['calibration']['step_drifts']) * 100:.1f} to {percent(max(found['calibration']['step_drifts']))} more"
        in page
    )
    fourth, fifth = (
        {_sizes(row): row["fragmeter"]["us"] for row in document(folder, "bench.json")["rows"]}
        for folder in (FOURTH, FIFTH)
    )
    shown = [line for line in page.splitlines() if re.match(r"\| \d+ x [\d,]+ \| \d+, ", line)][:12]
    same = [fifth[size] / us - 1 for size, us in fourth.items() if any(f"| {us:,.1f} |" in line for line in shown)]
    assert len(same) >= 12 and max(map(abs, same)) < 0.0055
    assert "takes the same time within 0.5 %" in page


def _sizes(row: dict[str, Any]) -> tuple[Any, ...]:
    return tuple(row[name] for name in ("batch", "context", "heads", "kv_heads", "kv_dtype"))


@pytest.mark.parametrize(
    ("folder", "faster", "better", "worse"), [(FIFTH, 21, 6, 2), (H100, 16, 6, 2)], ids=["h200", "h100"]
)
def test_two_tiles_are_faster_than_three(folder, faster, better, worse):
    us = {
        tiles: [row["us"] for row in rows]
        for tiles, rows in document(folder, "variants.json")["tiles_in_flight"].items()
    }
    against = np.array(us["2"]) / np.array(us["3"]) - 1
    assert (against < 0).sum() == faster and len(against) == 24
    assert (round(-100 * against.min()), round(100 * against.max())) == (better, worse)
