"""What the step times of a simulation rest on, and the errors of the measured runs most like it.

Runs of real servers (``experiments.reproduce.servers``) were simulated with the step times of their card and without
constants of the server. ``facts/server_errors.json`` has their signed errors, by card, model, parallelism, number format and load;
``make servers`` writes it. Of the runs on the simulated card those count that share more of the following with the
simulation, in this order: dense or mixture of experts, one or several engines, tensor parallelism, model. What none of
them has is named. TTFT of runs in overload is queueing, which multiplies the errors of step times; its error is stated
apart.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from ...sim.cost import COST_NAMES, default_cost, profile, read_server
from ...sim.engine.settings import Settings
from ...sim.spec import gpu, model

#: Most lines that are printed.
_MOST_LINES = 4
#: Names of the errors in text.
_LATENCIES = {"mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT"}
#: Errors that are those of step times in overload, too.
_OF_STEPS = ("output_throughput", "mean_tpot_ms")


@dataclass(frozen=True)
class Nearest:
    """The measured runs that are most like a simulation.

    Attributes:
        runs: Their number.
        model, tensor_parallel_size: Of these runs; several models are separated by commas.
        same_kind: Whether they are dense, or mixtures of experts, as the simulated model is.
        lacking: What the simulation has and none of them.
        errors: Lowest and highest simulated value over the measured one, less one, by metric; without TTFT and E2E of runs in
            overload. A metric that no run has is left out.
        overload_ttft: The same of mean TTFT of the runs in overload; None if there are none.
    """

    runs: int
    model: str
    tensor_parallel_size: str
    same_kind: bool
    lacking: tuple[str, ...]
    errors: Mapping[str, tuple[float, float]]
    overload_ttft: tuple[float, float] | None


@dataclass(frozen=True)
class Evidence:
    """What step times rest on.

    Attributes:
        cost: The cost model.
        basis: "a measured server", "a measured device", "kernel tables", "a data sheet" or "the paper".
        origin: The source, in words.
        nearest: The measured runs most like the simulation; None if there are none on its GPU, or if the step times
            are not those that the runs were simulated with.
    """

    cost: str
    basis: str
    origin: str
    nearest: Nearest | None

    def text(self) -> str:
        """One line."""
        line = f"Step times: {self.origin} (--cost {self.cost})."
        found = self.nearest
        if found is None:
            return line if self.basis == "a measured server" else f"{line} No measured run was simulated with them."
        errors = ", ".join(
            f"{_LATENCIES[name]} {_range(*found.errors[name])}" for name in _LATENCIES if name in found.errors
        )
        if found.overload_ttft is not None:
            errors += f"; TTFT in overload {_range(*found.overload_ttft)}"
        ranks = f" on {found.tensor_parallel_size} GPUs" if found.tensor_parallel_size != "1" else ""
        number = "measured run" if found.runs == 1 else f"{found.runs} measured runs"
        lacking = f"; none has {' or '.join(found.lacking)}" if found.lacking else ""
        return f"{line} Errors in the {number} most like it, {found.model}{ranks}: mean {errors}{lacking}."

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        return asdict(self)


@cache
def _measured() -> Sequence[Mapping[str, Any]]:
    rows: Sequence[Mapping[str, Any]] = json.loads(
        resources.files(__package__).joinpath("facts/server_errors.json").read_text("utf-8")
    )
    return rows


def evidence(settings: Settings) -> Evidence:
    """The evidence for the step times of these settings."""
    shape, card = model(settings.model), gpu(settings.gpu)
    server = None if settings.server is None else read_server(settings.server)
    name = settings.cost or (server.cost if server else default_cost(shape, card, settings.quantization))
    if server is not None:
        return Evidence(
            name, "a measured server", f"operations of {card.name}, and constants of the server {server.name}", None
        )
    if name not in COST_NAMES:
        return Evidence(name, "a measured device", f"the calibration {Path(name).name}", None)
    if name == "paper":
        return Evidence(name, "the paper", "measurements of OPT-13B on an A100 40 GB in the paper of 2023", None)
    if name == "roofline":
        return Evidence(name, "a data sheet", f"a roofline from the data sheet of {card.name}", None)
    if card.profile is not None:
        return Evidence(name, "a measured device", f"the profile {Path(card.profile).name} of {card.name}", None)
    scaled = " (scaled from another card)" if "bandwidth times" in profile(card.name).source else ""
    origin = f"kernel times of {card.name} from published tables{scaled}"
    return Evidence(name, "kernel tables", origin, _nearest(settings))


def evidence_lines(runs: Iterable[Settings]) -> list[str]:
    """The distinct lines of several runs; of more than a few, their number."""
    lines = list(dict.fromkeys(evidence(settings).text() for settings in runs))
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"There are {len(lines) - _MOST_LINES} other kinds of step times."]


def engines_lines(settings: Settings, planned: bool = False) -> list[str]:
    """The assumption about engines that share experts; empty for one engine.

    Args:
        planned: Whether the rate of one engine is found, too, as a plan does before it simulates fleets.
    """
    engines = settings.data_parallel_size
    if engines == 1:
        return []
    lock_step = f"The {engines} engines that share experts run in lock step"
    if planned:
        return [f"{lock_step} in fleets; the highest rate of one is found as if the others computed as many tokens."]
    return [f"{lock_step}: a step takes as long as that of the slowest engine."]


def _nearest(settings: Settings) -> Nearest | None:
    found = [row for row in _measured() if row["gpu"] == settings.gpu]
    if not found:
        return None
    shape = model(settings.model)

    def likeness(row: Mapping[str, Any]) -> tuple[bool, bool, bool, bool]:
        same_engines = (row["data_parallel_size"] > 1) == (settings.data_parallel_size > 1)
        same_ranks = row["tensor_parallel_size"] == settings.tensor_parallel_size
        same_kind = row["mixture_of_experts"] == (shape.experts is not None)
        return same_kind, same_engines, same_ranks, row["model"] == shape.name

    most = max(map(likeness, found))
    alike = [row for row in found if likeness(row) == most]
    calm = [row["errors"] if not row["overload"] else _only(row["errors"], *_OF_STEPS) for row in alike]
    queued = [_only(row["errors"], "mean_ttft_ms") for row in alike if row["overload"]]
    overload_ttft = _ranges(queued).get("mean_ttft_ms")
    models, ranks = ({row[key]: None for row in alike} for key in ("model", "tensor_parallel_size"))
    return Nearest(
        len(alike),
        ", ".join(models),
        ", ".join(map(str, ranks)),
        most[0],
        tuple(_lacking(settings, alike)),
        _ranges(calm),
        overload_ttft,
    )


def _lacking(settings: Settings, rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What these settings have and none of the measured runs."""
    shape, shapes = model(settings.model), [model(row["model"]) for row in rows]
    if all((other.experts is None) != (shape.experts is None) for other in shapes):
        yield "the same kind of layers (dense, or experts)"
    if settings.data_parallel_size > 1 and all(row["data_parallel_size"] == 1 for row in rows):
        yield "several engines"
    if shape.latent and not any(other.latent for other in shapes):
        yield "latent attention"
    own = settings.quantization or shape.quantization
    if own and all((row["quantization"] or other.quantization) != own for row, other in zip(rows, shapes, strict=True)):
        yield f"weights in {own}"


def _only(errors: Mapping[str, float], *metrics: str) -> dict[str, float]:
    return {name: error for name, error in errors.items() if name in metrics}


def _ranges(rows: Iterable[Mapping[str, float]]) -> dict[str, tuple[float, float]]:
    found: dict[str, list[float]] = {}
    for errors in rows:
        for name, error in errors.items():
            found.setdefault(name, []).append(error)
    return {name: (min(values), max(values)) for name, values in found.items()}


def _range(low: float, high: float) -> str:
    return f"{low:+.0%}" if f"{low:+.0%}" == f"{high:+.0%}" else f"{low:+.0%} to {high:+.0%}"
