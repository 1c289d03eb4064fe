"""How fast decode attention is: time, and share of the device's bandwidth, beside torch and FlashInfer.

``python -m fragmeter.gpu.bench --device cuda --json bench.json``. With ``--device cpu`` a few small shapes go the
same way through torch. Shapes that do not fit into memory are left out, and named.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from . import devices, program, timing
from .bench_shapes import Caches, Shape, lacking
from .bench_table import HEADINGS, line, shares
from .bench_ways import PASSES, SAME, WAYS, Unable, Way, disagreement, ours
from .ceiling import data_sheet, device_copy
from .devices import Device

SCHEMA_VERSION = 1
#: Of another library's result: fp16 rounds twice.
MOST_DISAGREEMENT = 5e-3


@dataclass(frozen=True)
class Plan:
    """What is measured on a kind of device.

    Attributes:
        batches, contexts: Sequences, and tokens that each of them holds.
        heads: Query heads and KV heads.
        head_dim: Of all of them.
        dtype: torch's, of queries and caches.
        rounds: Samples of each time.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dim: int
    dtype: torch.dtype
    rounds: int

    def shapes(self) -> Iterator[Shape]:
        """Every combination."""
        for heads, batch, context in itertools.product(self.heads, self.batches, self.contexts):
            yield Shape(batch, context, *heads, self.head_dim, self.dtype)


PLANS = {
    "cuda": Plan((1, 8, 32, 128, 256), (512, 4096, 16384), ((32, 8), (40, 40), (64, 8)), 128, torch.float16, 9),
    "cpu": Plan((1, 4), (64, 256), ((8, 2), (4, 4)), 64, torch.float32, 5),
}


def bench(
    device: Device, shapes: Iterable[Shape], rounds: int, ways: Sequence[str] = tuple(WAYS)
) -> Iterator[dict[str, Any]]:
    """A row for each shape: what each of the ways takes, or why the shape is left out."""
    stopwatch = timing.stopwatch(device)
    for shape in shapes:
        reason = lacking(shape, device, stopwatch.cold_bytes)
        yield shape.as_dict() | ({"left_out": reason} if reason else _row(shape, device, stopwatch, rounds, ways))
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


def _row(
    shape: Shape, device: Device, stopwatch: timing.Stopwatch, rounds: int, ways: Sequence[str]
) -> dict[str, Any]:
    caches = Caches(shape, device, stopwatch.cold_bytes)
    return {name: _timed(name, WAYS[name], caches, device, stopwatch, rounds) for name in ways}


def _timed(
    name: str, way: Way, caches: Caches, device: Device, stopwatch: timing.Stopwatch, rounds: int
) -> dict[str, Any]:
    """Microseconds, and bytes of keys and values a second; or why there are none."""
    try:
        work = way(device, caches)
        if name in SAME:
            found = disagreement(work, ours(device, caches))
            if not found <= MOST_DISAGREEMENT:
                raise Unable(f"its result is another (relative L2 {found:.1e})")
        sampler = stopwatch.sampler(work)
        taken = timing.timing([sampler() for _ in range(rounds)], stopwatch.quantile)
    except Exception as error:  # other libraries raise what they like, and the rest is still to be measured
        return {"us": None, "why": " ".join(str(error).split())[:200]}
    return {"us": taken.us, "iqr_us": taken.iqr_us, "bytes_per_s": caches.shape.kv_bytes / taken.us * 1e6}


def main(tokens: list[str] | None = None) -> int:
    """The program."""
    parser = argparse.ArgumentParser(prog="python -m fragmeter.gpu.bench", description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", help="cuda, cuda:1, ..., or cpu: a few small shapes")
    parser.add_argument("--json", type=Path, help="file for every row")
    given = parser.parse_args(tokens)
    return program.run(lambda: _report(given))


def _report(given: argparse.Namespace) -> bool:
    """Measure, row by row; the file has all that is known so far. Whether our own way worked everywhere."""
    target = program.JsonFile(given.json)
    device = devices.open_timed(given.device)
    plan, described = PLANS[device.torch_device.type], device.describe()
    sheet, copy = data_sheet(described), device_copy(device)
    peaks = {"data_sheet": sheet and sheet.memory_bytes_per_s, "copy": copy.bytes_per_s}
    rows = [shape.as_dict() for shape in plan.shapes()]
    document = {"schema_version": SCHEMA_VERSION, "device": described, "bytes_per_s": peaks, "rows": rows}
    print(f"measured copy {copy.bytes_per_s / 1e9:.0f} GB/s" + (f", data sheet {sheet.name}" if sheet else ""))
    for ways in PASSES:
        if ways == ("flashinfer",) and find_spec("flashinfer") is None:
            continue
        print(HEADINGS)
        with torch.inference_mode():
            for row, found in zip(rows, bench(device, plan.shapes(), plan.rounds, ways), strict=True):
                row |= found
                row |= shares(row, peaks)
                target.write(document)
                print(line(row), flush=True)
    return all(row["fragmeter"]["us"] for row in rows if "left_out" not in row)


if __name__ == "__main__":
    sys.exit(main())
