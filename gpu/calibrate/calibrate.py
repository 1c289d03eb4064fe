"""A device's calibration: a few dozen points per operation, and the models fitted to them.

Samples of all points are interleaved, on a CPU those of calls that leave the caches alike behind each other. They may be taken in several parts, with
other work in between. The overhead of a step beyond its operations (host work, launches, the last norm) is measured too, as the time of whole steps less the time
of their operations: by the fitted models on a CPU, as measured on a GPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from ...sim.cost.op_model import OpModel
from ...sim.cost.operations import OPERATIONS
from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from ..devices import timing
from ..devices.devices import Device
from ..model.layers import check_shape
from ..model.skeleton import DTYPES, Skeleton
from . import points
from .fitting import LEAST_REST, fit, require_scipy
from .grid import CPU, CUDA, QUICK, Grid
from .points import Point
from .probes import Probes, StepProbe
from .repeats import repeated_reads

SCHEMA_VERSION = 1


class Watch(Protocol):
    """Passes items on and shows progress."""

    def __call__(self, items: Iterable[Any], *, total: int) -> Iterable[Any]: ...


def unwatched(items: Iterable[Any], *, total: int) -> Iterable[Any]:
    """The items, without a progress display."""
    return items


def calibrate(
    model: ModelSpec,
    device: Device,
    dtype: str | None = None,
    block_size: int = 16,
    quick: bool = False,
    seed: int = 0,
    watch: Watch = unwatched,
    kv_cache_dtype: str = "auto",
) -> dict[str, Any]:
    """The content of a calibration file.

    Args:
        model: The model with the shapes to measure; an OPT-like or Llama-like one.
        dtype: By default fp32 on a CPU and fp16 on a GPU.
        kv_cache_dtype: auto is the dtype; or fp8.
        quick: Measure a few points twice, as a smoke test; the fit has little value.
        seed: Seed of weights, tables, lengths and the order of measurement.
        watch: Passes the samples on and shows progress.

    Raises:
        SettingError: The model or dtype is not supported, or its cache does not fit.
        MissingExtra: The fitting library is not installed.
    """
    measuring = Measuring(model, device, dtype, block_size, quick, seed, kv_cache_dtype)
    measuring.measure(measuring.grid.rounds, watch)
    return measuring.document()


class Measuring:
    """A calibration that is measured in one or more parts. Every part samples all calls, and the result is of all samples, by the
    stopwatch's quantile.

    Args:
        model, device, dtype, block_size, quick, seed, kv_cache_dtype: See :func:`calibrate`.

    Attributes:
        grid: The measured sizes.

    Raises:
        SettingError, MissingExtra: See :func:`calibrate`.
    """

    def __init__(
        self,
        model: ModelSpec,
        device: Device,
        dtype: str | None = None,
        block_size: int = 16,
        quick: bool = False,
        seed: int = 0,
        kv_cache_dtype: str = "auto",
    ) -> None:
        require_scipy()
        self._on_gpu = on_gpu = device.torch_device.type == "cuda"
        self.grid = QUICK if quick else CUDA if on_gpu else CPU
        dtype = dtype or ("fp16" if on_gpu else "fp32")
        skeleton = _skeleton(model, device, self.grid, block_size, dtype, seed, kv_cache_dtype)
        self._points = Samples(skeleton, self.grid, seed)
        self._says = {
            "schema_version": SCHEMA_VERSION,
            "kind": "calibration",
            "device": device.describe(),
            "source": "measured by fragmeter calibrate",
            "measured_by": timing.stopwatch(device).how,
            "model": model.name,
            "dtype": dtype,
            "kv_cache_dtype": kv_cache_dtype,
            "block_size": block_size,
            "quick": quick,
            "seed": seed,
        }

    def measure(self, rounds: int, watch: Watch = unwatched) -> None:
        """Take so many samples of every call."""
        self._points.take(rounds, watch)

    def document(self) -> dict[str, Any]:
        """The content of a calibration file, from all parts so far."""
        measured = self._points.points()
        ops = fit(measured, overlapped=self._on_gpu)
        if not self._on_gpu:
            # A model may be off by a tenth at the sizes of a step, which is as much as the step takes beyond its operations.
            measured = self._points.points(ops)
            ops |= fit(point for point in measured if point["op"] in ("step", "prefill_step"))
        with_spread(ops, measured)
        share = repeated_reads(measured, ops["decode_attention"])
        found = {} if share is None else {"repeated_reads": share}
        return self._says | {"parts": self._points.parts, **found, "ops": ops, "points": measured}


def with_spread(ops: dict[str, dict[str, Any]], measured: Sequence[Point]) -> dict[str, dict[str, Any]]:
    """The entries of a calibration file, each with the spread of its points' samples."""
    for name, share_of_us in points.spread(measured).items():
        ops[name]["fit"]["spread"] = round(share_of_us, 4)
    return ops


def _skeleton(
    model: ModelSpec, device: Device, grid: Grid, block_size: int, dtype: str, seed: int, kv_cache_dtype: str
) -> Skeleton:
    """A skeleton with the blocks that the grid needs, limited by free memory."""
    check_shape(model)
    most = max(batch * context for batch in grid.batches for context in grid.contexts)
    moved = max(grid.moved_blocks)
    slot_bytes = model.slot_bytes(dtype if kv_cache_dtype == "auto" else kv_cache_dtype)
    # Half of the remaining memory: captured calls need memory for their results, too.
    room = grid.pool_bytes or (device.free_bytes() - model.weight_bytes(dtype) - input_bytes(model, grid, dtype)) // 2
    blocks = min(most, room // slot_bytes) // block_size
    if blocks < 2 * moved:
        found = f"there is room for {max(blocks, 0)} blocks of {model.name}, and {2 * moved} are moved"
        raise SettingError("block_size", block_size, f"{found}; take smaller blocks or a smaller model")
    return Skeleton(model, device, blocks, block_size, dtype, seed, host_blocks=moved, kv_cache_dtype=kv_cache_dtype)


def input_bytes(model: ModelSpec, grid: Grid, dtype: str) -> int:
    """Approximate bytes of the inputs of a grid's probes, which are all allocated at the start."""
    tokens = sum({*grid.tokens, *(batch + prompt for batch, _, prompt in grid.steps)})
    gemms, kv = points.layer_gemms(model), model.num_kv_heads * model.head_dim
    # Inputs of the embedding's layer and of the one between GEMMs, of the KV write, and of the GEMMs, and outputs of these.
    each = 2 * model.hidden_size + 2 * kv + sum(outputs + inputs for outputs, inputs in gemms)
    queries = len(grid.prefixes) * sum(grid.chunks) * model.num_heads * model.head_dim
    return (tokens * each + 2 * queries) * DTYPES[dtype].itemsize


class Samples:
    """Samples of every point of a grid.

    Args:
        skeleton: The skeleton with the weights and the pool to measure.
        grid: The sizes to measure.
        seed: Seed of tables, lengths and the order of the samples.

    Attributes:
        parts: How often samples were taken.
    """

    def __init__(self, skeleton: Skeleton, grid: Grid, seed: int) -> None:
        self._stopwatch, self._seed, self.parts = timing.stopwatch(skeleton.device), seed, 0
        self._on_gpu = skeleton.device.torch_device.type == "cuda"
        with torch.inference_mode():
            probes = Probes(skeleton, grid, self._stopwatch, seed)
            self._operations, self._steps = list(probes.operations()), list(probes.steps())
        self._samplers: list[timing.Sampler] = []
        self._us: list[list[float]] = [[] for _ in (*self._operations, *self._steps)]

    @torch.inference_mode()
    def take(self, rounds: int, watch: Watch) -> None:
        """Take so many samples of every call, in turns. Before the first ones all calls are warmed up."""
        warm_ups = 0 if self._samplers else len(self._us)
        total = warm_ups + rounds * len(self._us)
        for index, samples in watch(self._taken(rounds), total=total):
            self._us[index] += samples
        self.parts += 1

    def points(self, ops: Mapping[str, Mapping[str, Any]] | None = None) -> list[Point]:
        """Every point with ``us``, ``iqr_us`` and ``samples``, from the samples so far.

        Args:
            ops: Entries by which a step's operations take the time that is not its own; None: as they were measured.
        """
        operations = self._operations
        timings = [timing.timing(found, self._stopwatch.quantile) for found in self._us]
        measured = [probe.point | found._asdict() for probe, found in zip(operations, timings, strict=False)]
        us_of = {points.key(point): point["us"] for point in measured}
        for probe, point in zip(operations, measured, strict=True):
            if probe.parts:
                point["apart_us"] = sum(us_of[points.key(part)] for part in probe.parts)
        if ops is not None:
            us_of = {points.key(part): _modelled_us(ops, part) for step in self._steps for _, part in step.parts}
        whole = zip(self._steps, timings[len(operations) :], strict=True)
        return measured + [beside(step, taken, us_of) for step, taken in whole]

    def _taken(self, rounds: int) -> Iterator[tuple[int, list[float]]]:
        """Warm up all calls that are not, which gives one item without a sample per call, and then one sample at a time."""
        if not self._samplers:
            calls = [(probe.work, probe.captured) for probe in self._operations]
            calls += [(step.work, False) for step in self._steps]
            for index, (work, captured) in enumerate(calls):
                self._samplers.append(self._stopwatch.sampler(work, captured))
                yield index, []
        # On a GPU kinds are mixed, as in serving: GEMMs behind GEMMs would meet the limit of its power and lower the clocks.
        kinds = None
        if not self._on_gpu:
            measured = [probe.point for probe in self._operations] + [step.point for step in self._steps]
            kinds = [points.kind(point) for point in measured]
        # Every part has an order of its own.
        for index, us in timing.interleaved(self._samplers, rounds, self._seed + self.parts, kinds):
            yield index, [us]


def _modelled_us(ops: Mapping[str, Mapping[str, Any]], point: Point) -> float:
    sizes = {name: size for name, size in point.items() if name != "op"}
    return float(OpModel(**ops[point["op"]]).us(OPERATIONS[point["op"]](**sizes)))


def beside(step: StepProbe, whole: timing.Timing, us_of: Mapping[Any, float]) -> Point:
    """Overhead of a step beyond its operations; ``whole_us`` and ``parts_us`` are the times that it is computed from, ``decodes`` and
    ``context_tokens`` its sequences that decode, and their contexts together."""
    parts_us = sum(count * us_of[points.key(part)] for count, part in step.parts)
    rest = whole._replace(us=max(LEAST_REST * whole.us, whole.us - parts_us))
    decode = next((part for _, part in step.parts if part["op"] == "decode_attention"), {})
    sizes = {"decodes": decode.get("batch", 0), "context_tokens": decode.get("context_tokens", 0)}
    return step.point | rest._asdict() | {"whole_us": whole.us, "parts_us": parts_us, **sizes}
