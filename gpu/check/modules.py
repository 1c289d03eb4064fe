"""Compile and load every kernel instance on this machine's GPU.

``python -m fragmeter.gpu.check.modules --device cuda --json modules.json``. Several processes compile in parallel into
CuPy's disk cache. One process then loads all instances and reads the driver's attributes of each.
"""

from __future__ import annotations

import argparse
import itertools
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from time import perf_counter
from typing import Any

from ..devices import program
from ..ops import source
from ..ops.cuda_kernels import CudaKernels
from ..ops.source import Kernel

SCHEMA_VERSION = 1
#: Maximum number of compiling processes; each has a context on the GPU.
MOST_WORKERS = 16
#: Function attributes that are recorded: CuPy's name to ours.
ATTRIBUTES = {
    "registers": "num_regs",
    "local_bytes": "local_size_bytes",
    "shared_bytes": "shared_size_bytes",
    "most_threads": "max_threads_per_block",
}


def every_kernel(shared_bytes: int) -> Iterator[Kernel]:
    """All instances that the modules of this package can launch on a device with ``shared_bytes`` on a multiprocessor."""
    for dtype in source.SCALARS:
        for head_dim in source.HEAD_DIMS:
            for tile, slots in itertools.product(source.GROUP_TILES[dtype], source.SLOT_RULES):
                yield source.decode_attention(dtype, head_dim, tile, slots)
            yield source.prefill_attention(dtype, head_dim)
            yield source.merge_prefill(dtype, head_dim)
        yield source.reshape_and_cache_fp8(dtype)
    for dtype, head_dim in itertools.product(source.FP8_QUERIES, source.FP8_HEAD_DIMS):
        for tile, slots in itertools.product(source.GROUP_TILES[dtype], source.SLOT_RULES):
            yield source.decode_attention(dtype, head_dim, tile, slots, fp8=True)
        yield source.prefill_attention(dtype, head_dim, fp8=True)
    for dtype in source.LATENT_DTYPES:
        for block in source.latent_blocks(shared_bytes):
            yield source.latent_attention(dtype, block)
        yield source.merge_latent(dtype)
    for name in ("reshape_and_cache", "copy_blocks"):
        yield source.plain(name)


def compile_share(device: int, first: int, step: int) -> None:
    """Compile every ``step``-th kernel into CuPy's cache; a failing kernel fails again when it is loaded."""
    kernels = CudaKernels(device)
    every = every_kernel(kernels.multiprocessor_shared_bytes)
    for _ in loaded(itertools.islice(every, first, None, step), kernels.load):
        pass


def loaded(kernels: Iterable[Kernel], load: Callable[[Kernel], Any]) -> Iterable[dict[str, Any]]:
    """One row per kernel: the attributes of its function, or the error; the local memory of a thread is its spill."""
    for kernel in kernels:
        try:
            found = load(kernel).attributes
        except Exception as error:
            lines = str(error).strip().splitlines() or [""]
            yield {"kernel": kernel.expression, "error": f"{type(error).__name__}: {lines[0]}"}
        else:
            yield {"kernel": kernel.expression, "error": None} | {
                name: found[attribute] for name, attribute in ATTRIBUTES.items()
            }


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(
        prog="python -m fragmeter.gpu.check.modules", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ...")
    parser.add_argument("--json", type=Path, help="file for a row for each instance")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    target = program.JsonFile(given.json)
    device = program.gpu(given.device)
    number, workers = device.torch_device.index, min(MOST_WORKERS, os.cpu_count() or 1)
    begin = perf_counter()
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
        list(pool.map(compile_share, *zip(*((number, first, workers) for first in range(workers)), strict=True)))
    compiled = perf_counter()
    kernels = CudaKernels(number)
    rows = list(loaded(every_kernel(kernels.multiprocessor_shared_bytes), kernels.load))
    seconds = {"compile_s": round(compiled - begin, 2), "load_s": round(perf_counter() - compiled, 2)}
    target.write({"schema_version": SCHEMA_VERSION, "device": device.describe(), **seconds, "kernels": rows})
    failed = [row for row in rows if row["error"]]
    for row in failed:
        print(f"FAILED {row['kernel']}: {row['error']}")
    spilling = sum(row["local_bytes"] > 0 for row in rows if not row["error"])
    counts = f"{len(rows)} kernels, {len(failed)} failed, {spilling} with local memory"
    print(f"{counts}; {seconds['compile_s']} s to compile")
    return not failed


if __name__ == "__main__":
    sys.exit(main())
