"""Compares captured decodes with eager ones.

A replay reads the values that its buffers contain at that time. The checks therefore replay a graph with other
queries, blocks and lengths than it was captured with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch

from ...sim.spec import model
from ..devices.devices import Device
from ..model import graphs as skeleton_graphs
from ..model.batch import Batch
from ..model.skeleton import Skeleton
from ..ops.prepared import Call
from .cases import Case, OnDevice, case, error

MODEL, DTYPE, BLOCKS, BLOCK_SIZE = "toy-llama", "fp16", 64, 16
#: Tolerance of logits: the GEMMs of a padded batch may round differently.
STEP_TOLERANCE = {"fp16": 1e-2, "fp32": 1e-4}
#: Prompt lengths of the skeleton's sequences, and number of decode steps after them.
PROMPTS, STEPS = (70, 3, 33, 16, 1), 4


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison of a captured call with an eager one.

    Attributes:
        name: The captured call.
        error: Relative L2 of the worst row.
        tolerance: 0 for the same kernel over the same values; a padded batch may round differently.
    """

    name: str
    error: float
    tolerance: float

    @property
    def passes(self) -> bool:
        return self.error <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """The check as a JSON-serialisable dict; a NaN error becomes null."""
        error = self.error if np.isfinite(self.error) else None
        return asdict(self) | {"error": error, "passes": self.passes}


def kernel(device: Device, dtype: str = "float16") -> Check:
    """Decode attention of one case, replayed on another case."""
    contexts = (1030, 1, 0, 517, 64)
    first, other = (
        case(dtype, (32, 8), 128, BLOCK_SIZE, lens, make=OnDevice(device.torch_device, seed), seed=seed)
        for seed, lens in enumerate((contexts, contexts[::-1]))
    )
    out, wanted = torch.full_like(first.query, torch.nan), torch.full_like(first.query, torch.nan)

    def attend() -> torch.Tensor:
        device.run(_call(out, first))
        return out

    replay, captured = skeleton_graphs.capture(attend)
    for name, held in vars(first).items():
        if isinstance(held, torch.Tensor):
            held.copy_(getattr(other, name))
    replay()
    device.run(_call(wanted, other))
    return Check("decode_attention", error(captured, wanted.double()), 0.0)


def _call(out: torch.Tensor, given: Case) -> Call:
    step = (given.block_tables, given.context_lens, given.block_size, given.max_context_len)
    return Call("decode_attention", (out, given.query, given.key_cache, given.value_cache), step)


def skeleton(device: Device, dtype: str = DTYPE, paged: bool = True) -> Check:
    """Steps of a small transformer, with graphs and without, over paged or contiguous caches."""
    eager, captured = (
        Skeleton(model(MODEL), device, BLOCKS, BLOCK_SIZE, dtype, graphs=graphs) for graphs in (False, True)
    )
    errors = [0.0]
    for batch in _batches(paged):
        wanted, found = eager.step(batch), captured.step(batch)
        errors.append(error(found, wanted.double()))
    name = f"step of {MODEL}, {'paged' if paged else 'contiguous'}"
    return Check(name, max(errors, key=lambda one: (np.isnan(one), one)), STEP_TOLERANCE[dtype])


def _batches(paged: bool) -> list[Batch]:
    """A step of all prompts, then decodes with one sequence fewer each time, so that lengths and padding change."""
    rng, held = np.random.default_rng(0), np.array(PROMPTS)
    most = max(PROMPTS) // BLOCK_SIZE + 2
    tables = rng.permutation(BLOCKS)[: most * len(PROMPTS)].reshape(-1, most)
    starts = np.arange(len(PROMPTS)) * most * BLOCK_SIZE

    def batch(lens: np.ndarray, contexts: np.ndarray) -> Batch:
        rows, token_ids = len(lens), rng.integers(0, 2**31, lens.sum())
        if paged:
            return Batch.paged(lens, contexts, token_ids, tables[:rows], BLOCK_SIZE)
        return Batch.contiguous(lens, contexts, token_ids, starts[:rows])

    batches = [batch(held, held)]
    for step in range(STEPS):
        held = held[: len(PROMPTS) - step] + 1
        batches.append(batch(np.ones_like(held), held))
    return batches


CHECKS: tuple[Callable[[Device], Check], ...] = (kernel, skeleton, functools.partial(skeleton, paged=False))
