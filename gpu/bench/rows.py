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
    """The benchmark's shapes on one kind of device: those to report first, then latent attention, caches of fp8, then a grid.

    Attributes:
        first: Sequences and tokens of each, with the first of ``heads``.
        batches, contexts: Numbers of sequences, and tokens of each sequence.
        heads: Query heads and KV heads.
        head_dim: Head dimension of all shapes.
        dtype: torch dtype of queries and caches.
        rounds: Samples of each time.
        latent: Sequences, tokens, query heads, dimensions of a key, and the first of them that are the value, too.
        fp8: Sequences and tokens of each, with the first of ``heads``, over caches of fp8.
    """

    first: tuple[tuple[int, int], ...]
    batches: tuple[int, ...]
    contexts: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dim: int
    dtype: torch.dtype
    rounds: int
    latent: tuple[tuple[int, int, int, int, int], ...] = ()
    fp8: tuple[tuple[int, int], ...] = ()

    def shapes(self) -> Iterator[Shape]:
        """Every shape once."""
        first = [(self.heads[0], *sizes) for sizes in self.first]
        grid = itertools.product(self.heads, self.batches, self.contexts)
        for heads, batch, context in first:
            yield Shape(batch, context, *heads, self.head_dim, self.dtype)
        for batch, context, heads_of_latent, head_dim, latent_dim in self.latent:
            yield Shape(batch, context, heads_of_latent, 1, head_dim, self.dtype, latent_dim)
        for batch, context in self.fp8:
            yield Shape(batch, context, *self.heads[0], self.head_dim, self.dtype, fp8=True)
        for heads, batch, context in grid:
            if (heads, batch, context) not in first:
                yield Shape(batch, context, *heads, self.head_dim, self.dtype)


PLANS = {
    "cuda": Plan(
        ((1, 1024), (8, 4096), (32, 4096), (128, 4096)),
        (1, 8, 32, 128, 256),
        (512, 4096, 16384),
        ((32, 8), (40, 40), (64, 8)),
        128,
        torch.float16,
        9,
        # DeepSeek-V3 on 8 GPUs and on one: 16 and 128 heads over a latent vector of 512 dimensions and 64 rotary ones.
        ((128, 4096, 16, 576, 512), (128, 4096, 128, 576, 512)),
        ((8, 4096), (32, 4096), (128, 4096)),
    ),
    "cpu": Plan(((1, 64),), (1, 4), (64, 256), ((8, 2), (4, 4)), 64, torch.float32, 5, ((2, 64, 8, 96, 64),)),
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
    try:
        caches = Caches(shape, device, stopwatch.cold_bytes)
    except RuntimeError as error:  # torch's, where fragmented memory has less room than it says
        return {"left_out": _one_line(error)}
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
        return {"us": None, "why": _one_line(error), "exists": not isinstance(error, Unable)}
    return {"us": taken.us, "iqr_us": taken.iqr_us, "bytes_per_s": caches.shape.kv_bytes / taken.us * 1e6}


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]
