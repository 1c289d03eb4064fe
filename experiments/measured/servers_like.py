"""The measured servers that are of a simulation's class, and the intervals that they give (``intervals``).

``facts/server_errors.json`` has the errors of runs of real servers (docs/results/servers.md), simulated with the shipped
defaults, with the source of each; ``make servers`` writes it. ``facts/data_sheet_errors.json`` has those of the same runs, simulated
from the data sheets of their cards; ``python -m tools.servers.errors --data-sheets`` writes it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from importlib import resources
from math import fsum, sqrt
from statistics import fmean
from typing import Any, NamedTuple

from ...sim import Settings, Workload
from ...sim.spec import model
from ...sim.spec.matrix import PARTS, QUANTIZATIONS, formats_by_part
from ...sim.spec.shape import ModelSpec
from ..runs.near_saturation import LoadClass
from .intervals import SHARE, Calibrated, Levels, class_text, levels_of, run_errors
from .server_class import Client, backend_of, client_of, kernels_of, kind_of

#: Metrics by name, their labels and units, in the order of text.
LABELS = {"tpot": ("TPOT", " ms"), "ttft": ("TTFT", " ms"), "throughput": ("throughput", " tokens/s")}
#: Policies of the measured runs; the second is vLLM's own scheduler.
MEASURED_POLICIES = ("vllm-v1", "vllm-real")
#: Number formats of 4-bit integers, and the parts of a checkpoint, in words.
INT4 = {"awq": "4 bits (awq)", "gptq": "4 bits (gptq)", "w4a16": "4 bits", "w4a16-g32": "4 bits"}
_PART_TEXT = dict(zip(PARTS, ("attention", "MLPs", "shared experts", "experts", "the output head"), strict=True))
_SHARE = f"{10 * SHARE:.0f} of 10"

_MEANS = {"tpot": "mean_tpot_ms", "ttft": "mean_ttft_ms", "throughput": "output_throughput"}

Row = Mapping[str, Any]


class Served(NamedTuple):
    """What a simulation served.

    Attributes:
        load: Class of the load; None if it is not known, and then only TPOT has an interval.
        client: How the client sends; None if it is not known.
        values: Simulated values by metric (``LABELS``): latencies in ms, and output tokens/s.
    """

    load: LoadClass | None = None
    client: Client | None = None
    values: Mapping[str, float] | None = None

    @classmethod
    def of(cls, load: LoadClass, work: Workload, summary: Mapping[str, Any]) -> Served:
        """That of a finished run.

        Args:
            work: The requests as they were given.
            summary: Its results, with ``mean_tpot_ms``, ``mean_ttft_ms`` and ``output_throughput``.
        """
        return cls(load, client_of(work), {metric: summary[name] for metric, name in _MEANS.items()})


@dataclass(frozen=True)
class Predicted:
    """A simulated metric, and what the measured servers of its class say of it.

    Attributes:
        metric: "tpot", "ttft" or "throughput" (output tokens/s, in overload).
        value: Simulated value in ms or tokens/s; None if it is not known.
        factors: Lowest and highest measured value over the simulated one, for 9 of 10 servers of the class; None if the class has
            too few runs or servers.
        low, high: The same in the unit of the value; None without it.
        server_class: The class in words.
        runs, servers: Of the class, without runs that something was fitted to.
        errors: Errors of the runs, simulated over measured, less one, by their names; empty where there is an interval.
    """

    metric: str
    value: float | None
    factors: tuple[float, float] | None
    low: float | None
    high: float | None
    server_class: str
    runs: int
    servers: int
    errors: Mapping[str, float]

    def text(self, first: bool = True) -> str:
        """The value with its interval, such as "TPOT 12.3 ms (11.2 to 13.1 for 9 of 10 servers like this)"; empty without one.

        Args:
            first: Whether it says what the interval is of.
        """
        if self.value is None or self.low is None or self.high is None:
            return ""
        label, unit = LABELS[self.metric]
        of = f" for {_SHARE} servers like this" if first else ""
        value, low, high = (_number(each, self.value) for each in (self.value, self.low, self.high))
        return f"{label} {value}{unit} ({low} to {high}{of})"

    def basis(self) -> str:
        """What the interval rests on, and its factors where no value is known; or the errors of a class without one."""
        label = LABELS[self.metric][0]
        if self.factors is None:
            return f"{label} {', '.join(f'{error:+.0%} ({name})' for name, error in self.errors.items())}"
        low, high = self.factors
        factors = f" {low:.2f} to {high:.2f} times the simulated one," if self.value is None else ""
        return f"{label}{factors} from {self.runs} runs of {self.servers} servers ({self.server_class})"


@dataclass(frozen=True)
class ServersLike:
    """The measured servers of a simulation's class.

    Attributes:
        predicted: The metrics of which runs of the class have errors.
        lacking: What the simulation has and none of the runs: their errors say nothing of it, and no interval is given.
        other_kv_format: Number format of the KV cache, if none of the runs has it.
        from_data_sheets: Whether the runs are those of all cards, simulated from their data sheets.
    """

    predicted: tuple[Predicted, ...] = ()
    lacking: tuple[str, ...] = ()
    other_kv_format: str | None = None
    from_data_sheets: bool = False

    @property
    def not_measured(self) -> tuple[str, ...]:
        """What the simulation has and none of the runs, the KV cache included."""
        kept = self.other_kv_format
        return self.lacking if kept is None else (*self.lacking, f"a KV cache in {kept}")

    def headline(self) -> str:
        """The simulated values with intervals, in one line; empty without any."""
        found = [each for each in self.predicted if each.text()]
        return ", ".join(each.text(first=place == 0) for place, each in enumerate(found))

    def text(self) -> str:
        """What is known of the errors, in one or two sentences."""
        if self.lacking:
            return f"No interval: none of the measured servers of its class has {' or '.join(self.not_measured)}."
        if not self.predicted:
            return "No measured server is like this, so its error is not known."
        parts = []
        if known := [each.basis() for each in self.predicted if each.factors is not None]:
            parts.append(f"{_SHARE} servers like this: {'; '.join(known)}")
        if few := [each for each in self.predicted if each.factors is None]:
            rows = "; ".join(each.basis() for each in few)
            parts.append(f"Errors of runs like this, too few for an interval ({few[0].server_class}): {rows}")
        if self.other_kv_format:
            parts.append(f"None of them has a KV cache in {self.other_kv_format}")
        return f"{'. '.join(parts)}."

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


def _facts(name: str) -> Sequence[Row]:
    rows: Sequence[Row] = json.loads(resources.files(__package__).joinpath(f"facts/{name}").read_text("utf-8"))
    return rows


@cache
def stored_rows() -> Sequence[Row]:
    """The measured runs, as ``tools.servers.board.BoardRow`` has them, with the settings that tell servers of a class apart."""
    return _facts("server_errors.json")


#: The one class of data sheets: measured servers of all cards with tables. Its errors depend on the kernels that no table of the own
#: card says, not on its kind of model alone.
_DATA_SHEETS = {"gpu": "NVIDIA cards,", "backend": "simulated from", "kind": "data sheets", "load": None}


@cache
def data_sheet_rows() -> Sequence[Row]:
    """The same runs, simulated from the data sheets of their cards."""
    return [{**row, **_DATA_SHEETS} for row in _facts("data_sheet_errors.json")]


@cache
def _calibrated(metric: str, from_data_sheets: bool = False) -> Calibrated:
    return Calibrated(run_errors(data_sheet_rows() if from_data_sheets else stored_rows(), metric))


def servers_like(settings: Settings, served: Served) -> ServersLike:
    """The measured servers of the class of a simulation, which has the step times that are its default."""
    shape = model(settings.model)
    own = {
        "gpu": settings.gpu,
        "backend": backend_of(settings),
        "kind": kind_of(settings, shape),
        "load": served.client,
        "busy": served.load in ("busy", "overload"),
        "overload": served.load == "overload",
    }
    rows = [row for row in stored_rows() if all(row[name] == own[name] for name in ("gpu", "backend", "kind"))]
    if not rows:
        return ServersLike()
    lacking = tuple(_lacking(settings, rows))
    kept: str | None = _kv_format(settings.kv_cache_dtype, shape)
    if any(_kv_format(row["kv_cache_dtype"], model(row["model"])) == kept for row in rows):
        kept = None
    if lacking:
        return ServersLike(lacking=lacking, other_kv_format=kept)
    metrics = LABELS if served.load is not None else ("tpot",)
    found = [
        # A latency of 0 is that of no token.
        _predicted(metric, levels, (served.values or {}).get(metric) or None)
        for metric in metrics
        if (levels := levels_of(own, metric)) is not None
    ]
    return ServersLike(tuple(each for each in found if each is not None), other_kv_format=kept)


def data_sheet_like(settings: Settings, served: Served) -> ServersLike:
    """The measured servers as their data sheets have them, for a simulation with ``--cost roofline`` or parts without a table."""
    if lacking := tuple(_lacking_kind(settings, stored_rows())):
        return ServersLike(lacking=lacking)
    own = {**_DATA_SHEETS, "busy": served.load in ("busy", "overload"), "overload": served.load == "overload"}
    metrics = LABELS if served.load is not None else ("tpot",)
    found = [
        _predicted(metric, levels, (served.values or {}).get(metric) or None, from_data_sheets=True)
        for metric in metrics
        if (levels := levels_of(own, metric)) is not None
    ]
    known = tuple(each for each in found if each is not None and each.factors is not None)
    return ServersLike(known, from_data_sheets=True)


def _predicted(metric: str, levels: Levels, value: float | None, from_data_sheets: bool = False) -> Predicted | None:
    """A metric of a class; None if no run of the class has it."""
    calibrated = _calibrated(metric, from_data_sheets)
    interval, depth = calibrated.interval(levels), calibrated.depth(levels)
    # Of a class that is too small, all runs are shown, whatever their load.
    shown = 1 if depth is None else depth
    members = calibrated.members(levels, shown)
    if not members:
        return None
    rows = data_sheet_rows() if from_data_sheets else stored_rows()
    by_run = {row["run"]: row["errors"][metric] for row in rows if metric in row["errors"]}
    found = Predicted(
        metric=metric,
        value=value,
        factors=None,
        low=None,
        high=None,
        server_class=class_text(levels, shown),
        runs=len(members),
        servers=len({each.server for each in members}),
        errors={each.run: by_run[each.run] for each in members},
    )
    if interval is None:
        return found
    ends = (None, None) if value is None else (value * interval.low, value * interval.high)
    return replace(found, factors=(interval.low, interval.high), low=ends[0], high=ends[1], errors={})


@cache
def spread_of_a_server() -> float:
    """Standard deviation of the logarithm of measured over simulated TPOT, of the runs of a server about their mean; all servers with
    several runs."""
    of_server: dict[str, list[float]] = {}
    for each in run_errors(stored_rows(), "tpot"):
        of_server.setdefault(each.server, []).append(each.error)
    squares = fsum(fsum((error - fmean(errors)) ** 2 for error in errors) for errors in of_server.values())
    return sqrt(squares / fsum(len(errors) - 1 for errors in of_server.values()))


def any_server() -> tuple[float, float]:
    """Lowest and highest measured TPOT over the simulated one, for 9 of 10 of all servers."""
    low, high = _calibrated("tpot").widest()
    return low, high


def _lacking(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """What these settings have and none of the measured runs."""
    yield from _lacking_kind(settings, rows)
    shape, shapes = model(settings.model), [model(row["model"]) for row in rows]
    own = settings.quantization or shape.quantization
    if all((row["quantization"] or other.quantization) != own for row, other in zip(rows, shapes, strict=True)):
        yield _weights_text(own)
    else:
        for part, name in kernels_of(settings).items():
            if all(row["kernels"].get(part) != name for row in rows):
                yield f"{part} in {name}"


def _lacking_kind(settings: Settings, rows: Sequence[Row]) -> Iterator[str]:
    """The same of the division among GPUs and of how steps run."""
    if settings.data_parallel_size > 1 and all(row["data_parallel_size"] == 1 for row in rows):
        yield "several engines"
    if settings.pipeline_parallel_size > 1:
        yield "several pipeline stages"
    if settings.enforce_eager:
        yield "steps without CUDA graphs"
    if settings.policy not in MEASURED_POLICIES:
        yield f"the policy {settings.policy}"
    if settings.value("speculative_config") is not None:
        yield "speculative decoding"
    if settings.value("decode_context_parallel_size") > 1:
        yield "ranks that divide the tokens of a sequence"
    if settings.step_scale not in (None, 1):
        yield "scaled steps (--step-scale)"


def _weights_text(quantization: str | None) -> str:
    """The number format of weights in words, such as "experts in 4 bits"."""
    if quantization is None or quantization in QUANTIZATIONS:
        return f"weights in {INT4.get(quantization or '', quantization) or '16 bits'}"
    by_part = formats_by_part(quantization)
    return " and ".join(f"{_PART_TEXT[part]} in {INT4.get(by_part[part], by_part[part])}" for part in by_part)


def _kv_format(given: str | None, shape: ModelSpec) -> str:
    """Number format of a KV cache; both formats of 16 bits are one."""
    found = shape.kv_dtype if given in (None, "auto") else given
    return "16 bits" if found in (None, "fp16", "bf16") else found


def _number(value: float, like: float) -> str:
    """A value with as many decimals as another one."""
    return f"{value:,.0f}" if like >= 100 else f"{value:.1f}"
