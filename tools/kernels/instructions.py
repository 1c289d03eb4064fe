"""Instructions of the main loops of attention, from the machine code that NVRTC compiles, without a GPU.

``python -m tools.kernels.instructions --architecture sm_90a`` prints a row per instance: threads and shared memory of a
block, registers, resident blocks on a multiprocessor, and instructions, shuffles and matrix products of a warp a tile. It needs
NVIDIA's disassembler beside the extra ``kernels``: pip install nvidia-cuda-nvdisasm.

The main loop is the shortest loop that copies keys and multiplies. All of its instructions count, also those of branches that
an ordinary tile does not take. Those of loops within it count once; the last column has the lengths of these loops, which latent
attention of 64 heads has, and decode attention of 16 heads of 112 to 128 dimensions and prefill attention over caches of 16 bits for
their copies.
"""

from __future__ import annotations

import argparse
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from fragmeter.gpu.check.parts import toolkit
from fragmeter.gpu.devices import program
from fragmeter.gpu.ops import prefill, source
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import MissingExtra

from .compile_gate import ARCHITECTURES, SHARED_BYTES, compiled

#: Instances of the report: dtype, head_dim, query heads of a block. In others some lanes copy nothing, or copies are a loop of
#: their own.
INSTANCES = tuple(product(("float16",), (64, 128), (1, 8, 16)))
#: The same of prefill attention: dtype, head_dim, whether the cache is of fp8.
PREFILLS = tuple(product(("float16", "bfloat16"), (64, 128), (False, True)))
#: Copies of a warp, of 16 bytes a lane, that move a KiB.
COPIES_A_KIB = 2
_LABEL = re.compile(r"\s*(?P<name>\.L\w+):")
_INSTRUCTION = re.compile(r"\s*/\*[0-9a-f]{4,}\*/\s+(?P<text>.*?);")
_BRANCH = re.compile(r"\bBRA(\.\w+)*\s.*`\((?P<label>\.L\w+)\)")
#: Registers of a multiprocessor, given out to warps by 256 (compute capability 8.0 to 12.0).
REGISTERS, REGISTER_UNIT = 65536, 256
#: Shared memory that CUDA adds to every block.
SYSTEM_SHARED_BYTES = 1024


@dataclass(frozen=True, slots=True)
class Loop:
    """The main loop of an instance.

    Attributes:
        instructions: Number of its instructions.
        shuffles: Those that move values between lanes.
        copies: Those that copy 16 bytes a lane to shared memory.
        products: Those of the tensor cores.
        inner: Numbers of instructions of the loops within it.
    """

    instructions: int
    shuffles: int
    copies: int
    products: int
    inner: tuple[int, ...] = ()


def main_loop(sass: str) -> Loop:
    """The shortest loop that has copies and products.

    Args:
        sass: One kernel, as ``nvdisasm -c`` prints it.
    """
    labels: dict[str, int] = {}
    code: list[str] = []
    loops: list[range] = []
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label["name"]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction["text"])
            branch = _BRANCH.search(code[-1])
            if branch and branch["label"] in labels:
                loops.append(range(labels[branch["label"]], len(code)))

    def count(loop: range, *operations: str) -> int:
        pattern = re.compile(rf"(@!?U?P\w+ )?\s*({'|'.join(operations)})\b")
        return sum(pattern.match(code[at]) is not None for at in loop)

    main = min((loop for loop in loops if count(loop, "LDGSTS") and count(loop, "HMMA", "FFMA")), key=len)
    inner = tuple(len(loop) for loop in loops if loop != main and loop[0] in main and loop[-1] in main)
    return Loop(len(main), count(main, "SHFL"), count(main, "LDGSTS"), count(main, "HMMA"), inner)


def disassembled(kernel: Kernel, architecture: str) -> str:
    """The machine code of an instance as text.

    Raises:
        MissingExtra: NVRTC, the CUDA headers or the disassembler are not installed.
    """
    nvrtc, include = toolkit()
    made = nvrtc.createProgram(kernel.text, "kernel.cu", [], [])
    try:
        nvrtc.addNameExpression(made, kernel.expression)
        nvrtc.compileProgram(made, [f"-arch={architecture}", "-std=c++17", f"-I{include}"])
        # CuPy cuts the last byte, as it is a zero in PTX.
        binary = nvrtc.getCUBIN(made) + b"\0"
    finally:
        nvrtc.destroyProgram(made)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "kernel.cubin")
        file.write_bytes(binary)
        return subprocess.run([_disassembler(), "-c", file], capture_output=True, text=True, check=True).stdout


def _disassembler() -> str:
    spec = find_spec("nvidia.cu13")
    folders = [str(Path(folder, "bin")) for folder in (spec and spec.submodule_search_locations) or ()]
    found = shutil.which("nvdisasm") or shutil.which("nvdisasm", path=":".join(folders))
    if found is None:
        raise MissingExtra("reading machine code needs NVIDIA's disassembler: pip install nvidia-cuda-nvdisasm")
    return found


def resident_blocks(
    registers: int, shared_bytes: int, architecture: str, threads: int = 32 * source.DECODE_WARPS
) -> int:
    """Blocks of a kernel on a multiprocessor, by registers and shared memory; the threads are by default those of the decode kernel."""
    warp_registers = -(-registers * 32 // REGISTER_UNIT) * REGISTER_UNIT
    by_registers = REGISTERS // (warp_registers * threads // 32)
    return min(by_registers, SHARED_BYTES[architecture] // (shared_bytes + SYSTEM_SHARED_BYTES))


def rows(architecture: str) -> Iterator[str]:
    """Lines of the report."""
    counts = f"{'threads':>9}{'registers':>10}{'shared KiB':>12}{'blocks':>8}{'instructions':>14}{'shuffles':>10}{'a KiB of KV':>13}{'products':>10}"
    yield f"{'instance':<50}{counts}  loops within"
    for (dtype, head_dim, group), fp8, rule in product(INSTANCES, (False, True), source.SLOT_RULES):
        kernel = source.decode_attention(dtype, head_dim, group, rule, fp8=fp8)
        shared_bytes = source.decode_shared_bytes(dtype, head_dim, group, fp8=fp8)
        yield _row(kernel, architecture, shared_bytes, 32 * source.DECODE_WARPS)
    for dtype, head_dim, fp8 in PREFILLS:
        kernel, shared_bytes = (
            source.prefill_attention(dtype, head_dim, fp8=fp8),
            prefill.tile_of(dtype, head_dim).shared_bytes,
        )
        yield _row(kernel, architecture, shared_bytes, prefill.THREADS)
    for block in source.latent_blocks(SHARED_BYTES[architecture]):
        yield _row(source.latent_attention("bfloat16", block), architecture, block.shared_bytes, block.threads)


def _row(kernel: Kernel, architecture: str, shared_bytes: int, threads: int) -> str:
    """A line of the report."""
    (found,) = compiled([kernel], architecture)
    loop = main_loop(disassembled(kernel, architecture))
    blocks = resident_blocks(found.registers, shared_bytes, architecture, threads)
    # Not known where loops within the main loop run several times.
    share = "" if loop.inner else f"{loop.instructions * COPIES_A_KIB / loop.copies:.1f}"
    size = f"{threads:>9}{found.registers:>10}{shared_bytes / 1024:>12.1f}{blocks:>8}"
    counts = f"{loop.instructions:>14}{loop.shuffles:>10}{share:>13}{loop.products:>10}"
    name = kernel.expression.replace(", const float *", "")
    return f"{name:<50}{size}{counts}  {' '.join(map(str, loop.inner))}".rstrip()


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m tools.kernels.instructions", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--architecture", default="sm_90a", choices=ARCHITECTURES)
    given = parser.parse_args(tokens)

    def report() -> bool:
        for line in rows(given.architecture):
            print(line, flush=True)
        return True

    return program.run(report)


if __name__ == "__main__":
    sys.exit(main())
