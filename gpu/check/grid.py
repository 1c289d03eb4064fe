"""The correctness grid: every kernel at every shape it is asked for, against float64.

``python -m fragmeter.gpu.check.grid --device cuda --json grid.json`` on a GPU. With ``--device shim`` the same source runs
through its CPU build; ``--subset`` takes turns where the whole grid has every combination.
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.progress import track

from ...sim.types.errors import UserError
from ..devices import devices, program
from ..ops.source import HEAD_DIMS
from . import parts
from .cases import TOLERANCE, Host, OnDevice
from .grid_kernels import KERNELS, MOVING, Make, Point

SCHEMA_VERSION = 1
#: Points after which the file is written anew.
KEPT_EVERY = 100
#: Query heads and KV heads: GQA of 4 and 8, MHA narrow and wide, MQA, and a group that fills no tile.
HEADS = ((32, 8), (40, 40), (64, 8), (16, 1), (14, 2), (64, 64))
BLOCK_SIZES = (1, 8, 16, 32, 64)
#: None, one token, a full block of any size, ends within one.
RAGGED = (64, 70, 0, 1, 33)
LONG = (8192, 1, 4097, 0, 255)
#: Around every power of two from 1 to 8192.
EDGES = tuple(sorted({2**power + near for power in range(14) for near in (-1, 0, 1)} - {8193}))
#: A pool with its last block past 2**31 scalars.
FAR = Point("decode_attention", "float16", (16, 8), 128, 64, (130,), num_blocks=32769)


def points(subset: bool = False) -> Iterator[Point]:
    """The points of the grid."""
    yield from _turns() if subset else _combinations()
    yield FAR


def _turns() -> Iterator[Point]:
    """Decoding of every dtype and head_dim; heads, block sizes and the other kernels take turns."""
    for turn, (dtype, head_dim) in enumerate(itertools.product(TOLERANCE, HEAD_DIMS)):
        for block_size in BLOCK_SIZES[turn % 2 :: 2]:
            yield Point("decode_attention", dtype, HEADS[turn % 5], head_dim, block_size, RAGGED)
        heads = HEADS[turn // 5]
        yield Point(list(MOVING)[turn % 3], dtype, heads, head_dim, BLOCK_SIZES[turn % 5], RAGGED)
        if turn % 8 == 4:
            yield Point("contiguous_attention", dtype, heads, head_dim, 16, RAGGED)
        if turn % 5 == 2:
            yield Point("prefill_attention", dtype, heads, head_dim, BLOCK_SIZES[turn // 5], RAGGED)


def _combinations() -> Iterator[Point]:
    shapes = itertools.product(TOLERANCE, HEADS, HEAD_DIMS, BLOCK_SIZES)
    for dtype, heads, head_dim, block_size in shapes:
        for kernel in KERNELS:
            # A contiguous cache has no blocks.
            if kernel != "contiguous_attention" or block_size == 16:
                yield Point(kernel, dtype, heads, head_dim, block_size, RAGGED)
    for dtype in TOLERANCE:
        for heads in HEADS:
            yield Point("decode_attention", dtype, heads, 128, 16, LONG)
        for kernel in ("prefill_attention", "contiguous_attention"):
            yield Point(kernel, dtype, (32, 8), 128, 16, LONG)
        yield Point("decode_attention", dtype, (32, 8), 128, 16, EDGES)


@dataclass(frozen=True)
class Outcome:
    """What came of a point.

    Attributes:
        point: Which.
        error: Relative L2 of the worst row (the share of wrong values where values are only moved); None where there
            is no such number.
        fault: Why there is none.
        seconds: What it took, making the case and its reference included.
    """

    point: Point
    error: float | None
    fault: str | None
    seconds: float

    @property
    def passes(self) -> bool:
        return self.error is not None and self.error <= self.point.tolerance

    def as_dict(self) -> dict[str, Any]:
        """As data."""
        outcome = {"error": self.error, "tolerance": self.point.tolerance, "passes": self.passes, "fault": self.fault}
        return asdict(self.point) | outcome | {"seconds": round(self.seconds, 4)}


def tried(point: Point, make: Make) -> Outcome:
    """Run the point's kernel; whatever it raises is the outcome."""
    begin = perf_counter()
    try:
        error = KERNELS[point.kernel](point, make)
        fault = None if math.isfinite(error) else f"the error is {error}"
    except Exception as raised:
        error, fault = math.nan, f"{type(raised).__name__}: {raised}"
    return Outcome(point, error if fault is None else None, fault, perf_counter() - begin)


def summary(outcomes: Iterable[Outcome]) -> list[dict[str, Any]]:
    """A row for each kernel and dtype: how many points, how many fail, the worst error of the others."""
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
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m fragmeter.gpu.check.grid", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or shim: the kernels' CPU build (slow)")
    parser.add_argument("--subset", action="store_true", help="heads, block sizes and kernels take turns")
    parser.add_argument("--kernel", choices=KERNELS, action="append", help="only this one (may be given again)")
    parser.add_argument("--dtype", choices=TOLERANCE, action="append", help="only this one")
    parser.add_argument("--head-dim", type=int, choices=HEAD_DIMS, action="append", help="only this one")
    parser.add_argument("--json", type=Path, help="file for every point's outcome")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    """Run what is asked for and say what came of it; whether all is well."""
    target = program.JsonFile(given.json)
    make, device = _place(given.device)
    asked = [
        point
        for point in points(given.subset)
        if point.kernel in (given.kernel or KERNELS)
        and point.dtype in (given.dtype or TOLERANCE)
        and point.head_dim in (given.head_dim or HEAD_DIMS)
    ]
    if not asked:
        raise UserError("no point of the grid is all that is asked for: ask for less, or leave --subset out")
    outcomes: list[Outcome] = []
    for point in _watched(asked):
        outcomes.append(tried(point, make))
        if len(outcomes) % KEPT_EVERY == 0 or len(outcomes) == len(asked):
            # An interrupted run keeps the points done so far.
            target.write(_document(outcomes, device, given.subset))
    _tell(summary(outcomes), outcomes)
    return all(outcome.passes for outcome in outcomes)


def _watched(asked: list[Point]) -> Iterable[Point]:
    """The points, with a bar where a terminal shows it."""
    return track(asked, "points", console=Console(stderr=True), transient=True, disable=not sys.stderr.isatty())


def _document(outcomes: list[Outcome], device: dict[str, Any], subset: bool) -> dict[str, Any]:
    """All that is known so far."""
    return {
        "schema_version": SCHEMA_VERSION,
        "device": device,
        "subset": subset,
        "summary": summary(outcomes),
        "points": [outcome.as_dict() for outcome in outcomes],
    }


def _place(name: str) -> tuple[Make, dict[str, Any]]:
    """What makes the arrays of a device, and what the device is."""
    if name == "shim":
        build = parts.cpu_kernels()
        if not build.works:
            raise UserError(f"kernels cannot be built for the CPU: {build.found}; {build.remedy}")
        return Host(), {"device": "shim", "name": build.found}
    device = devices.open(name)
    return OnDevice(device.torch_device), device.describe()


def _tell(table: list[dict[str, Any]], outcomes: list[Outcome]) -> None:
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
