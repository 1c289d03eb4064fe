"""``fragmeter calibrate``: the file, what is printed, and what happens when it cannot be."""

from __future__ import annotations

import json
import sys
from contextlib import chdir, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

pytest.importorskip("torch")

from fragmeter.experiments.cli import app as cli
from fragmeter.experiments.cli import calibrate as verb_calibrate
from fragmeter.gpu.calibrate import calibrate
from fragmeter.sim.cost.calibrated import CalibratedCost
from fragmeter.sim.cost.calibration import read
from fragmeter.sim.cost.operations import FROM_TABLES, OPERATIONS
from fragmeter.sim.output.interrupts import INTERRUPTED
from fragmeter.sim.spec import gpu, model


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory) -> tuple[Path, str]:
    """A quick calibration: the folder, and what was printed."""
    folder, printed, complaint = tmp_path_factory.mktemp("calibrated"), StringIO(), StringIO()
    with chdir(folder), redirect_stdout(printed), redirect_stderr(complaint):
        done = cli.status(["calibrate", "--quick", "--out", "found.json", "--json", "printed.json"])
    assert (done, complaint.getvalue()) == (cli.DONE, "")
    return folder, printed.getvalue()


@pytest.mark.slow
def test_the_file_is_a_calibration_that_step_times_are_made_of(calibrated):
    folder, _ = calibrated
    found = json.loads((folder / "found.json").read_text())
    assert {name: found[name] for name in ("schema_version", "kind", "model", "dtype", "block_size", "quick")} == {
        "schema_version": 1,
        "kind": "calibration",
        "model": "toy-llama",
        "dtype": "fp32",
        "block_size": 16,
        "quick": True,
    }
    assert found["device"]["threads"] == 1 and found["device"]["versions"]["torch"]
    # Launches overlap operations on a GPU alone.
    measured = set(OPERATIONS) - FROM_TABLES - {"launches"}
    assert {point["op"] for point in found["points"]} == set(found["ops"]) == measured
    assert all(point["us"] > 0 and point["iqr_us"] >= 0 and point["samples"] == 2 for point in found["points"])
    cost = CalibratedCost(read(folder / "found.json"), model("toy-llama"), gpu("a100-40gb"))
    assert 0 < cost.step_ticks(4, 256, 0, 0) < cost.step_ticks(4, 256, 64, 2080)


@pytest.mark.slow
def test_a_calibration_over_fp8_says_so_and_prices_no_other_kv_cache(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    tokens = ["--quick", "--dtype", "fp16", "--kv-cache-dtype", "fp8", "--out", "found.json"]
    assert cli.status(["calibrate", *tokens]) == cli.DONE
    assert capsys.readouterr().out.startswith("toy-llama in fp16 with a KV cache of fp8 on ")
    found = json.loads(Path("found.json").read_text())
    assert found["kv_cache_dtype"] == "fp8"
    run = ["simulate", "--model", "toy-llama", "--num-prompts", "3", "--cost", "found.json"]
    assert cli.status([*run, "--kv-cache-dtype", "fp8"]) == cli.DONE
    capsys.readouterr()
    assert cli.status(run) == cli.MISTAKE
    assert capsys.readouterr().err == (
        "fragmeter: cost = 'found.json': was measured with --kv-cache-dtype fp8, and the KV cache of this run is fp16; "
        "run with --kv-cache-dtype fp8, or leave --cost out\n"
    )


@pytest.mark.parametrize(
    ("flags", "shown"),
    [
        (["--device", "cpu"], "device = 'cpu'"), (["--model", "toy-opt"], "model = 'toy-opt'"),
        (["--dtype", "fp32"], "dtype = 'fp32'"), (["--kv-cache-dtype", "auto"], "kv_cache_dtype = 'auto'"),
        (["--block-size", "16"], "block_size = 16"), (["--quick"], "quick = True"), (["--seed", "0"], "seed = 0"),
    ],
)  # fmt: skip
def test_a_recording_of_a_server_is_no_device(flags, shown, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert cli.status(["calibrate", "--probe", "none.jsonl", *flags]) == cli.MISTAKE
    complaint = f"{shown}: has no effect with --probe, which measures no device; leave it out"
    assert capsys.readouterr().err == f"fragmeter: {complaint}\n"
    assert not [*tmp_path.iterdir()]


def test_what_is_printed_is_in_the_data(calibrated):
    folder, printed = calibrated
    data, found = (json.loads((folder / name).read_text()) for name in ("printed.json", "found.json"))
    assert data == {name: value for name, value in found.items() if name != "points"} | {"path": "found.json"}
    lines = printed.splitlines()
    assert lines[0].startswith("toy-llama in fp32 on ") and lines[-1] == "Calibration: found.json"
    for name, entry in data["ops"].items():
        (line,) = (line.split() for line in lines if line.startswith(name))
        fit = entry["fit"]
        assert line[1:4] == [str(fit["points"]), f"{fit['spread']:.1%}", f"{fit['median_error']:.1%}"]


@pytest.mark.parametrize("share", [None, 0.424])
def test_launches_and_repeated_reads_are_printed(share, calibrated, tmp_path, monkeypatch, capsys):
    """A calibration of a CPU has no launches, and the ratio only where its calls show it."""
    found = json.loads((calibrated[0] / "found.json").read_text())
    found.pop("repeated_reads", None)
    launches = {"coefficients": {"t0_us": 9.0}, "fit": found["ops"]["step"]["fit"]}
    assert "launches" not in calibrated[1]
    found |= {"ops": found["ops"] | {"launches": launches}} | ({} if share is None else {"repeated_reads": share})
    monkeypatch.setattr(calibrate, "calibrate", lambda *_: found)
    assert cli.status(["calibrate", "--out", str(tmp_path / "found.json")]) == cli.DONE
    lines = capsys.readouterr().out.splitlines()
    repeated = ["A repeated read of KV takes 0.424 of the time of a first one (repeated_reads)."]
    assert [line for line in lines if line.startswith("A repeated read")] == ([] if share is None else repeated)
    assert [line.split()[1] for line in lines if line.startswith("launches")] == [str(launches["fit"]["points"])]


def test_without_scipy_nothing_is_measured(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "scipy.optimize", None)
    monkeypatch.setattr(calibrate.Measuring, "measure", lambda *_: pytest.fail("measured"))
    assert cli.status(["calibrate", "--out", str(tmp_path / "found.json")]) == cli.MISTAKE
    assert capsys.readouterr().err == "fragmeter: fitting needs scipy: pip install -e '.[fit]' in the checkout\n"


@pytest.mark.slow
def test_interrupted_it_leaves_the_file_as_it_was(tmp_path, monkeypatch, capsys):
    """Ctrl-C in the middle of the samples."""

    def interrupted(items, total, subject):
        for number, item in enumerate(items):
            if number == 20:
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(verb_calibrate, "track", interrupted)
    out = tmp_path / "found.json"
    for before in (None, "what was there"):
        if before:
            out.write_text(before)
        assert cli.status(["calibrate", "--quick", "--out", str(out)]) == INTERRUPTED
        assert [path.read_text() for path in tmp_path.iterdir()] == ([before] if before else [])
    assert capsys.readouterr().err == "fragmeter: interrupted; finished results are kept\n" * 2


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (["--device", "tpu"], "device = 'tpu': must be cpu, shim, cuda, or cuda: and a number"),
        (
            ["--device", "shim"],
            "device = 'shim': shows that kernels are right, not how long they take; take cpu or cuda",
        ),
        (["--model", "mixtral-8x7b"], "model = 'mixtral-8x7b': has a mixture of experts; take one like OPT or Llama"),
        (["--block-size", "0"], "block_size = 0: must be at least 1"),
        (["--out", "missing/found.json"], "missing/found.json: cannot be written (No such file or directory)"),
    ],
)
def test_what_cannot_be_is_one_line_before_anything_is_measured(tokens, complaint, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(calibrate.Measuring, "measure", lambda *_: pytest.fail("measured"))
    assert cli.status(["calibrate", *tokens]) == cli.MISTAKE
    error = capsys.readouterr().err
    assert error.startswith(f"fragmeter: {complaint}") and error.count("\n") == 1
    assert list(tmp_path.iterdir()) == []
