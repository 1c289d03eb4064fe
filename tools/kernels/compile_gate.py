"""The compile gate: compile every kernel instance for every architecture, without a GPU. No instance may spill registers.

``python -m tools.kernels.compile_gate`` prints the table. It needs CuPy and NVIDIA's compiler and headers (extra
``kernels``), and no driver. Where torch and nvcc are installed (extra ``nvcc``), nvcc compiles the C++ face as well.
"""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass

from fragmeter.gpu.check import cpp_face
from fragmeter.gpu.check.modules import every_kernel
from fragmeter.gpu.check.parts import toolkit
from fragmeter.gpu.devices import program
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import KernelFault, MissingExtra

#: Shared memory of a multiprocessor, by architecture: A100; RTX 30 and A10; RTX 40 and L40S; H100 and H200; B200; RTX 50. The
#: numbers are those of "Technical Specifications per Compute Capability" in NVIDIA's programming guide.
SHARED_BYTES = {
    "sm_80": 164 * 1024,
    "sm_86": 100 * 1024,
    "sm_89": 100 * 1024,
    "sm_90a": 228 * 1024,
    "sm_100": 228 * 1024,
    "sm_120": 100 * 1024,
}
ARCHITECTURES = tuple(SHARED_BYTES)
_ENTRY = re.compile(
    r"Compiling entry function '(?P<name>\w+)'.*?"
    r"(?P<stores>\d+) bytes spill stores, (?P<loads>\d+) bytes spill loads.*?"
    r"Used (?P<registers>\d+) registers(?P<rest>[^\n]*)",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Compiled:
    """The assembler's report on one instance on one architecture.

    Attributes:
        expression: The instance.
        architecture: NVRTC's name of the architecture.
        registers: Registers per thread.
        spill_bytes: Bytes of spill stores and loads per thread.
        shared_bytes: Static shared memory of a block.
    """

    expression: str
    architecture: str
    registers: int
    spill_bytes: int
    shared_bytes: int


def compiled(kernels: Iterable[Kernel], architecture: str) -> list[Compiled]:
    """Compile to machine code; instances with the same source text are compiled together.

    Raises:
        MissingExtra: CuPy, NVRTC or the CUDA headers are not installed.
        KernelFault: A source does not compile; the text is the compiler's first error.
    """
    by_text = defaultdict(list)
    for kernel in kernels:
        by_text[kernel.text].append(kernel.expression)
    return [found for text, expressions in by_text.items() for found in _compile(text, expressions, architecture)]


def _compile(text: str, expressions: list[str], architecture: str) -> list[Compiled]:
    nvrtc, include = toolkit()
    program = nvrtc.createProgram(text, "kernel.cu", [], [])
    try:
        for expression in expressions:
            nvrtc.addNameExpression(program, expression)
        options = [f"-arch={architecture}", "-std=c++17", f"-I{include}", "--ptxas-options=-v"]
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            lines = [line for line in nvrtc.getProgramLog(program).splitlines() if "error" in line]
            raise KernelFault(f"{architecture}: {(lines or [str(error)])[0]}") from error
        found = entries(nvrtc.getProgramLog(program))
        names = {expression: nvrtc.getLoweredName(program, expression) for expression in expressions}
        return [_compiled(expression, architecture, found[name]) for expression, name in names.items()]
    finally:
        nvrtc.destroyProgram(program)


def entries(report: str) -> dict[str, re.Match[str]]:
    """The assembler's reports (``--ptxas-options=-v``) by the names of kernels in machine code."""
    return {entry["name"]: entry for entry in _ENTRY.finditer(report)}


def _compiled(expression: str, architecture: str, entry: re.Match[str]) -> Compiled:
    shared = re.search(r"(\d+) bytes smem", entry["rest"])
    spills = int(entry["stores"]) + int(entry["loads"])
    return Compiled(expression, architecture, int(entry["registers"]), spills, int(shared[1]) if shared else 0)


def main() -> int:
    """Print the registers of each instance and architecture; returns 1 if an instance spills."""
    return program.run(_report)


def _report() -> bool:
    """Print the report; returns whether no instance spills."""
    rows: dict[str, list[Compiled]] = defaultdict(list)
    for architecture in ARCHITECTURES:
        for found in compiled(every_kernel(SHARED_BYTES[architecture]), architecture):
            rows[found.expression].append(found)
    print(f"{'registers (spilled bytes)':<60}", *(f"{architecture:>12}" for architecture in ARCHITECTURES))
    for expression, row in rows.items():
        print(f"{expression:<60}", *(f"{f'{one.registers} ({one.spill_bytes})':>12}" for one in row))
    spilled = any(one.spill_bytes for row in rows.values() for one in row)
    return _face_is_compiled() and not spilled


def _face_is_compiled() -> bool:
    """Whether nvcc compiles the C++ face without spills; where nvcc or torch is missing, which is printed, there is nothing to fail."""
    try:
        found = entries(cpp_face.registers(ARCHITECTURES[0])).values()
    except MissingExtra as error:
        print(f"C++ face: not compiled; {error}")
        return True
    spilled = sum(int(entry["stores"]) + int(entry["loads"]) for entry in found)
    print(
        f"C++ face by nvcc {cpp_face.nvcc_release()}, {ARCHITECTURES[0]}: {len(found)} kernels, {spilled} bytes spilled"
    )
    return not spilled


if __name__ == "__main__":
    sys.exit(main())
