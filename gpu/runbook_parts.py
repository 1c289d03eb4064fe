"""The parts of a GPU day, in order: what each runs, what it leaves, how many seconds it may take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from ..sim.errors import SettingError


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
        SettingError: Asked for one that is not there.
    """
    parts = _on_cpu(device) if device == "cpu" else _on_gpu(device)
    names = [part.name for part in parts]
    for name in only or ():
        if name not in names:
            raise SettingError("only", name, f"one of {', '.join(names)}")
    return [part for part in parts if not only or part.name in only]


def _on_gpu(device: str) -> list[Part]:
    return [
        _doctor(),
        _measuring("modules", device, budget_s=80),
        _measuring("grid", device, budget_s=80),
        _measuring("graphs", device, budget_s=30),
        _measuring("ceiling", device, budget_s=30),
        _measuring("bench", device, budget_s=90),
    ]


def _on_cpu(device: str) -> list[Part]:
    """The same, small; the kernels' own source in its CPU build."""
    few = ("--subset", "--dtype", "float16", "--head-dim", "64")
    return [
        _doctor(),
        Part("modules", reason="the grid builds what it runs for the CPU"),
        _measuring("grid", "shim", *few),
        Part("graphs", reason="a CPU captures no graphs"),
        _measuring("ceiling", device),
        _measuring("bench", device),
    ]


def _doctor() -> Part:
    return Part("doctor", ("-m", "fragmeter", "doctor", "--json", "{out}/doctor.json"), ("doctor.json",), 30)


def _measuring(name: str, device: str, *more: str, budget_s: float = 60) -> Part:
    """A program of this package that writes one file."""
    program = ("-m", f"fragmeter.gpu.{name}", "--device", device, *more, "--json", f"{{out}}/{name}.json")
    return Part(name, program, (f"{name}.json",), budget_s)
