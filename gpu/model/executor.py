"""Executes a recorded plan on a device: moves, writes and attention, by the plan's own block tables.

No model computes the values. Each token's keys, values and queries are functions of its id and position (``drawn``), so the
correct output of attention is known without a block table. Every element is a hash of (token id, position, kind, layer,
head, dimension) in wrapping integer arithmetic, so it is the same on every device and in every order. Two tokens have equal
values only if id and position are equal. Unwritten slots are NaN.
Caches of fp8 hold the elements rounded.

A plan that names a block outside its pool is refused before execution: a GPU would read there without an error.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ...sim.recording.plans import Plan, PlanStep
from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from ..devices.devices import Device
from ..devices.fp8 import indexed, rounded
from .batch import Batch, Inputs, Stager
from .calls import StepCalls
from .pool import KvPool, cache_dtype
from .skeleton import DTYPES

#: Increment and multipliers of SplitMix64 (Steele, Lea and Flood 2014), as signed integers.
_GOLDEN = 0x9E3779B97F4A7C15 - 2**64
_FIRST = 0xBF58476D1CE4E5B9 - 2**64
_SECOND = 0x94D049BB133111EB - 2**64
QUERY, KEY, VALUE = range(3)
#: Bits of an element: the precision of fp32.
_BITS = 24
#: Width of a uniform distribution with variance 1: 2 * sqrt(3).
_WIDTH = 3.4641016


def drawn(kind: int, layer: int, token_ids: Tensor, positions: Tensor, heads: int, head_dim: int) -> Tensor:
    """Elements of one layer, fp32 ``[tokens, heads, head_dim]``: uniform, with mean 0 and variance 1.

    Args:
        kind: ``QUERY``, ``KEY`` or ``VALUE``.
        layer: Layer of the model.
        token_ids: int64 ``[tokens]``, on the device that computes.
        positions: int64 ``[tokens]``, position of each token in its sequence.
        heads: Number of query heads, or of KV heads.
        head_dim: Head dimension.
    """
    tokens = _mixed(_mixed(token_ids) + positions)
    first = (layer * 3 + kind) << 32
    elements = torch.arange(first, first + heads * head_dim, device=token_ids.device)
    bits = _mixed(tokens[:, None] + _mixed(elements)) >> (64 - _BITS)
    return (bits.float() * (_WIDTH / 2**_BITS)).view(-1, heads, head_dim)


def _mixed(values: Tensor) -> Tensor:
    """SplitMix64 of int64 counters."""
    values = (values + 1) * _GOLDEN
    values = (values ^ _shifted(values, 30)) * _FIRST
    values = (values ^ _shifted(values, 27)) * _SECOND
    return values ^ _shifted(values, 31)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """Logical right shift."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def require_within(plan: Plan) -> None:
    """Refuse a plan that names a block or a slot outside its pool.

    Raises:
        SettingError: Names the first invalid entry, by array and index.
    """
    meta = plan.meta
    slots, blocks, host_blocks = meta["num_slots"], meta["num_blocks"], meta["host_blocks"]
    _require("slot_mapping", plan.slot_mapping, slots)
    _require("initial_slots", plan.initial_slots, slots)
    _require("initial_host_slots", plan.initial_host_slots, host_blocks * meta["block_size"])
    for name, (source, destination) in {
        "swap_outs": (blocks, host_blocks),
        "swap_ins": (host_blocks, blocks),
        "copies": (blocks, blocks) if plan.is_paged else (slots, slots),
    }.items():
        _require(f"{name}[:, 0]", getattr(plan, name)[:, 0], source)
        _require(f"{name}[:, 1]", getattr(plan, name)[:, 1], destination)
    if plan.is_paged:
        _require("block_ids", plan.block_ids, blocks)
        room = np.diff(plan.table_offsets) * meta["block_size"]
        _refuse("context_lens", plan.context_lens, plan.context_lens > room, "its block table is shorter")
    else:
        ends = plan.slot_starts + plan.context_lens
        _refuse("slot_starts", plan.slot_starts, (plan.slot_starts < 0) | (ends > slots), "leaves the pool")
        ends = plan.copies.max(axis=1, initial=0) + plan.copied_slots
        _refuse("copied_slots", plan.copied_slots, ends > slots, "leaves the pool")


def _require(field: str, ids: np.ndarray, end: int) -> None:
    _refuse(field, ids, (ids < 0) | (ids >= end), f"must be from 0 to {end - 1}; record the plan anew")


def _refuse(field: str, values: np.ndarray, wrong: np.ndarray, why: str) -> None:
    for place in np.flatnonzero(wrong)[:1]:
        raise SettingError(f"{field}[{place}]", int(values[place]), why)


#: Functions that move blocks, by the operation names of ``sim.cost``.
MOVES = {"swap_out": KvPool.swap_out, "swap_in": KvPool.swap_in, "block_copy": KvPool.copy}
#: Token ids are not reduced modulo a vocabulary: they identify tokens.
_ANY_TOKEN = 2**63 - 1


class Executor:
    """The caches of a plan on a device.

    Args:
        plan: The recorded steps, executed from the first one on.
        model: Determines the layers, heads and head_dim of the caches; any model that is small enough works.
        device: The device that computes, from ``devices.open``.
        dtype: fp32, fp16 or bf16.
        kv_cache_dtype: auto, or fp8.

    Raises:
        SettingError: A dtype is unknown or not supported, or the plan names a block outside its pool.
    """

    def __init__(
        self, plan: Plan, model: ModelSpec, device: Device, dtype: str = "fp32", kv_cache_dtype: str = "auto"
    ) -> None:
        if dtype not in DTYPES:
            raise SettingError("dtype", dtype, f"one of {', '.join(DTYPES)}")
        require_within(plan)
        self.plan, self.model, self.dtype = plan, model, dtype
        self._device = device
        self.pool = pool_of(plan, model, device, cache_dtype(kv_cache_dtype, DTYPES[dtype], model, device))
        self._stager = Stager(_ANY_TOKEN, self.pool.block_size, self.pool.num_slots)
        self._begin()

    @torch.inference_mode()
    def advance(self, step: int) -> Inputs:
        """Execute the moves and writes of the next step; returns the inputs of :meth:`attention`."""
        move(self.pool, self.plan, self.plan.step(step))
        inputs = self._stager.inputs(batch(self.plan, step))
        inputs = inputs.holding(tensor.to(self._device.torch_device) for tensor in inputs.tensors())
        calls = StepCalls(self._device, inputs)
        for layer in range(self.model.num_layers):
            key, value = (self.drawn(kind, layer, inputs.token_ids, inputs.positions) for kind in (KEY, VALUE))
            calls.write(key, value, *self.pool.layer(layer))
        return inputs

    @torch.inference_mode()
    def attention(self, step: int, inputs: Inputs) -> list[Tensor]:
        """Attention of the step that :meth:`advance` has just written, one layer at a time: ``[new tokens, heads, head_dim]``."""
        order, calls = _order(self.plan.step(step).query_tokens), StepCalls(self._device, inputs)
        return [self._attend(layer, inputs, calls)[order] for layer in range(self.model.num_layers)]

    def drawn(self, kind: int, layer: int, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Keys, values or queries of tokens, in the dtype of queries."""
        heads = self.model.num_heads if kind == QUERY else self.model.num_kv_heads
        return drawn(kind, layer, token_ids, positions, heads, self.model.head_dim).to(DTYPES[self.dtype])

    def held(self, kind: int, layer: int, token_ids: Tensor, positions: Tensor) -> Tensor:
        """Keys or values of tokens as the caches hold them."""
        exact = self.drawn(kind, layer, token_ids, positions)
        scales, dtype = self.pool.scales[layer], self.pool.keys[layer].dtype
        return rounded(exact, scales[kind - KEY].to(exact.device), dtype) if scales else exact

    def numbers(self, kind: int, layer: int, held: Tensor) -> Tensor:
        """The numbers that attention reads of what the caches hold."""
        scales = self.pool.scales[layer]
        return held.double() * scales[kind - KEY][:, None] if scales else held

    def place(self, values: np.ndarray) -> Tensor:
        """``values`` on the device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device.torch_device)

    def _begin(self) -> None:
        """Write the contents of the pool and the host before the first step."""
        plan, pool = self.plan, self.pool
        here = plan.initial_slots, plan.initial_token_ids, plan.initial_positions
        self._fill(pool.keys, pool.values, *map(self.place, here))
        host = plan.initial_host_slots, plan.initial_host_token_ids, plan.initial_host_positions
        self._fill(pool.host_keys, pool.host_values, *map(torch.from_numpy, host))

    def _fill(
        self, keys: list[Tensor], values: list[Tensor], slots: Tensor, token_ids: Tensor, positions: Tensor
    ) -> None:
        for kind, caches in ((KEY, keys), (VALUE, values)):
            for layer, cache in enumerate(caches):
                cache.fill_(torch.nan)
                indexed(cache).flatten(0, 1)[slots] = indexed(self.held(kind, layer, token_ids, positions))

    def _attend(self, layer: int, inputs: Inputs, calls: StepCalls) -> Tensor:
        query = self.drawn(QUERY, layer, inputs.token_ids, inputs.positions)
        out = torch.full_like(query, torch.nan)
        calls.attend(out, query, *self.pool.layer(layer))
        return out


def batch(plan: Plan, step: int) -> Batch:
    """The batch of a step of a plan, as a skeleton takes it."""
    found = plan.step(step)
    rows = slice(*plan.row_offsets[step : step + 2])
    held = {"block_tables": plan.block_tables(step)} if plan.is_paged else {"slot_starts": plan.slot_starts[rows]}
    return Batch(found.query_tokens, found.context_lens, found.token_ids, found.slot_mapping, **held)


def move(pool: KvPool, plan: Plan, step: PlanStep) -> None:
    """Execute the moves that precede the computation of a step."""
    for name, pairs in moves_of(plan, step).items():
        MOVES[name](pool, pairs)


def moves_of(plan: Plan, step: PlanStep) -> dict[str, np.ndarray]:
    """The moves that precede the computation of a step, in order, by operation name of ``sim.cost``, without empty ones."""
    copies = step.copies if plan.is_paged else _slot_pairs(step)
    moves = {"swap_out": step.swap_outs, "swap_in": step.swap_ins, "block_copy": copies}
    return {name: pairs for name, pairs in moves.items() if len(pairs)}


def _slot_pairs(step: PlanStep) -> np.ndarray:
    """Slot pairs of the copies of contiguous pieces."""
    if not len(step.copies):
        return step.copies
    ends = np.cumsum(step.copied_slots)
    places = np.arange(ends[-1]) - np.repeat(ends - step.copied_slots, step.copied_slots)
    return np.repeat(step.copies, step.copied_slots, axis=0) + places[:, None]


def pool_of(plan: Plan, model: ModelSpec, device: Device, dtype: torch.dtype) -> KvPool:
    """A pool of the plan's size; for a contiguous layout, with blocks of one slot."""
    if plan.is_paged:
        meta = plan.meta
        return KvPool(model, device, meta["num_blocks"], meta["block_size"], dtype, used_host_blocks(plan))
    return KvPool(model, device, plan.meta["num_slots"], 1, dtype)


def used_host_blocks(plan: Plan) -> int:
    """Number of host blocks up to the last one that the plan uses, as a swap space is often much larger than its use."""
    named = plan.swap_outs[:, 1], plan.swap_ins[:, 0], plan.initial_host_slots // plan.meta["block_size"]
    return 1 + int(np.concatenate(named).max(initial=-1))


def _order(query_tokens: np.ndarray) -> np.ndarray:
    """The position of each new token of a step when decodes come first, as in :class:`Inputs`."""
    prefills = np.repeat(query_tokens > 1, query_tokens)
    order = np.empty(len(prefills), np.int64)
    order[np.argsort(prefills, kind="stable")] = np.arange(len(prefills))
    return order
