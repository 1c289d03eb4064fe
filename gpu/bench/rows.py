"""The benchmark of decode attention: one row per shape, with the time of each implementation."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ..devices import timing
from ..devices.devices import Device
from .shapes import Caches, Shape, lacking
from .ways import SAME, WAYS, Unable, Way, disagreement, ours

#: Maximum relative L2 error against another library's result; fp16 rounds twice.
MOST_DISAGREEMENT = 5e-3


@dataclass(frozen=True)
class Plan:
    """The benchmark's shapes on one kind of device.

    Attributes:
        batches, contexts: Numbers of sequences, and tokens of each sequence.
        heads: Query heads and KV heads.
        head_dim: Head dimension of all shapes.
        dtype: torch dtype of queries and caches.
        rounds: Samples of each time.
    """

    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dim: int
    dtype: torch.dtype
    rounds: int

    def shapes(self) -> Iterator[Shape]:
        """Every combination of batch, context and heads."""
        for heads, batch, context in itertools.product(self.heads, self.batches, self.contexts):
            yield Shape(batch, context, *heads, self.head_dim, self.dtype)


PLANS = {
    "cuda": Plan((1, 8, 32, 128, 256), (512, 4096, 16384), ((32, 8), (40, 40), (64, 8)), 128, torch.float16, 9),
    "cpu": Plan((1, 4), (64, 256), ((8, 2), (4, 4)), 64, torch.float32, 5),
}


def bench(
    device: Device, shapes: Iterable[Shape], rounds: int, ways: Sequence[str] = tuple(WAYS)
) -> Iterator[dict[str, Any]]:
    """One row per shape: the times of the implementations, or the reason why the shape is left out."""
    stopwatch = timing.stopwatch(device)
    for shape in shapes:
        reason = lacking(shape, device, stopwatch.cold_bytes)
        yield shape.as_dict() | ({"left_out": reason} if reason else _row(shape, device, stopwatch, rounds, ways))
        if device.torch_device.type == "cuda":
            torch.cuda.empty_cache()


@torch.inference_mode()
def _row(shape: Shape, device: Device, stopwatch: timing.Stopwatch, rounds: int, ways: Sequence[str]) -> dict[str, Any]:
    caches = Caches(shape, device, stopwatch.cold_bytes)
    return {name: _timed(name, WAYS[name], caches, device, stopwatch, rounds) for name in ways}


def _timed(
    name: str, way: Way, caches: Caches, device: Device, stopwatch: timing.Stopwatch, rounds: int
) -> dict[str, Any]:
    """Microseconds, and bytes/s of keys and values; or the reason why the implementation failed."""
    try:
        work = way(device, caches)
        if name in SAME:
            found = disagreement(work, ours(device, caches))
            if not found <= MOST_DISAGREEMENT:
                raise Unable(f"its result is another (relative L2 {found:.1e})")
        sampler = stopwatch.sampler(work)
        taken = timing.timing([sampler() for _ in range(rounds)], stopwatch.quantile)
    except Exception as error:  # other libraries raise any exception, and the remaining rows still have to be measured
        return {"us": None, "why": " ".join(str(error).split())[:200]}
    return {"us": taken.us, "iqr_us": taken.iqr_us, "bytes_per_s": caches.shape.kv_bytes / taken.us * 1e6}
