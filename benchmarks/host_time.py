"""Host time of the kernel calls of a mixed step: our own Python up to CUDA's driver, on this CPU.

CuPy and the driver are stand-ins that return at once, and CPU tensors of torch take the way of a GPU's. So the figures have checks,
choice of the split, buffers, packing and the launch's own Python; they lack the driver, CuPy's compiled part and torch's. The
time is the CPU time of the thread, the lower quartile of 15 samples.

``python benchmarks/host_time.py`` prints a table; it takes a few seconds.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import torch

from fragmeter.gpu.devices import devices
from fragmeter.gpu.model.batch import Batch, Stager
from fragmeter.gpu.model.calls import StepCalls
from fragmeter.gpu.ops import cache, launching, paged_attention, prefill
from fragmeter.gpu.ops.cuda_kernels import CudaKernels
from fragmeter.gpu.ops.prepared import Call, Operation

SAMPLES, SAMPLE_MS = 15, 20.0
LAYERS, HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 32, 8, 128, 16
#: Sequences that decode, their tokens, and a prompt beside them.
DECODES, CONTEXT, PROMPT = 64, 2000, 512
#: An H100: multiprocessors, and blocks that each holds.
ATTRIBUTES, RESIDENT = {"MultiProcessorCount": 132, "MaxSharedMemoryPerMultiprocessor": 228 * 1024}, 3


class _Device(nullcontext):
    """CuPy's device."""

    attributes = ATTRIBUTES

    def __init__(self, number: int) -> None:
        super().__init__()


def stand_in() -> None:
    """Put modules that return at once in the place of CuPy and of torch's streams."""

    def module(**compiled: object) -> SimpleNamespace:
        return SimpleNamespace(get_function=lambda name: SimpleNamespace(kernel=SimpleNamespace(ptr=1)))

    driver = SimpleNamespace(
        launchKernel=lambda *arguments: None, occupancyMaxActiveBlocksPerMultiprocessor=lambda *arguments: RESIDENT
    )
    runtime, stream = SimpleNamespace(setDevice=lambda number: None), SimpleNamespace(cuda_stream=1)
    cuda = SimpleNamespace(Device=_Device, driver=driver, runtime=runtime)
    sys.modules["cupy"] = SimpleNamespace(RawModule=module, cuda=cuda)  # type: ignore[assignment]
    torch.cuda.current_stream = lambda device=None: stream
    kernels = CudaKernels(0)
    launching.CpuKernels = lambda: kernels  # type: ignore[misc, assignment]


def us(work: Callable[[], object]) -> float:
    """Microseconds of a call."""

    def sample(calls: int) -> float:
        start = time.thread_time_ns()
        for _ in range(calls):
            work()
        return (time.thread_time_ns() - start) / 1e3 / calls

    calls = max(1, round(SAMPLE_MS * 1e3 / sample(20)))
    return float(np.quantile([sample(calls) for _ in range(SAMPLES)], 0.25))


class Step:
    """The tensors of a step that decodes and prefills, with one layer's caches for all layers."""

    def __init__(self) -> None:
        lens, contexts = [1] * DECODES + [PROMPT], [CONTEXT] * DECODES + [PROMPT]
        blocks = -(-CONTEXT // BLOCK_SIZE)
        tables = np.arange(len(lens) * blocks).reshape(-1, blocks)
        batch = Batch.paged(lens, contexts, [0] * sum(lens), tables, BLOCK_SIZE)
        self.device = devices.open("shim")
        self.inputs = Stager(1, BLOCK_SIZE, tables.size * BLOCK_SIZE).inputs(batch, torch.from_numpy)
        self.query = torch.zeros(sum(lens), HEADS, HEAD_DIM, dtype=torch.float16)
        self.new = [torch.zeros(sum(lens), KV_HEADS, HEAD_DIM, dtype=torch.float16) for _ in "kv"]
        shape = (tables.size, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
        self.caches = [torch.zeros(shape, dtype=torch.float16) for _ in "kv"]
        self.out = torch.empty_like(self.query)

    def arguments(self) -> dict[Operation, tuple]:
        """The arguments of each operation: four tensors of a layer, and the rest."""
        decodes, prefills = self.inputs.decodes, self.inputs.prefills
        assert decodes and prefills
        first, second = (
            [self.out[rows.tokens], self.query[rows.tokens], *self.caches, rows.block_tables]
            for rows in (decodes, prefills)
        )
        starts = (prefills.query_start_loc, prefills.context_lens)
        return {
            "decode_attention": (*first, decodes.context_lens, BLOCK_SIZE, CONTEXT),
            "prefill_attention": (*second, *starts, BLOCK_SIZE, PROMPT, PROMPT),
            "reshape_and_cache": (*self.new, *self.caches, self.inputs.slot_mapping),
        }

    def every_call_alone(self) -> None:
        """All layers by the functions that check and launch one call."""
        for _ in range(LAYERS):
            arguments = self.arguments()
            cache.reshape_and_cache(*arguments["reshape_and_cache"])
            paged_attention.paged_attention_cuda_forward(*arguments["decode_attention"])
            prefill.prepare(*arguments["prefill_attention"]).launch()

    def prepared(self) -> None:
        """All layers as a skeleton's step launches them."""
        calls = StepCalls(self.device, self.inputs)
        for _ in range(LAYERS):
            calls.write(*self.new, *self.caches)
            calls.attend(self.out, self.query, *self.caches)


@torch.inference_mode()
def main() -> None:
    """Print the table."""
    stand_in()
    step = Step()
    print(f"{'us of host time':<20}{'single call':>14}{'preparation':>14}{'launch':>10}")
    for operation, arguments in step.arguments().items():
        device, asked = step.device, Call(operation, arguments[:4], arguments[4:])
        call, single = device.prepared(asked), us(lambda: device.run(asked))  # noqa: B023
        once = us(lambda: device.prepared(asked))  # noqa: B023
        print(f"{operation:<20}{single:>14.1f}{once:>14.1f}{us(lambda: call(*arguments[:4])):>10.1f}")  # noqa: B023
    alone, prepared = us(step.every_call_alone) / 1e3, us(step.prepared) / 1e3
    print(f"\nmixed step of {LAYERS} layers: {alone:.2f} ms with single calls, {prepared:.2f} ms prepared")


if __name__ == "__main__":
    main()
