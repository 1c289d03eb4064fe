"""The C++ face of decode attention: a torch extension that includes its header, built and compared with the Python function.

``python -m fragmeter.gpu.check.cpp_face --device cuda --json cpp_face.json`` builds it with nvcc for the GPU, and with
``--device cpu`` with g++ in nvcc's place, over the kernels' CPU build. Both call it through ``torch.ops``. The compile gate has
nvcc compile it on a machine without a GPU. nvcc is that of ``$CUDA_HOME`` or ``PATH``, or comes by pip (extra ``nvcc``).
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

from ...sim.types.errors import KernelFault, MissingExtra, install
from ..devices import devices, program
from ..ops import cpu_kernels, paged_attention
from ..ops.source import KERNELS
from .cases import TOLERANCE, Case, OnDevice, case, error, expected

SCHEMA_VERSION = 1
EXTENSION = """
#define FRAGMETER_HEAD_DIMS {head_dims}
#include <torch/library.h>
#include "paged_attention_cuda.cuh"
TORCH_LIBRARY({name}, library) {{
    library.def("forward(Tensor(a!) out, Tensor query, Tensor key_cache, Tensor value_cache, Tensor block_tables, "
                "Tensor context_lens, int block_size, int max_context_len) -> ()", &paged_attention_cuda_forward);
}}
"""
#: torch takes one library of a name in a process.
_NAMES = (f"fragmeter_face_{number}" for number in count())
#: Heads, contexts: every tile of heads, sequences that blocks share and others, ragged.
SHAPES: tuple[tuple[tuple[int, int], tuple[int, ...]], ...] = (
    ((4, 4), (64, 70, 0, 1, 33)),
    ((4, 2), (1100, 300)),
    ((14, 2), (2500,)),
    ((40, 2), (64, 70, 0, 1, 33)),
)
#: The header that CMake writes for torch's builds with CUDA, and that those for the CPU lack.
_MACROS = Path("c10", "cuda", "impl", "cuda_cmake_macros.h")
_NEEDS = (
    f"the C++ face needs nvcc of CUDA {{}}: {install('nvcc')} has that of CUDA 13; set CUDA_HOME for another toolkit"
)


@dataclass(frozen=True, slots=True)
class Check:
    """One call of the extension.

    Attributes:
        equal: Whether its output is that of Python bit for bit.
        error: Its relative L2 error against float64.
        tolerance: Largest error that passes.
    """

    dtype: str
    heads: tuple[int, int]
    contexts: tuple[int, ...]
    equal: bool
    error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        """Whether it is as near to float64 as its dtype allows."""
        return self.error <= self.tolerance


def nvcc(cuda: str | None = None) -> Path:
    """The compiler of ``$CUDA_HOME`` or ``PATH``, or the one that pip installed.

    Args:
        cuda: Release of CUDA that torch is built for, such as "13.0"; one with another major number is passed over.

    Raises:
        MissingExtra: There is none.
    """
    home, on_path, spec = os.environ.get("CUDA_HOME"), shutil.which("nvcc"), find_spec("nvidia")
    of_pip = [Path(folder, "cu13", "bin", "nvcc") for folder in (spec and spec.submodule_search_locations) or ()]
    for found in [*([Path(home, "bin", "nvcc")] if home else []), *of_pip, *([Path(on_path)] if on_path else [])]:
        if os.access(found, os.X_OK) and (cuda is None or _release(found).split(".")[0] == cuda.split(".")[0]):
            return found
    raise MissingExtra(_NEEDS.format(cuda or "13"))


def nvcc_release() -> str:
    """Release of the compiler, such as "13.0"."""
    return _release(nvcc())


def _release(compiler: Path) -> str:
    told = subprocess.run([compiler, "--version"], capture_output=True, text=True)
    found = re.search(r"release (\d+\.\d+)", told.stdout)
    return found[1] if found else ""


def registers(architecture: str, head_dims: Sequence[int] = (64,)) -> str:
    """nvcc's output where it compiles the extension, host code and kernels, for one architecture, with the assembler's reports.

    torch's headers may be those of a build for the CPU: the one header that it lacks is made up.

    Raises:
        MissingExtra: torch or nvcc is not installed.
        KernelFault: It does not compile; the text is the first error.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if not (_torch_folder() / "include" / _MACROS).exists():
            (folder / _MACROS).parent.mkdir(parents=True)
            (folder / _MACROS).write_text("#pragma once\n#define C10_CUDA_BUILD_SHARED_LIBS\n")
        report = ("-Xptxas", "-v", "-c", "-o", folder / "face.o")
        return _run(*_of_gpu(nvcc(), architecture, folder), *report, _source(folder / "face.cu", head_dims))


def built(device: str, folder: Path, head_dims: Sequence[int] = (64,)) -> Any:
    """``forward`` of the extension, built in ``folder`` and loaded into this process.

    Args:
        device: cpu, or cuda and a number.

    Raises:
        MissingExtra: torch or the compiler is not installed.
        KernelFault: It does not compile; the text is the first error.
    """
    library, torch = _torch_folder() / "lib", importlib.import_module("torch")
    out, name = folder / "face.so", next(_NAMES)
    if device == "cpu":
        # As an extension for GPUs would be built, by g++ in nvcc's place.
        compiler = cpu_kernels.compiler()
        if compiler is None:
            raise MissingExtra("the C++ face needs g++: install it, or set CXX")
        includes = (f"-I{place}" for place in _includes())
        # The last of two standards counts, and torch's headers need this one.
        command: list[str | Path] = [
            compiler,
            *cpu_kernels.FLAGS,
            "-std=c++20",
            *includes,
            _source(folder / "face.cpp", head_dims, name),
        ]
        libraries = ["-ltorch", "-ltorch_cpu", "-lc10"]
    else:
        major, minor = torch.cuda.get_device_capability(device)
        found = nvcc(torch.version.cuda)
        architecture = f"sm_{major}{minor}{'a' * (major == 9)}"
        shared = ("-shared", "-Xcompiler", "-fPIC", f"-L{found.parents[1] / 'lib'}")
        command = [*_of_gpu(found, architecture, folder), *shared, _source(folder / "face.cu", head_dims, name)]
        libraries = ["-ltorch", "-ltorch_cpu", "-ltorch_cuda", "-lc10", "-lc10_cuda"]
    _run(*command, "-o", out, f"-L{library}", *libraries)
    torch.ops.load_library(out)
    return getattr(torch.ops, name).forward


def _of_gpu(compiler: Path, architecture: str, folder: Path) -> list[str | Path]:
    system = [word for place in _includes()[1:] for word in ("-isystem", place)]
    # 128: a loop that is not reachable in some instances. The folder comes last, so that torch's own headers are found first.
    options = ("-std=c++20", f"-arch={architecture}", "-diag-suppress=128", f"-I{_includes()[0]}")
    return [compiler, *options, *system, "-isystem", folder]


def _includes() -> list[Path]:
    headers = _torch_folder() / "include"
    return [KERNELS / "include", headers, headers / "torch/csrc/api/include"]


def _torch_folder() -> Path:
    spec = find_spec("torch")
    if spec is None or spec.origin is None:
        raise MissingExtra(f"the C++ face needs torch: {install('torch')}")
    return Path(spec.origin).parent


def _source(path: Path, head_dims: Sequence[int], name: str = "fragmeter_face") -> Path:
    path.write_text(EXTENSION.format(name=name, head_dims=", ".join(map(str, head_dims))))
    return path


def _run(*command: str | Path) -> str:
    """All that the compiler says."""
    done = subprocess.run(command, capture_output=True, text=True)
    said = done.stdout + done.stderr
    if done.returncode:
        lines = [line for line in said.splitlines() if "error" in line]
        raise KernelFault(f"the C++ face does not compile: {(lines or [said.strip()])[0]}")
    return said


def checks(forward: Any, torch_device: Any, head_dim: int = 64) -> Iterator[Check]:
    """The extension against Python and float64, at ``SHAPES`` and every dtype."""
    torch = importlib.import_module("torch")
    for dtype in TOLERANCE:
        for heads, contexts in SHAPES:
            given: Case = case(dtype, heads, head_dim, 16, contexts, make=OnDevice(torch_device))
            out = torch.full_like(given.query, torch.nan)
            forward(out, **vars(given))
            same = torch.equal(out, paged_attention.forward(**vars(given)))
            yield Check(dtype, heads, contexts, same, error(out, expected(given)), TOLERANCE[dtype])


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m fragmeter.gpu.check.cpp_face", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu: the kernels' CPU build")
    parser.add_argument("--json", type=Path, help="file for what came of each call")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    target = program.JsonFile(given.json)
    device = devices.open(given.device)
    begin = perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        forward = built(str(device.torch_device), Path(folder))
    seconds = round(perf_counter() - begin, 2)
    found = list(checks(forward, device.torch_device))
    rows = [asdict(check) | {"passes": check.passes} for check in found]
    target.write({"schema_version": SCHEMA_VERSION, "device": device.describe(), "build_s": seconds, "checks": rows})
    for check in found:
        outcome = "passes" if check.passes else "FAILED"
        same = "as Python bit for bit" if check.equal else "not Python's bits"
        print(f"{outcome} {check.dtype} {check.heads} heads: error {check.error:.1e}, {same}")
    print(f"{len(found)} calls; {seconds} s to build")
    return all(check.passes for check in found)


if __name__ == "__main__":
    sys.exit(main())
