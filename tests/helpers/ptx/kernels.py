"""Launches kernels through their PTX: NVRTC compiles the source for an architecture, and the machine runs the result."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from fragmeter.gpu.ops.arguments import Argument, Extent
from fragmeter.gpu.ops.arrays import Array
from fragmeter.gpu.ops.cpu_kernels import CpuKernels
from fragmeter.gpu.ops.source import Kernel
from fragmeter.sim.types.errors import KernelFault
from tools.kernels import compile_gate

from .machine import Machine
from .memory import Fault, Global
from .text import Program, parsed


class PtxKernels:
    """:class:`launching.Kernels` by the PTX.

    Args:
        architecture: One of :data:`compile_gate.ARCHITECTURES`.
        apart: Run one warp after another, each until it waits for the others, in place of all warps together.
        last_first: Run the blocks from the last one to the first.

    Attributes:
        divided: Opcodes of whole warps that a warp executed in parts, one part waiting for another.
    """

    def __init__(self, architecture: str, apart: bool = False, last_first: bool = False) -> None:
        self._architecture, self._apart, self._last_first = architecture, apart, last_first
        self.multiprocessor_shared_bytes = compile_gate.SHARED_BYTES[architecture]
        self.divided: set[str] = set()
        self.places = CpuKernels(0, self.multiprocessor_shared_bytes).places

    def prepared(
        self,
        kernel: Kernel,
        grid: Extent,
        block: Extent,
        arguments: Sequence[Argument],
        changing: Sequence[int] = (),
        touched: Sequence[Array] = (),
        shared_bytes: int = 0,
    ):
        """A launch that runs the grid to completion, with the arguments that it was prepared with."""
        arrays = Global([one for one in (*arguments, *touched) if isinstance(one, Array)])
        bits = [_bits(argument) for argument in arguments]

        def launch(pointers: Sequence[int] = ()) -> None:
            assert not pointers
            try:
                program = compiled(kernel, self._architecture)
                order = self._apart, self._last_first
                machine = Machine(program, bits, arrays, grid, block, shared_bytes, *order)
                machine.run()
            except Fault as fault:
                raise KernelFault(f"{kernel.expression}: {fault}") from fault
            self.divided |= {program.instructions[number].opcode for number in machine.divided}

        return launch


def _bits(argument: Argument) -> np.ndarray:
    if isinstance(argument, Array):
        return np.array(argument.pointer, np.uint64)
    return np.array(argument).view(f"u{argument.itemsize}")


def machine_of(program: Program) -> Machine:
    """The machine with a kernel and arguments that it cannot run with, to decode all of its instructions.

    Raises:
        Fault: An instruction is not known.
    """
    wide = [np.zeros((), np.uint64 if kind.endswith("64") else np.uint32) for kind in program.parameter_types.values()]
    return Machine(program, wide, Global([]), (0, 0, 0), (32, 1, 1), 0, False)


@functools.lru_cache(64)
def compiled(kernel: Kernel, architecture: str) -> Program:
    """The kernel's PTX, parsed."""
    nvrtc, include = compile_gate.toolkit()
    program = nvrtc.createProgram(kernel.text, "kernel.cu", [], [])
    try:
        nvrtc.addNameExpression(program, kernel.expression)
        virtual = architecture.replace("sm_", "compute_")
        nvrtc.compileProgram(program, [f"-arch={virtual}", "-std=c++17", f"-I{include}"])
        return parsed(nvrtc.getPTX(program).decode(), nvrtc.getLoweredName(program, kernel.expression))
    finally:
        nvrtc.destroyProgram(program)
