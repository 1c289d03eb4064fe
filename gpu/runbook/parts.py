"""The parts of a GPU day, in order: what each runs, what it leaves, how many seconds it may take."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...sim.types.errors import SettingError

#: What is calibrated and validated: of a size that every A100 has room for, and one for a core of a CPU.
MODELS = {"cuda": "llama-3.1-8b", "cpu": "toy-llama"}
#: Of each part on a CPU, which may have much else to do.
CPU_BUDGET_S = 600
#: Where each program is that measures.
_PROGRAMS = {
    "modules": "check.modules",
    "grid": "check.grid",
    "graphs": "check.graphs",
    "ceiling": "bench.ceiling",
    "bench": "bench",
}


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Of the part and its log.
        program: What Python runs; ``{out}`` is the folder.
        files: What it leaves there.
        budget_s: After so many seconds it is stopped.
        reason: Why it is left out on this device; None where it runs.
    """

    name: str
    program: tuple[str, ...] = ()
    files: tuple[str, ...] = ()
    budget_s: float = 60
    reason: str | None = None

    def tokens(self, out: Path) -> list[str]:
        """Python's command line."""
        return [token.replace("{out}", str(out)) for token in self.program]


def parts_for(device: str, model: str | None = None, only: Sequence[str] | None = None) -> list[Part]:
    """The parts for a device, or those of them that are asked for.

    Raises:
        SettingError: Asked for one that is not there, or for no device that could be measured.
    """
    if not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SettingError("device", device, "must be cpu, cuda, or cuda: and a number")
    on_cpu = device == "cpu"
    parts = (_on_cpu if on_cpu else _on_gpu)(device, model or MODELS["cpu" if on_cpu else "cuda"])
    names = [part.name for part in parts]
    for name in only or ():
        if name not in names:
            raise SettingError("only", name, f"one of {', '.join(names)}")
    return [part for part in parts if not only or part.name in only]


def _on_gpu(device: str, model: str) -> list[Part]:
    return [
        _doctor(),
        _measuring("modules", device, budget_s=70),
        _measuring("grid", device, budget_s=70),
        _measuring("graphs", device, budget_s=25),
        _record("100:200"),
        _replay(device, model, every=1),
        _measuring("ceiling", device, budget_s=15),
        _measuring("bench", device, budget_s=60),
        _calibrate(device, model),
        _validate(device, model),
    ]


def _on_cpu(device: str, model: str) -> list[Part]:
    """The same, small; the kernels' own source in its CPU build."""
    few = ("--subset", "--dtype", "float16", "--head-dim", "64")
    parts = [
        _doctor(),
        Part("modules", reason="the grid builds what it runs for the CPU"),
        _measuring("grid", "shim", *few),
        Part("graphs", reason="a CPU captures no graphs"),
        _record("138:8"),
        _replay(device, model, every=4),
        _measuring("ceiling", device),
        _measuring("bench", device),
        _calibrate(device, model, "--quick"),
        _validate(device, model, "--quick"),
    ]
    return [replace(part, budget_s=CPU_BUDGET_S) for part in parts]


def _doctor() -> Part:
    return _verb("doctor", budget_s=25)


def _record(window: str) -> Part:
    """Preemptions, swaps both ways, copies on write and shuffled ids are in the window."""
    load = ("--policy", "vllm-v0", "--n", "2", "--request-rate", "4", "--num-prompts", "40")
    pool = ("--num-gpu-blocks-override", "300", "--preemption-mode", "swap")
    plan = ("--record-plan", "{out}/plan.npz", "--record-steps", window, "--shuffle-ids")
    return _verb("record", *load, *pool, *plan, verb="simulate", files=("plan.npz",), budget_s=15)


def _replay(device: str, model: str, every: int) -> Part:
    """Attention over the simulator's own tables, against what its sequences hold."""
    how = ("--plan", "{out}/plan.npz", "--check", "--every", str(every), "--device", device, "--model", model)
    return _verb("replay", *how, verb="validate", budget_s=40)


def _calibrate(device: str, model: str, *more: str) -> Part:
    flags = ("--device", device, "--model", model, *more, "--out", "{out}/calibration.json")
    return Part("calibrate", ("-m", "fragmeter", "calibrate", *flags), ("calibration.json",), budget_s=70)


def _validate(device: str, model: str, *more: str) -> Part:
    files = ("--calibration", "{out}/calibration.json", "--out", "{out}/validation")
    flags = ("--device", device, "--model", model, *more, *files)
    left = tuple(f"validation/{name}" for name in ("validation.json", "steps.csv", "fragmeter.json"))
    return Part("validate", ("-m", "fragmeter", "validate", *flags), left, budget_s=90)


def _verb(name: str, *flags: str, verb: str | None = None, files: tuple[str, ...] = (), budget_s: float = 60) -> Part:
    """A command of the command line; the part's file is its JSON output."""
    result = f"{name}.json"
    program = ("-m", "fragmeter", verb or name, *flags, "--json", f"{{out}}/{result}")
    return Part(name, program, (result, *files), budget_s)


def _measuring(name: str, device: str, *more: str, budget_s: float = 60) -> Part:
    """A program of this package that writes one file."""
    program = ("-m", f"fragmeter.gpu.{_PROGRAMS[name]}", "--device", device, *more, "--json", f"{{out}}/{name}.json")
    return Part(name, program, (f"{name}.json",), budget_s)
