"""Availability of the GPU parts on this machine, with the reason for each unavailable one."""

from __future__ import annotations

import importlib
import subprocess
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from ...sim.types.errors import MissingExtra, install
from ..devices.probe import probe
from ..ops.cpu_kernels import compiler


@dataclass(frozen=True, slots=True)
class Part:
    """One part.

    Attributes:
        name: Name of the part.
        works: Whether the part is usable here.
        found: One line: the version found, or the obstacle.
        remedy: One line: the remedy; None if the part works.
    """

    name: str
    works: bool
    found: str
    remedy: str | None = None

    def as_dict(self) -> dict[str, Any]:
        """The part as a dict, for ``fragmeter doctor --json``."""
        return asdict(self)


def cpu_kernels() -> Part:
    """The kernels' CPU build: needs a C++ compiler."""
    name, found = "CPU kernels", compiler()
    if found is None:
        return Part(name, False, "no C++ compiler", "install g++, or name a compiler in CXX")
    try:
        said = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        return Part(name, False, f"{found}: {error}", "install g++, or name another compiler in CXX")
    return Part(name, True, (said.splitlines() or [found])[0])


def toolkit() -> tuple[ModuleType, Path]:
    """NVRTC, and the folder of the CUDA headers.

    Raises:
        MissingExtra: One of them is not installed.
    """
    try:
        nvrtc = importlib.import_module("cupy").cuda.nvrtc
        spec = find_spec("nvidia.cu13")
        folders = (Path(folder, "include") for folder in (spec and spec.submodule_search_locations) or ())
        include = next(folder for folder in folders if (folder / "cuda_fp16.h").exists())
        nvrtc.getVersion()
    except (ImportError, AttributeError, RuntimeError, StopIteration) as error:
        raise MissingExtra(f"compiling kernels needs NVRTC: {install('kernels')}") from error
    return nvrtc, include


def compile_gate() -> Part:
    """Compilation for absent GPUs: needs NVRTC and CUDA's headers."""
    try:
        nvrtc, _ = toolkit()
    except MissingExtra:
        return Part("compile gate", False, "no NVRTC or no CUDA headers", install("kernels"))
    except OSError as error:
        remedy = "set CUPY_CACHE_DIR to a folder that can be written"
        return Part("compile gate", False, f"CuPy cannot be imported: {error}", remedy)
    major, minor = nvrtc.getVersion()
    return Part("compile gate", True, f"NVRTC {major}.{minor} and CUDA's headers")


def torch() -> Part:
    """torch and its build; a CPU build is sufficient without a GPU."""
    part = _library("torch", install("torch"), _torch_build)
    if not part.works or probe().state != "ready":
        return part
    found = importlib.import_module("torch")
    if found.version.cuda is None:
        return replace(
            part, works=False, remedy="there is a GPU: install torch's build for CUDA (pytorch.org says how)"
        )
    if not found.cuda.is_available():
        return replace(part, works=False, remedy="it does not see the GPU: install its build for the driver's CUDA")
    return part


def _torch_build(found: ModuleType) -> str:
    return f"built for CUDA {found.version.cuda}" if found.version.cuda else "built for the CPU only"


def cupy() -> Part:
    """CuPy, which runs our kernels on a GPU."""
    return _library("cupy", f"{install('gpu')} (CUDA 13; gpu12 for CUDA 12)", label="CuPy")


def gpu() -> Part:
    """A GPU that CuPy can use."""
    report = probe()
    remedies = {
        "no-cupy": install("gpu"),
        "no-driver": "install NVIDIA's driver: 580 or newer for CUDA 13, 525 or newer for CUDA 12 (extra gpu12)",
        "no-device": "look at nvidia-smi and CUDA_VISIBLE_DEVICES; without a GPU use --device cpu",
        "failed": "look at nvidia-smi; CuPy's own account: python -c 'import cupy; cupy.show_config()'",
    }
    return Part("GPU", report.state == "ready", report.text, remedies.get(report.state))


def fitting() -> Part:
    """scipy, which ``fragmeter calibrate`` needs for fitting."""
    return _library("scipy", f"to calibrate: {install('fit')}")


def flashinfer() -> Part:
    """FlashInfer; the benchmark compares with it if it is installed."""
    return _library("flashinfer", "optional, on a GPU: pip install flashinfer-python", label="FlashInfer")


def _library(
    module: str, remedy: str, more: Callable[[ModuleType], str] | None = None, label: str | None = None
) -> Part:
    """An optional package: imports it, since an installed package may still be broken."""
    name = label or module
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        text = "not installed" if error.name == module else f"lacks {error.name}"
        return Part(name, False, text, remedy)
    except Exception as error:
        return Part(name, False, f"cannot be imported: {' '.join(str(error).split())}", remedy)
    details = f", {more(found)}" if more else ""
    return Part(name, True, f"{found.__version__}{details}")


def every_part() -> list[Part]:
    """All parts, ordered by increasing requirements."""
    return [part() for part in (cpu_kernels, compile_gate, torch, fitting, cupy, gpu, flashinfer)]
