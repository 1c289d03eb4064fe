"""The correctness grid: every kernel at every supported shape, compared with float64.

``python -m fragmeter.gpu.check.grid --device cuda --json grid.json`` on a GPU. With ``--device shim`` the same source runs
through its CPU build. ``--subset`` varies the parameters in turn, and the whole grid has every combination.

A trial of a kernel at a point of the grid builds the arguments, runs the kernel and compares the result with the expected
one.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from ...sim.types.errors import UserError
from ..devices import devices, program
from ..ops import cache, contiguous, latent_attention, paged_attention, prefill
from ..ops.prepared import Prepared
from ..ops.source import FP8_HEAD_DIMS, FP8_QUERIES, HEAD_DIMS, LATENT_DIM, LATENT_DTYPES, LATENT_KEY_DIM
from . import parts
from .cases import TOLERANCE, Case, Host, OnDevice, case, error, library_of, on_host
from .fp8 import Fp8Case, encoded, fp8_case
from .latent import LatentCase, latent_case

Make = Host | OnDevice


@dataclass(frozen=True)
class Point:
    """One point of the grid.

    Attributes:
        kernel: A key of :data:`KERNELS`.
        dtype: The kernels' name of the dtype.
        heads: Query heads and KV heads.
        head_dim: Head dimension of the caches.
        block_size: Tokens of a block.
        contexts: Tokens of each sequence.
        num_blocks: Blocks of the cache; default: the smallest number that suffices.
    """

    kernel: str
    dtype: str
    heads: tuple[int, int]
    head_dim: int
    block_size: int
    contexts: tuple[int, ...]
    num_blocks: int | None = None

    @property
    def tolerance(self) -> float:
        """The maximum error; kernels that only move values must be exact."""
        computing = (*ATTENTION, *(f"{name}_fp8" for name in ATTENTION), *LATENT)
        return TOLERANCE[self.dtype] if self.kernel in computing else 0.0

    @property
    def exists(self) -> bool:
        """Whether the kernel has an instance for it."""
        if self.kernel not in FP8:
            return True
        writes = self.kernel == "reshape_and_cache_fp8"
        return self.head_dim in FP8_HEAD_DIMS and (writes or self.dtype in FP8_QUERIES)

    @property
    def shape(self) -> tuple[str, tuple[int, int], int, int]:
        """The first arguments of :func:`cases.case`."""
        return self.dtype, self.heads, self.head_dim, self.block_size


def decode(point: Point, make: Make) -> float:
    """One new token per sequence, over scattered blocks."""
    return _attended(paged_attention.prepare, _given(point, make), point, make)


def decoded_latent(point: Point, make: Make) -> float:
    """One new token per sequence, over scattered blocks of latent vectors."""
    block_size, blocks = point.block_size, point.num_blocks
    given = latent_case(point.dtype, point.heads[0], block_size, point.contexts, num_blocks=blocks, make=make)
    return _attended(latent_attention.prepare, given, point, make)


def prefilled(point: Point, make: Make) -> float:
    """At most 64 new tokens per sequence, alternately a whole prompt and the end of a longer context."""
    new = [min(64, -(-context // (1 + 2 * (turn % 2)))) for turn, context in enumerate(point.contexts)]
    given = _given(point, make, query_lens=new)
    starts = make.ints(np.cumsum([0, *new]).astype(np.int32))
    prepare = partial(prefill.prepare, query_start_loc=starts, max_query_len=max(new))
    return _attended(prepare, given, point, make, new)


def contiguously(point: Point, make: Make) -> float:
    """A contiguous cache: one block per sequence, with room behind its tokens."""
    return _attended(_prepare_contiguous, _given(point, make, max(point.contexts) + 5), point, make)


def _prepare_contiguous(
    out: Any, *, key_cache: Any, value_cache: Any, block_tables: Any, block_size: int, **named: Any
) -> Prepared:
    caches = {"key_cache": key_cache, "value_cache": value_cache}
    flat = {name: one.reshape(-1, *one.shape[2:]) for name, one in caches.items()}
    starts = library_of(out).asarray(block_tables[:, 0], dtype=library_of(out).int64) * block_size
    # An empty sequence has no first slot.
    starts[named["context_lens"] == 0] = -1
    return contiguous.prepare(out, **flat, **named, slot_starts=starts)


def _given(point: Point, make: Make, block_size: int | None = None, **more: Any) -> Case | Fp8Case:
    """The arguments of attention at a point; over fp8 with scales of each KV head."""
    shape = (*point.shape[:3], block_size or point.block_size, point.contexts)
    if point.kernel in FP8:
        return fp8_case(*shape, make=make, **more)
    return case(*shape, num_blocks=point.num_blocks, make=make, **more)


def _attended(
    prepare: Callable[..., Prepared],
    given: Case | Fp8Case | LatentCase,
    point: Point,
    make: Make,
    new: list[int] | None = None,
) -> float:
    """The error of attention; ``new`` are the new tokens of each sequence, by default one each."""
    arguments = given.arguments()
    width = LATENT_DIM if point.kernel in LATENT else point.head_dim
    out = make.full((*arguments["query"].shape[:-1], width), np.nan, point.dtype)
    prepare(out, **arguments).launch()
    return error(out, given.expected(new))


def written(point: Point, make: Make) -> float:
    """New keys and values in random slots, some of them padding."""
    tokens, (pool, *row) = sum(point.contexts), _pool(point)
    slots = np.random.default_rng(1).permutation(pool * point.block_size)[:tokens]
    slots[::7] = -1
    new = [make.normal((tokens, *row[1:]), point.dtype) for _ in "kv"]
    caches = [make.normal((pool, *row), point.dtype) for _ in "kv"]
    wanted = [_copied(one) for one in caches]
    for right, rows in zip(wanted, new, strict=True):
        right.reshape(-1, *row[1:])[make.ints(slots[slots >= 0])] = rows[make.ints(np.flatnonzero(slots >= 0))]
    cache.reshape_and_cache(new[0], new[1], caches[0], caches[1], make.ints(slots))
    return _wrong(caches, wanted)


def written_fp8(point: Point, make: Make) -> float:
    """New keys and values as fp8 in random slots, some of them padding."""
    tokens, (pool, *row) = sum(point.contexts), _pool(point)
    rng = np.random.default_rng(1)
    slots = rng.permutation(pool * point.block_size)[:tokens]
    slots[::7] = -1
    new = [make.normal((tokens, *row[1:]), point.dtype) for _ in "kv"]
    scales = rng.uniform(0.002, 0.1, (2, row[1])).astype(np.float32)
    caches = [make.ints(rng.integers(0, 256, (pool, *row), np.uint8)) for _ in "kv"]
    wanted = [on_host(one).copy() for one in caches]
    for right, rows, scale in zip(wanted, new, scales, strict=True):
        numbers = on_host(library_of(rows).asarray(rows, dtype=library_of(rows).float32))
        right.reshape(-1, *row[1:])[slots[slots >= 0]] = encoded(numbers / scale[:, None])[slots >= 0]
    k_scale, v_scale = map(make.ints, scales)
    tensors = (new[0], new[1], caches[0], caches[1], make.ints(slots))
    cache.reshape_and_cache(*tensors, k_scale=k_scale, v_scale=v_scale)
    return _wrong([on_host(one) for one in caches], wanted)


def copied(point: Point, make: Make) -> float:
    """Copy one half of the blocks onto the other half, in two layers at once."""
    shape = _pool(point)
    caches = [make.normal(shape, point.dtype) for _ in "kvkv"]
    pairs = np.random.default_rng(1).permutation(shape[0] // 2 * 2).reshape(-1, 2)
    wanted = [_copied(one) for one in caches]
    for right in wanted:
        right[make.ints(pairs[:, 1])] = right[make.ints(pairs[:, 0])]
    cache.copy_blocks(caches[:2], caches[2:], make.ints(pairs))
    return _wrong(caches, wanted)


def swapped(point: Point, make: Make) -> float:
    """Swap blocks out to the host, some of them adjacent, and back to other places."""
    shape = _pool(point)
    device, host = make.normal(shape, point.dtype), make.on_host(shape, point.dtype)
    out = np.stack([np.arange(shape[0]), np.roll(np.arange(shape[0]), 3)], axis=1)
    back = np.stack([out[:, 1], np.random.default_rng(1).permutation(shape[0])], axis=1)
    wanted = _copied(device)
    wanted[make.ints(back[:, 1])] = _copied(device)
    cache.swap_blocks(device, host, make.host_ints(out))
    cache.swap_blocks(host, device, make.host_ints(back))
    return _wrong([device], [wanted])


def _pool(point: Point) -> tuple[int, int, int, int]:
    """The shape of a cache with room for all tokens and spare blocks."""
    blocks = sum(-(-context // point.block_size) for context in point.contexts)
    return blocks + 4, point.block_size, point.heads[1], point.head_dim


def _copied(array: Any) -> Any:
    return library_of(array).asarray(array, copy=True)


def _wrong(found: list[Any], wanted: list[Any]) -> float:
    """The share of values that differ from the expected ones."""
    pairs = zip(found, wanted, strict=True)
    return max(float((one != right).sum()) / math.prod(one.shape) for one, right in pairs)


Trial = Callable[[Point, Make], float]
#: Trials of the kernels that compute, and of those that only move values.
ATTENTION: dict[str, Trial] = {
    "decode_attention": decode,
    "prefill_attention": prefilled,
    "contiguous_attention": contiguously,
}
MOVING: dict[str, Trial] = {
    "reshape_and_cache": written,
    "copy_blocks": copied,
    "swap_blocks": swapped,
}
#: Those of caches of fp8; not all dtypes and head_dims have one.
FP8: dict[str, Trial] = {
    "decode_attention_fp8": decode,
    "reshape_and_cache_fp8": written_fp8,
    "prefill_attention_fp8": prefilled,
    "contiguous_attention_fp8": contiguously,
}
#: That of latent vectors, which have one size.
LATENT: dict[str, Trial] = {"latent_attention": decoded_latent}
OF_HEAD_DIMS = ATTENTION | MOVING | FP8
KERNELS = OF_HEAD_DIMS | LATENT


SCHEMA_VERSION = 1
#: Number of points after which the file is rewritten.
KEPT_EVERY = 100
#: Query heads and KV heads: GQA of 4 and 8, MHA narrow and wide, MQA, and a group that fills no tile.
HEADS = ((32, 8), (40, 40), (64, 8), (16, 1), (14, 2), (64, 64))
BLOCK_SIZES = (1, 8, 16, 32, 64)
#: Context lengths with none, one token, full blocks of any size, and partly filled blocks.
RAGGED = (64, 70, 0, 1, 33)
LONG = (8192, 1, 4097, 0, 255)
#: Lengths around every power of two from 1 to 8192.
EDGES = tuple(sorted({2**power + near for power in range(14) for near in (-1, 0, 1)} - {8193}))
#: Query heads over latent vectors: those of DeepSeek-V3 on 8, 4 and 1 GPUs, and numbers that fill no tile.
LATENT_HEADS = (16, 32, 128, 5, 40)
LATENT_BLOCK_SIZES = (16, 32, 64, 1)
#: Pools with their last block past 2**31 scalars.
FAR = (
    Point("decode_attention", "float16", (16, 8), 128, 64, (130,), num_blocks=32769),
    Point("latent_attention", "bfloat16", (16, 1), LATENT_KEY_DIM, 64, (130,), num_blocks=58256),
)


def points(subset: bool = False) -> Iterator[Point]:
    """The points of the grid."""
    yield from (point for point in (_turns() if subset else _combinations()) if point.exists)
    for turn, (dtype, heads) in enumerate(itertools.product(LATENT_DTYPES, LATENT_HEADS)):
        for block_size in LATENT_BLOCK_SIZES[turn % 4 : turn % 4 + 1] if subset else LATENT_BLOCK_SIZES:
            yield Point("latent_attention", dtype, (heads, 1), LATENT_KEY_DIM, block_size, RAGGED)
    if not subset:
        for dtype in LATENT_DTYPES:
            yield Point("latent_attention", dtype, (128, 1), LATENT_KEY_DIM, 64, LONG)
        yield Point("latent_attention", "bfloat16", (16, 1), LATENT_KEY_DIM, 16, EDGES)
    yield from FAR


def _turns() -> Iterator[Point]:
    """Decoding with every dtype and head_dim; heads, block sizes and the other kernels alternate."""
    for turn, (dtype, head_dim) in enumerate(itertools.product(TOLERANCE, HEAD_DIMS)):
        for block_size in BLOCK_SIZES[turn % 2 :: 2]:
            yield Point("decode_attention", dtype, HEADS[turn % 5], head_dim, block_size, RAGGED)
        heads = HEADS[turn // 5]
        yield Point(list(MOVING)[turn % 3], dtype, heads, head_dim, BLOCK_SIZES[turn % 5], RAGGED)
        for kernel in ("decode_attention_fp8", "reshape_and_cache_fp8"):
            yield Point(kernel, dtype, HEADS[turn % 5], head_dim, BLOCK_SIZES[turn % 5], RAGGED)
        if turn % 4 == 2:
            yield Point("prefill_attention_fp8", dtype, HEADS[turn % 5], head_dim, BLOCK_SIZES[turn % 5], RAGGED)
            yield Point("contiguous_attention_fp8", dtype, HEADS[turn % 5], head_dim, 16, RAGGED)
        if turn % 8 == 4:
            yield Point("contiguous_attention", dtype, heads, head_dim, 16, RAGGED)
        if turn % 5 == 2:
            yield Point("prefill_attention", dtype, heads, head_dim, BLOCK_SIZES[turn // 5], RAGGED)


def _combinations() -> Iterator[Point]:
    shapes = itertools.product(TOLERANCE, HEADS, HEAD_DIMS, BLOCK_SIZES)
    for dtype, heads, head_dim, block_size in shapes:
        for kernel in OF_HEAD_DIMS:
            # Block sizes do not apply to a contiguous cache.
            if not kernel.startswith("contiguous_attention") or block_size == 16:
                yield Point(kernel, dtype, heads, head_dim, block_size, RAGGED)
    for dtype in TOLERANCE:
        for heads in HEADS:
            yield Point("decode_attention", dtype, heads, 128, 16, LONG)
        for kernel in ("prefill_attention", "contiguous_attention"):
            yield Point(kernel, dtype, (32, 8), 128, 16, LONG)
        yield Point("decode_attention", dtype, (32, 8), 128, 16, EDGES)


@dataclass(frozen=True)
class Outcome:
    """The outcome of a point.

    Attributes:
        point: The point.
        error: Relative L2 of the worst row, or the share of wrong values for kernels that only move values; None if
            the trial gave no number.
        fault: The reason for an error of None.
        seconds: Run time, including the case and its reference.
    """

    point: Point
    error: float | None
    fault: str | None
    seconds: float

    @property
    def passes(self) -> bool:
        return self.error is not None and self.error <= self.point.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The outcome as a JSON-serialisable dict."""
        outcome = {"error": self.error, "tolerance": self.point.tolerance, "passes": self.passes, "fault": self.fault}
        return asdict(self.point) | outcome | {"seconds": round(self.seconds, 4)}


def tried(point: Point, make: Make) -> Outcome:
    """Run the point's kernel; any exception becomes the outcome's fault."""
    begin = perf_counter()
    try:
        error = KERNELS[point.kernel](point, make)
        fault = None if math.isfinite(error) else f"the error is {error}"
    except Exception as raised:
        error, fault = math.nan, f"{type(raised).__name__}: {raised}"
    return Outcome(point, error if fault is None else None, fault, perf_counter() - begin)


def summary(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """One row per kernel and dtype: number of points, number of failures, worst error of the others."""
    grouped = defaultdict(list)
    for outcome in outcomes:
        grouped[outcome.point.kernel, outcome.point.dtype].append(outcome)
    return [
        {
            "kernel": kernel,
            "dtype": dtype,
            "points": len(group),
            "failed": sum(not outcome.passes for outcome in group),
            "worst_error": max((outcome.error for outcome in group if outcome.error is not None), default=None),
            "tolerance": group[0].point.tolerance,
        }
        for (kernel, dtype), group in sorted(grouped.items(), key=lambda item: list(KERNELS).index(item[0][0]))
    ]


def main(tokens: list[str] | None = None) -> int:
    """Entry point of the program."""
    parser = argparse.ArgumentParser(prog="python -m fragmeter.gpu.check.grid", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or shim: the kernels' CPU build (slow)")
    parser.add_argument("--subset", action="store_true", help="heads, block sizes and kernels take turns")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="only this one (may be given again)")
    parser.add_argument("--dtype", choices=TOLERANCE, action="append", help="only this one")
    parser.add_argument(
        "--head-dim", type=int, choices=(*HEAD_DIMS, LATENT_KEY_DIM), action="append", help="only this one"
    )
    parser.add_argument("--json", type=Path, help="file for every point's outcome")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    """Run the requested points and print the summary; returns whether all points pass."""
    target = program.JsonFile(given.json)
    make, device = _place(given.device)
    chosen = [
        point
        for point in points(given.subset)
        if point.kernel in (given.kernel or KERNELS)
        and point.dtype in (given.dtype or TOLERANCE)
        and point.head_dim in (given.head_dim or (*HEAD_DIMS, LATENT_KEY_DIM))
    ]
    if not chosen:
        raise UserError("no point of the grid is all that is asked for: ask for less, or leave --subset out")
    outcomes: list[Outcome] = []
    for point in _watched(chosen):
        outcomes.append(tried(point, make))
        if len(outcomes) % KEPT_EVERY == 0 or len(outcomes) == len(chosen):
            # An interrupted run keeps the points done so far.
            target.write(_document(outcomes, device, given.subset))
    _print_table(summary(outcomes), outcomes)
    return all(outcome.passes for outcome in outcomes)


def _watched(chosen: list[Point]) -> Iterable[Point]:
    """The points, with a progress bar on a terminal."""
    return track(chosen, "points", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _document(outcomes: list[Outcome], device: dict[str, Any], subset: bool) -> dict[str, Any]:
    """The results so far as a document."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "subset": subset,
        "summary": summary(outcomes),
        "points": [outcome.as_dict() for outcome in outcomes],
    }


def _place(name: str) -> tuple[Make, dict[str, Any]]:
    """The array factory of a device, and the device's description."""
    if name == "shim":
        build = parts.cpu_kernels()
        if not build.works:
            raise UserError(f"kernels cannot be built for the CPU: {build.found}; {build.remedy}")
        return Host(), {"device": "shim", "name": build.found}
    device = devices.open(name)
    return OnDevice(device.torch_device), device.describe()


def _print_table(table: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
    print(f"{'kernel':<22}{'dtype':<10}{'points':>7}{'failed':>8}{'worst error':>13}{'allowed':>9}")
    for row in table:
        worst = "none" if row["worst_error"] is None else f"{row['worst_error']:.1e}"
        counts = f"{row['points']:>7}{row['failed']:>8}"
        print(f"{row['kernel']:<22}{row['dtype']:<10}{counts}{worst:>13}{row['tolerance']:>9.0e}")
    for outcome in outcomes:
        if not outcome.passes:
            print(f"FAILED {outcome.point}: {outcome.fault or f'error {outcome.error:.2e}'}")
    print(f"{len(outcomes)} points in {sum(outcome.seconds for outcome in outcomes):.1f} s")


if __name__ == "__main__":
    sys.exit(main())
