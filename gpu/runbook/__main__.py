"""All GPU checks and measurements in one command: ``python -m fragmeter.gpu.runbook --device cuda --out DIR``.

Each part runs in a process of its own with a time budget in seconds, the parts of most worth first. A part that fails, hangs
or breaks its CUDA context is recorded, and the other parts still run. The results of a part are in a JSON file as soon as
the part ends; ``run.json`` has the state of each part, ``summary.md`` summarises all results, and ``DIR.tar.gz`` beside the
folder has all of it in one file. A run into the same folder goes on with the parts that are not done. With ``--device cpu``
the same parts run at a small size, without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import tarfile
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

from ... import __version__
from ...sim.output.files import as_json, write_whole
from ...sim.output.folders import FolderKind, check_folder
from ...sim.output.interrupts import handle
from ...sim.types.errors import MissingExtra, SettingError, UserError, user_paths
from ..check.cpp_face import nvcc
from ..devices import devices, program
from ..devices.devices import usual_model
from .summary import summary

#: Budget of each part on a CPU, which may be under other load.
CPU_BUDGET_S = 600
#: Time of all parts together.
SECONDS = 600.0
#: With less time than this left, no further part begins.
LEAST_SECONDS = 5.0
#: Modules of the measuring programs.
_PROGRAMS = {
    "modules": "check.modules",
    "grid": "check.grid",
    "graphs": "check.graphs",
    "ceiling": "bench.ceiling",
    "bench": "bench",
    "smoke": "check.grid",
    "compare": "bench",
    "cpp_face": "check.cpp_face",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Name of the part and its log.
        program: Arguments of the Python interpreter; ``{out}`` is the folder.
        files: Output files in that folder.
        budget_s: Time in seconds after which the part is stopped.
        reason: Reason why the part does not run on this device; None if it runs.
    """

    name: str
    program: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    budget_s: float = 60
    reason: str | None = None

    def tokens(self, out: Path) -> list[str]:
        """Arguments of the Python interpreter, with the folder in place of ``{out}``."""
        return [token.replace("{out}", str(out)) for token in self.program]


def parts_for(device: str, model: str | None = None, only: Sequence[str] | None = None) -> list[Part]:
    """The parts for a device, or the requested ones among them.

    Raises:
        SettingError: A requested part does not exist, or the device cannot be measured.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SettingError("device", device, "must be cpu, cuda, or cuda: and a number")
    on_cpu = device == "cpu"
    # Which parts there are does not depend on the model of a GPU; its memory is looked at where they run.
    parts = (_on_cpu if on_cpu else _on_gpu)(device, model or usual_model(None if on_cpu else 0))
    names = [part.name for part in parts]
    for name in only or ():
        if name not in names:
            raise SettingError("only", name, f"one of {', '.join(names)}")
    return [part for part in parts if not only or part.name in only]


def _on_gpu(device: str, model: str) -> list[Part]:
    one_shape = ("--subset", "--dtype", "float16", "--head-dim", "128", "--head-dim", "576")
    return [
        _doctor(),
        _measuring("smoke", device, *one_shape, budget_s=20),
        _measuring("ceiling", device, budget_s=10),
        _measuring("bench", device, "--passes", "ours", budget_s=25),
        _calibrate(device, model),
        _validate(device, model),
        _serve(device, model),
        # Compiles in parallel what the grid needs.
        _measuring("modules", device, budget_s=50),
        # 8 to 12 s on H100 and H200.
        _measuring("grid", device, "--subset", budget_s=25),
        _record("100:200"),
        _replay(device, model, every=1),
        _measuring("graphs", device, budget_s=15),
        _cpp_face(device),
        # 20 to 23 s.
        _measuring("compare", device, "--passes", "others", budget_s=35),
    ]


def _on_cpu(device: str, model: str) -> list[Part]:
    """The same parts at a small size, with the kernels' CPU build."""
    few = ("--subset", "--dtype", "float16", "--head-dim", "64")
    parts = [
        _doctor(),
        Part("smoke", reason="the grid has the same points"),
        _measuring("ceiling", device),
        _measuring("bench", device, "--passes", "ours"),
        _calibrate(device, model, "--quick"),
        _validate(device, model, "--quick"),
        _serve(device, model, "--quick"),
        Part("modules", reason="the grid builds what it runs for the CPU"),
        _measuring("grid", "shim", *few),
        _record("138:8"),
        _replay(device, model, every=4),
        Part("graphs", reason="a CPU captures no graphs"),
        _measuring("cpp_face", device),
        _measuring("compare", device, "--passes", "others"),
    ]
    return [replace(part, budget_s=CPU_BUDGET_S) for part in parts]


def _doctor() -> Part:
    return _verb("doctor", budget_s=15)


def _cpp_face(device: str) -> Part:
    try:
        nvcc()
    except MissingExtra as error:
        return Part("cpp_face", reason=str(error))
    # Its minute is what parts before it leave.
    return _measuring("cpp_face", device, budget_s=20)


def _record(window: str) -> Part:
    """The window contains preemptions, swaps in both directions, copies on write and shuffled ids."""
    load = ("--policy", "vllm-v0", "--n", "2", "--request-rate", "4", "--num-prompts", "40")
    pool = ("--num-gpu-blocks-override", "300", "--preemption-mode", "swap")
    plan = ("--record-plan", "{out}/plan.npz", "--record-steps", window, "--shuffle-ids")
    return _verb("record", *load, *pool, *plan, verb="simulate", files=("plan.npz",), budget_s=15)


def _replay(device: str, model: str, every: int) -> Part:
    """Attention over the simulator's own block tables, compared with the sequences' actual tokens."""
    how = ("--plan", "{out}/plan.npz", "--check", "--every", str(every), "--device", device, "--model", model)
    return _verb("replay", *how, verb="validate", budget_s=40)


def _calibrate(device: str, model: str, *more: str) -> Part:
    flags = ("--device", device, "--model", model, *more, "--out", "{out}/calibration.json")
    return Part("calibrate", ("-m", "fragmeter", "calibrate", *flags), ("calibration.json",), budget_s=70)


def _validate(device: str, model: str, *more: str) -> Part:
    files = ("--calibration", "{out}/calibration.json", "--out", "{out}/validation")
    flags = ("--device", device, "--model", model, *more, *files)
    # Of a GPU whole steps are measured again, which gives another calibration.
    names = ("validation.json", "steps.csv", *(() if device == "cpu" else ("calibration.json",)), "fragmeter.json")
    left = tuple(f"validation/{name}" for name in names)
    return Part("validate", ("-m", "fragmeter", "validate", *flags), left, budget_s=220)


def _serve(device: str, model: str, *more: str) -> Part:
    """Requests on the device's own clock, predicted before. They take longer than this budget: on an H100 the parts before it left 140 s
    of theirs."""
    how = ("--calibration", "{out}/calibration.json", "--predict", "{out}/prediction.json")
    flags = ("--device", device, "--model", model, *more, *how)
    return _verb("serving", *flags, verb="validate", files=("prediction.json",), budget_s=40)


def _verb(name: str, *flags: str, verb: str | None = None, files: tuple[str, ...] = (), budget_s: float = 60) -> Part:
    """A part that runs a command of the command line; its file is the JSON output."""
    result = f"{name}.json"
    program = ("-m", "fragmeter", verb or name, *flags, "--json", f"{{out}}/{result}")
    return Part(name, program, (result, *files), budget_s)


def _measuring(name: str, device: str, *more: str, budget_s: float = 60) -> Part:
    """A part that runs a program of this package, which writes one file."""
    program = ("-m", f"fragmeter.gpu.{_PROGRAMS[name]}", "--device", device, *more, "--json", f"{{out}}/{name}.json")
    return Part(name, program, (f"{name}.json",), budget_s)


SCHEMA_VERSION = 1
State = Literal["done", "failed", "over budget", "left out", "no time left"]


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a part.

    Attributes:
        name: Name of the part.
        state: ``failed`` also if a check did not pass; ``left out`` if the part cannot run on this device; ``no time left`` if
            it did not begin.
        seconds: Run time.
        error: One line; None if the part is done.
        files: Files written, besides the log.
    """

    name: str
    state: State
    seconds: float
    error: str | None
    files: tuple[str, ...] = ()


def play(
    parts: Sequence[Part], out: Path, device: str, seconds: float | None = None, resume: bool = False
) -> list[Outcome]:
    """Run the parts in order and keep ``run.json``, ``summary.md`` and the archive up to date.

    A part may use the budget that earlier parts left over, so the total time does not exceed the sum of the budgets.
    Outcomes of parts that an earlier run left in ``out`` are kept, unless the part runs again.

    Args:
        seconds: Time of all parts together; None is the sum of their budgets.
        resume: Leave out parts that are done already.

    Raises:
        UserError: ``out`` is not writable.
    """
    outcomes, saved_s = _earlier(out, device), 0.0
    check_folder(out, _folder_kind(parts, outcomes.values()))
    with user_paths(out):
        out.mkdir(parents=True, exist_ok=True)
    _write(out, device, list(outcomes.values()))
    begin = perf_counter()
    for part in parts:
        before = outcomes.get(part.name)
        if resume and before is not None and before.state == "done":
            print(f"{part.name:<12}done before", flush=True)
            continue
        left_s = float("inf") if seconds is None else seconds - (perf_counter() - begin)
        print(f"{part.name:<12}", end="", flush=True)
        budget_s = min(part.budget_s + saved_s, left_s)
        if left_s < LEAST_SECONDS and not part.reason:
            outcome = Outcome(part.name, "no time left", 0.0, f"run again for more: {part.budget_s:.0f} s")
        else:
            outcome = run_part(part, out, budget_s)
        outcomes[part.name] = outcome
        saved_s = max(0.0, budget_s - outcome.seconds)
        error = f": {outcome.error}" if outcome.error else ""
        print(f"{outcome.state} ({outcome.seconds:.1f} s){error}", flush=True)
        _write(out, device, list(outcomes.values()))
    return [outcomes[part.name] for part in parts]


def _folder_kind(parts: Sequence[Part], earlier: Iterable[Outcome]) -> FolderKind:
    """The kind of the ``--out`` folder: files and logs of these parts, of the parts of any device, and of earlier parts."""
    known: list[Part | Outcome] = [
        *parts,
        *earlier,
        *(part for device in ("cuda", "cpu") for part in parts_for(device)),
    ]
    files = {name for part in known for name in (*part.files, f"{part.name}.log")}
    return FolderKind(
        "GPU day", (*sorted(files), "summary.md"), marker="run.json", recognises=lambda run: "parts" in run
    )


def run_part(part: Part, out: Path, budget_s: float) -> Outcome:
    """Run one part in a process of its own; its log has the command, for a manual run, and all output."""
    if part.reason:
        return Outcome(part.name, "left out", 0.0, part.reason)
    log = out / f"{part.name}.log"
    for name in part.files:
        (out / name).unlink(missing_ok=True)
    command, begin = [sys.executable, *part.tokens(out)], perf_counter()
    with log.open("w") as written:
        print(f"$ {shlex.join(command)}", file=written, flush=True)
        status = _status(command, written, budget_s)
    seconds = round(perf_counter() - begin, 2)
    files = tuple(name for name in part.files if (out / name).exists())
    if status == 0:
        return Outcome(part.name, "done", seconds, None, files)
    if status is None:
        return Outcome(part.name, "over budget", seconds, f"stopped after {seconds:.0f} s", files)
    return Outcome(part.name, "failed", seconds, _last_line(log) or f"exit status {status}", files)


def _status(command: list[str], output: Any, budget_s: float) -> int | None:
    """The exit status of a process; None if it had to be stopped."""
    process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
    try:
        return process.wait(budget_s)
    except subprocess.TimeoutExpired:
        return None
    finally:
        # Also kills the process's workers; runs on Ctrl-C as well.
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _last_line(log: Path) -> str | None:
    said = log.read_text(errors="replace").splitlines()[1:]
    return next((line.strip()[:300] for line in reversed(said) if line.strip()), None)


def _earlier(out: Path, device: str) -> dict[str, Outcome]:
    """Outcomes of an earlier run in the same folder.

    Raises:
        UserError: The file was not written by a runbook, or by that of another device.
    """
    found = out / "run.json"
    try:
        run: dict[str, Any] = json.loads(found.read_text()) if found.exists() else {"parts": [], "device": device}
        parts = {part["name"]: Outcome(**part | {"files": tuple(part["files"])}) for part in run["parts"]}
        of_device = run["device"]
    except (ValueError, KeyError, TypeError):
        raise UserError(f"{found}: tells of no GPU day; take another folder, or move it away") from None
    if parts and of_device != device:
        raise SettingError("device", device, f"{out} has results of {of_device}; take another folder")
    return parts


def _write(out: Path, device: str, outcomes: list[Outcome]) -> None:
    document = {
        "schema_version": SCHEMA_VERSION,
        "fragmeter": __version__,
        "device": device,
        "written": datetime.now(UTC).isoformat(timespec="seconds"),
        "seconds": round(sum(outcome.seconds for outcome in outcomes), 2),
        "parts": [asdict(outcome) for outcome in outcomes],
    }
    write_whole(out / "run.json", as_json(document))
    write_whole(out / "summary.md", summary(out))
    _pack(out)


def archive_of(out: Path) -> Path:
    """The file beside the folder that has all of it."""
    return out.absolute().with_name(f"{out.absolute().name}.tar.gz")


def _pack(out: Path) -> None:
    """Write the archive anew; a reader finds the old one or the new one."""
    archive = archive_of(out)
    partial = archive.with_name(f"{archive.name}.partial")
    with user_paths(archive):
        with tarfile.open(partial, "w:gz") as packed:
            packed.add(out, arcname=out.absolute().name)
        partial.replace(archive)


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(prog="python -m fragmeter.gpu.runbook", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu: the same, small")
    parser.add_argument("--model", help="preset that is calibrated and validated; one that fits by default")
    parser.add_argument("--out", type=Path, required=True, help="folder for what is found")
    parser.add_argument("--only", action="append", help="run this part alone, again if it is done (may be given again)")
    parser.add_argument(
        "--seconds", type=float, help="time of all parts together; default: 600 on a GPU, none on a CPU"
    )
    given = parser.parse_args(tokens)
    return program.run(lambda: _play_stages(given))


def _play_stages(given: argparse.Namespace) -> bool:
    if given.seconds is not None and not given.seconds > 0:
        raise SettingError("seconds", given.seconds, "must be more than 0")
    seconds, model = given.seconds, given.model
    if given.device != "cpu":
        seconds = SECONDS if seconds is None else seconds
        parts = parts_for(given.device, model, given.only)
        if any(given.device in part.program for part in parts):
            # Checked once here instead of in every part.
            memory_bytes = devices.require(given.device)
            model = model or usual_model(memory_bytes)
    parts = parts_for(given.device, model, given.only)
    outcomes = play(parts, given.out, given.device, seconds, resume=not given.only)
    print((given.out / "summary.md").read_text(), end="")
    print(f"{given.out / 'summary.md'}\n{archive_of(given.out)}")
    return all(outcome.state in ("done", "left out") for outcome in outcomes)


if __name__ == "__main__":
    handle()
    sys.exit(main())
