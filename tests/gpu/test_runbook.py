"""The GPU day: from end to end on the CPU, and what becomes of parts that fail."""

from __future__ import annotations

import importlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from fragmeter.experiments.cli import app as cli
from fragmeter.gpu.devices.probe import probe
from fragmeter.gpu.runbook import __main__ as runbook
from fragmeter.gpu.runbook.__main__ import Part, parts_for
from fragmeter.gpu.runbook.summary import SECTIONS
from plan_cases import swapping_plan

needs_all = pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")


def part(name: str, code: str, **more) -> Part:
    """A part that is a line of Python."""
    return Part(name, ("-c", code), (f"{name}.json",), **more)


def writing(name: str, text: str = "{}") -> str:
    return f"open(r'{{out}}/{name}.json', 'w').write('{text}')"


def states(out: Path) -> dict[str, tuple[str, str | None]]:
    parts = json.loads((out / "run.json").read_text())["parts"]
    return {one["name"]: (one["state"], one["error"]) for one in parts}


@needs_all
@pytest.mark.slow
def test_the_whole_day_on_the_cpu(tmp_path, capsys):
    for needed in ("torch", "scipy"):
        pytest.importorskip(needed)
    assert runbook.main(["--device", "cpu", "--out", str(tmp_path / "day")]) == 0
    parts = parts_for("cpu")
    assert states(tmp_path / "day") == {
        one.name: ("left out", one.reason) if one.reason else ("done", None) for one in parts
    }
    check_summary(tmp_path / "day")
    page, archive = capsys.readouterr().out.splitlines()[-2:]
    assert page.endswith("summary.md") and archive == str(tmp_path / "day.tar.gz")


@needs_all
@pytest.mark.slow
def test_the_summary_has_the_results_of_the_parts_on_the_cpu(tmp_path, brief_drift):
    """One after another in this process, where libraries are loaded once; with a second run for the parts that were left out."""
    for needed in ("torch", "scipy"):
        pytest.importorskip(needed)
    parts = parts_for("cpu")
    left_out = [one for one in parts if one.reason]
    runbook.play(left_out, tmp_path, "cpu")
    assert [status_here(one, tmp_path) for one in parts if not one.reason] == [0] * 10
    runbook.play(left_out, tmp_path, "cpu")
    check_summary(tmp_path)


def check_summary(day: Path) -> None:
    """The files of every part are there, and the page has their results."""
    for one in parts_for("cpu"):
        for name in () if one.reason else one.files:
            assert (day / name).exists()
    page = (day / "summary.md").read_text()
    assert page.startswith("# GPU day on cpu: ")
    assert "cannot be shown" not in page
    assert "| decode_attention | float16 |" in page and "| device |" in page and "batch context" in page
    assert "steps of a vllm-v0 plan: 0 wrong" in page
    assert "## Calibration: toy-llama, fp32, quick" in page and "| decode_attention | 8 |" in page
    assert "## Validation: toy-llama, predicted against measured" in page and "| vllm-sosp23 |" in page
    assert "## Served on the device's own clock" in page and "| vllm-sosp23 over static at 1.25 |" in page


def status_here(one: Part, out: Path) -> int:
    """The exit status of a part's program, run in this process."""
    _, module, *flags = one.tokens(out)
    if module == "fragmeter":
        return cli.status(flags)
    package = importlib.import_module(module)
    return (package if hasattr(package, "main") else importlib.import_module(f"{module}.__main__")).main(flags)


@pytest.mark.slow
def test_a_part_that_fails_is_written_down_and_the_rest_goes_on(tmp_path):
    parts = [
        part("mistake", "import sys; print('fragmeter: no GPU to work with', file=sys.stderr); sys.exit(2)"),
        part("check", writing("check") + "; print('FAILED 3 points'); raise SystemExit(1)"),
        part("crash", "import os, signal; os.kill(os.getpid(), signal.SIGSEGV)"),
        part("last", writing("last")),
    ]
    outcomes = runbook.play(parts, tmp_path, "cpu")
    assert [outcome.state for outcome in outcomes] == ["failed", "failed", "failed", "done"]
    assert states(tmp_path) == {
        "mistake": ("failed", "fragmeter: no GPU to work with"),
        "check": ("failed", "FAILED 3 points"),
        "crash": ("failed", "exit status -11"),
        "last": ("done", None),
    }
    assert [outcome.files for outcome in outcomes] == [(), ("check.json",), (), ("last.json",)]
    page = (tmp_path / "summary.md").read_text()
    assert "| mistake | failed |" in page and "fragmeter: no GPU to work with" in page


@pytest.mark.slow
def test_a_part_that_hangs_is_stopped_with_its_children(tmp_path):
    child = f"[{sys.executable!r}, '-c', 'import signal; signal.pause()']"
    hangs = part(
        "hangs",
        f"import subprocess; child = subprocess.Popen({child}); print(child.pid, flush=True); child.wait()",
        budget_s=2,
    )
    (hung, after) = runbook.play([hangs, part("after", writing("after"))], tmp_path, "cpu")
    assert (hung.state, hung.error) == ("over budget", "stopped after 2 s")
    assert after.state == "done"
    pid = int((tmp_path / "hangs.log").read_text().splitlines()[-1])
    # Gone, or a zombie of the process that adopted it.
    stat = Path(f"/proc/{pid}/stat")
    assert not stat.exists() or stat.read_text().split()[2] == "Z"


@pytest.mark.slow
def test_a_part_may_use_what_those_before_it_left_of_their_budgets(tmp_path):
    saves, needs = part("saves", "pass", budget_s=60), part("needs", writing("needs"), budget_s=0)
    assert [outcome.state for outcome in runbook.play([needs, saves], tmp_path, "cpu")] == ["over budget", "done"]
    assert [outcome.state for outcome in runbook.play([saves, needs], tmp_path, "cpu")] == ["done", "done"]


@pytest.mark.slow
def test_a_finished_part_is_reported_while_the_next_one_runs(tmp_path):
    looks = "import json; print([p['name'] for p in json.load(open(r'{out}/run.json'))['parts']])"
    runbook.play([part("first", writing("first")), part("second", looks)], tmp_path, "cpu")
    command, said = (tmp_path / "second.log").read_text().splitlines()
    assert command.startswith(f"$ {sys.executable} -c 'import json; ") and said == "['first']"
    assert sorted(path.suffix for path in tmp_path.iterdir()) == [".json", ".json", ".log", ".log", ".md"]


@pytest.mark.slow
def test_a_run_goes_on_with_the_parts_that_are_not_done(tmp_path, capsys):
    """A part that failed and one that did not begin, but not the one that is done."""
    counting = (
        "import pathlib; at = pathlib.Path(r'{out}/first.json'); at.write_text(at.exists() and 'again' or 'once')"
    )
    parts = [part("first", counting), part("second", "raise SystemExit(1)")]
    runbook.play(parts, tmp_path, "cpu", resume=True)
    parts = [parts[0], part("second", writing("second")), part("third", writing("third"))]
    outcomes = runbook.play(parts, tmp_path, "cpu", resume=True)
    assert [outcome.state for outcome in outcomes] == ["done"] * 3
    assert (tmp_path / "first.json").read_text() == "once"
    assert "first       done before" in capsys.readouterr().out


@pytest.mark.slow
def test_when_the_time_is_over_no_part_begins(tmp_path, monkeypatch):
    monkeypatch.setattr(runbook, "LEAST_SECONDS", 0.5)
    parts = [part("first", "import signal; signal.pause()"), Part("left", reason="a CPU"), part("second", "pass")]
    outcomes = runbook.play(parts, tmp_path, "cpu", seconds=1)
    assert [outcome.state for outcome in outcomes] == ["over budget", "left out", "no time left"]
    assert outcomes[0].error == "stopped after 1 s" and outcomes[2].error == "run again for more: 60 s"
    assert [one.state for one in runbook.play(parts[2:], tmp_path, "cpu", seconds=60, resume=True)] == ["done"]


@pytest.mark.slow
def test_one_archive_has_everything_after_every_part(tmp_path):
    day = tmp_path / "day"
    looks = "import tarfile; print(sorted(tarfile.open(r'{out}.tar.gz').getnames()))"
    runbook.play([part("first", writing("first")), part("second", looks)], day, "cpu")
    names = ["day", "day/first.json", "day/first.log", "day/run.json", "day/summary.md"]
    assert (day / "second.log").read_text().splitlines()[-1] == str(names)
    with tarfile.open(tmp_path / "day.tar.gz") as packed:
        assert sorted(packed.getnames()) == sorted([*names, "day/second.log"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day", "day.tar.gz"]


@pytest.mark.slow
def test_results_of_two_devices_do_not_mix(tmp_path, capsys):
    runbook.play([part("first", writing("first"))], tmp_path, "cuda")
    assert runbook.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert f"device = 'cpu': {tmp_path} has results of cuda; take another folder" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("memory_bytes", "model"), [(80 << 30, "llama-3.1-8b"), (40 << 30, "llama-3.2-3b"), (24 << 30, "llama-3.2-1b")]
)
def test_a_small_card_gets_a_model_with_room_for_sequences(memory_bytes, model, tmp_path, monkeypatch):
    played = []
    monkeypatch.setattr(runbook.devices, "require", lambda name: memory_bytes)
    monkeypatch.setattr(
        runbook, "play", lambda parts, *_, **__: played.extend(parts) or runbook._write(tmp_path, "cuda", []) or []
    )
    assert runbook.main(["--device", "cuda", "--out", str(tmp_path)]) == 0
    models = {one.program[one.program.index("--model") + 1] for one in played if "--model" in one.program}
    assert models == {model}


@pytest.mark.slow
def test_a_part_can_be_run_again_alone(tmp_path):
    runbook.play([part("first", writing("first")), part("second", "raise SystemExit(1)")], tmp_path, "cpu")
    runbook.play([part("second", writing("second"))], tmp_path, "cpu")
    assert states(tmp_path) == {"first": ("done", None), "second": ("done", None)}


@pytest.mark.slow
def test_a_file_of_an_earlier_run_is_no_result_of_this_one(tmp_path):
    runbook.play([part("second", writing("second"))], tmp_path, "cpu")
    assert (tmp_path / "second.json").exists()
    (outcome,) = runbook.play([part("second", "pass")], tmp_path, "cpu")
    assert outcome.files == () and not (tmp_path / "second.json").exists()


def test_a_part_that_this_device_cannot_run_is_left_out(tmp_path):
    (outcome,) = runbook.play([Part("graphs", reason="a CPU captures no graphs")], tmp_path, "cpu")
    assert (outcome.state, outcome.error) == ("left out", "a CPU captures no graphs")
    assert "| graphs | left out |" in (tmp_path / "summary.md").read_text()


@pytest.mark.slow
def test_a_part_that_cannot_be_shown_is_named_and_the_rest_is_shown(tmp_path):
    ceiling = '{"device": {"name": "NVIDIA H200", "driver": "580.1"}, "copies": [], "data_sheet_bytes_per_s": null}'
    grid = '{"summary": [{}], "device": {}}'
    parts = [part("grid", writing("grid", grid)), part("ceiling", writing("ceiling", ceiling))]
    runbook.play(parts, tmp_path, "cuda")
    page = (tmp_path / "summary.md").read_text()
    assert page.startswith("# GPU day on cuda: NVIDIA H200, driver 580.1\n")
    assert "grid.json exists and cannot be shown: KeyError: 'kernel'" in page and "## Copies" in page


def test_the_parts_of_a_gpu_are_those_of_the_cpu_and_fit_into_ten_minutes():
    on_gpu, on_cpu = parts_for("cuda:1"), parts_for("cpu")
    assert [one.name for one in on_gpu] == [one.name for one in on_cpu]
    assert sum(one.budget_s for one in on_gpu) <= 10 * 60
    assert {name.removesuffix(".json") for one in on_gpu for name in one.files} >= set(SECTIONS)
    for one in on_gpu:
        assert one.name in ("doctor", "record") or "cuda:1" in one.program


@pytest.mark.slow
def test_the_summary_has_the_results_of_a_gpu(tmp_path):
    kernels = [
        {"kernel": "copy_blocks", "error": None, "registers": 20, "local_bytes": 0},
        {"kernel": "decode<64>", "error": None, "registers": 255, "local_bytes": 16},
        {"kernel": "merge<64>", "error": "CompileException: no such thing"},
    ]
    checks = [{"name": "decode_attention", "passes": False, "error": None, "tolerance": 0.0}]
    documents = {"modules": {"compile_s": 21.4, "kernels": kernels}, "graphs": {"checks": checks}}
    for name, document in documents.items():
        runbook.play([part(name, writing(name, json.dumps(document)))], tmp_path, "cuda")
    page = (tmp_path / "summary.md").read_text()
    assert "3 compiled in 21 s and loaded; those that fail or need local memory:" in page
    assert "| decode<64> | 255 | 16 |  |" in page
    assert "| merge<64> | - | - | CompileException: no such thing |" in page
    assert "copy_blocks" not in page
    assert "| decode_attention | no | no number | 0.0 |" in page


def test_a_day_that_is_interrupted_keeps_what_is_finished(tmp_path, capsys, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    runbook.play([part("first", writing("first"))], tmp_path, "cpu")
    monkeypatch.setattr(runbook, "run_part", interrupted)
    assert runbook.main(["--device", "cpu", "--out", str(tmp_path), "--only", "bench"]) == 130
    assert capsys.readouterr().err == "fragmeter: interrupted; finished results are kept\n"
    assert states(tmp_path) == {"first": ("done", None)}


ON_GPU = [one for one in parts_for("cuda") if one.name not in ("doctor", "record")]


@pytest.mark.skipif(probe().state == "ready", reason="there is a GPU")
@pytest.mark.parametrize("one", ON_GPU, ids=[one.name for one in ON_GPU])
def test_each_part_of_a_gpu_understands_its_flags_and_misses_the_gpu(one, tmp_path, capsys):
    pytest.importorskip("torch")
    swapping_plan().save(tmp_path / "plan.npz")
    status = status_here(one, tmp_path)
    complaint = capsys.readouterr().err
    assert status == 2 and complaint.count("\n") == 1
    # CuPy, torch's build, a driver or a card: whichever is missing here.
    assert complaint.startswith(("fragmeter: no GPU to work with", "fragmeter: torch ", "fragmeter: CuPy "))


@pytest.mark.slow
def test_without_torch_every_program_says_what_to_install(tmp_path):
    """In a process that has not imported it yet."""
    measuring = ("check.modules", "check.grid", "check.graphs", "bench.ceiling", "bench")
    programs = [[f"fragmeter.gpu.{name}", "--json", "none.json"] for name in measuring]
    programs.append(["fragmeter.gpu.runbook", "--out", "day"])
    code = f"""
import runpy, sys
sys.modules["torch"] = None
for module, *sys.argv[1:] in {programs}:
    try:
        runpy.run_module(module, run_name="__main__")
    except SystemExit as end:
        print(module, end.code)
"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=tmp_path)
    complaint = "fragmeter: running on a device needs torch: pip install -e '.[torch]' in the checkout\n"
    assert (printed.returncode, printed.stderr) == (0, complaint * len(programs))
    assert printed.stdout.splitlines() == [f"{module} 2" for module, *_ in programs]
    assert not [*tmp_path.iterdir()]


@pytest.mark.skipif(probe().state == "ready", reason="there is a GPU")
@pytest.mark.parametrize("device", ["cuda", "cuda:1"])
def test_without_a_gpu_no_part_begins(device, tmp_path, capsys):
    pytest.importorskip("torch")
    assert runbook.main(["--device", device, "--out", str(tmp_path / "day")]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert printed.err.startswith(("fragmeter: no GPU to work with", "fragmeter: torch ", "fragmeter: CuPy "))
    assert not (tmp_path / "day").exists()


@pytest.mark.slow
def test_parts_that_need_no_gpu_run_without(tmp_path):
    tokens = ["--device", "cuda", "--out", str(tmp_path), "--only", "record"]
    assert runbook.main(tokens) == 0
    assert states(tmp_path) == {"record": ("done", None)}


@pytest.mark.parametrize(
    ("tokens", "complaint"),
    [
        (["--device", "cpu", "--out", "{file}"], "out = '{file}': is a file; name a folder"),
        (["--out", "{folder}", "--only", "gird"], "only = 'gird': one of doctor, "),
    ],
)
def test_a_mistake_is_one_line(tokens, complaint, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    places = {"{file}": tmp_path / "file", "{folder}": tmp_path / "folder"}
    assert runbook.main([str(places.get(token, token)) for token in tokens]) == 2
    wanted = complaint.replace("{file}", os.fspath(tmp_path / "file"))
    assert capsys.readouterr().err.startswith(f"fragmeter: {wanted}")


@pytest.mark.parametrize("text", ["{", "[]", '{"parts": [{"name": "grid"}]}'])
def test_a_folder_of_something_else_is_refused(text, tmp_path, capsys):
    (tmp_path / "run.json").write_text(text)
    assert runbook.main(["--device", "cpu", "--out", str(tmp_path)]) == 2
    assert "run.json: tells of no GPU day; take another folder" in capsys.readouterr().err
    assert (tmp_path / "run.json").read_text() == text


@pytest.mark.parametrize("device", ["gpu", "shim", "cuda0"])
def test_a_device_that_cannot_be_measured_is_refused_at_once(device, tmp_path, capsys):
    assert runbook.main(["--device", device, "--out", str(tmp_path / "day")]) == 2
    assert f"device = {device!r}: must be cpu, cuda, or cuda: and a number" in capsys.readouterr().err
    assert not (tmp_path / "day").exists()
