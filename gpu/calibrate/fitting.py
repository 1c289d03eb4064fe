"""Fits models of operations to measured points: a robust fit, then a small table of residuals.

Both are least squares in the logarithm of time, so that a relative error counts equally at 10 us and at 10 ms.
Outliers have less weight (``soft_l1``). Errors are held out: whole columns of the measured
grid (all points of one ``m``, one batch, one length) are left out of the fit and predicted.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import ModuleType
from typing import Any, NamedTuple

import numpy as np

from ...sim.cost.op_model import Coefficients, OpModel, Residuals, corners
from ...sim.cost.op_work import Work
from ...sim.cost.operations import OPERATIONS, OpName
from ...sim.types.errors import MissingExtra, UserError, install
from ...sim.types.optional import not_none
from .points import REPEATED

#: Logarithmic error beyond which a point has less weight.
OUTLIER = 0.1
#: Limit of the median error of an operation, held out. The same for all operations: a step is their sum, and its time
#: should be within 5 %.
LIMIT = 0.05
#: With fewer points a table would fit noise.
LEAST_POINTS_FOR_RESIDUALS = 12
#: Weight of a table's smoothness against its points.
STIFFNESS = 0.5
#: Axes of operations with a knot at every size that a calibration of one model measured, and the stiffness of their table. Its GEMMs
#: have few shapes, and their time is no smooth function of the rows: on a CPU 16 rows took 0.6 of the time of 15. A layer's norms and
#: activations are a dozen kernels: on an H200 no line in the tokens was nearer than 8 %.
KNOTS_AT_SIZES: dict[str, tuple[str, ...]] = {"gemm": ("m", "n", "k"), "elementwise": ("tokens",)}
LOOSE_STIFFNESS = 0.1
FOLDS = 3
#: Times of a step's launches that are tried, the share of the error without launches that may be left with one of them, and the
#: fewest steps for it.
LAUNCHES_TRIED, LAUNCHES_BETTER, LAUNCHES_POINTS = 60, 0.75, 6
#: Minimum rest of a step beside its operations, as a share of its time; smaller differences are noise.
LEAST_REST = 0.02
#: Is called with one line of progress before each fit.
Say = Callable[[str], None]


class Points(NamedTuple):
    """The points of one operation as arrays.

    Attributes:
        parts_us: Known time that was measured together with each point. The time of a step's overhead is a difference,
            so its error is weighted relative to the whole step: the difference may be mostly noise.
        of_one_model: Whether they were measured for the shapes of one model, see ``KNOTS_AT_SIZES``.
    """

    operation: OpName
    arguments: dict[str, np.ndarray]
    us: np.ndarray
    parts_us: np.ndarray | None = None
    of_one_model: bool = False

    def ratios(self, modelled: np.ndarray) -> np.ndarray:
        """Modelled over measured time, both including the parts."""
        parts = 0 if self.parts_us is None else self.parts_us
        return (modelled + parts) / (self.us + parts)

    @property
    def work(self) -> Work:
        return OPERATIONS[self.operation](**self.arguments)

    def take(self, which: np.ndarray) -> Points:
        """The points that ``which`` selects."""
        arguments = {name: values[which] for name, values in self.arguments.items()}
        parts = None if self.parts_us is None else self.parts_us[which]
        return Points(self.operation, arguments, self.us[which], parts, self.of_one_model)

    @property
    def has_knots_at_sizes(self) -> bool:
        return self.of_one_model and self.operation in KNOTS_AT_SIZES

    def column(self, name: str) -> np.ndarray:
        """An argument, or a coordinate on an axis of the residuals."""
        return self.arguments[name] if name in self.arguments else np.broadcast_to(self.work.at[name], self.us.shape)


def table(operation: OpName, rows: Sequence[Mapping[str, Any]]) -> Points:
    """Points of one operation, from dicts of its arguments and ``us``.

    Raises:
        UserError: An argument is missing, or is not a positive number.
    """
    takes = inspect.signature(OPERATIONS[operation].work).parameters
    arguments = {}
    for name in (*takes, "us"):
        given = [row.get(name) for row in rows]
        if any(value is not None for value in given) or name == "us" or takes[name].default is inspect.Parameter.empty:
            bad = [value for value in given if not isinstance(value, int | float) or not value > 0]
            if bad:
                raise UserError(f"point of {operation}: {name} = {bad[0]!r}: must be a positive number")
            arguments[name] = np.asarray(given, float)
    parts = np.asarray([row.get("parts_us", 0) for row in rows], float)
    return Points(operation, arguments, arguments.pop("us"), parts if parts.any() else None)


def fit(
    points: Iterable[Mapping[str, Any]], limits: Mapping[str, float] | None = None, overlapped: bool = False
) -> dict[str, dict[str, Any]]:
    """The ``ops`` of a calibration file, from the measurements of one model.

    Args:
        points: ``{"op": name, argument: value, ..., "us": measured}``; arguments as ``OPERATIONS`` takes them. If
            ``us`` is the difference of a longer time and known parts, ``parts_us`` is the time of the parts.
        limits: ``flops_per_s`` and ``bytes_per_s`` of the data sheet. Faster points are measurement errors;
            they are left out and counted.
        overlapped: Whether the device computes while the host launches, as a GPU does: steps with prompts then also have
            ``launches``.

    Points that read blocks again are those of ``repeats.repeated_reads``.

    Raises:
        UserError: The operation is unknown, or a point lacks an argument.
    """
    by_operation: dict[OpName, list[Mapping[str, Any]]] = {}
    for point in points:
        if point.get("op") not in OPERATIONS:
            raise UserError(f"point: op = {point.get('op')!r}: one of {', '.join(OPERATIONS)}")
        if REPEATED not in point:
            by_operation.setdefault(point["op"], []).append(point)
    tables = {name: table(name, rows)._replace(of_one_model=True) for name, rows in by_operation.items()}
    entries = {name: describe(found, limits) for name, found in tables.items()}
    return entries | (_with_launches(tables["prefill_step"]) if overlapped and "prefill_step" in tables else {})


def _with_launches(steps: Points) -> dict[str, dict[str, Any]]:
    """The entries of steps with prompts and of their launches; none if they show no launches. Their errors are those of whole
    steps."""
    us = launches_us(steps)
    if not us:
        return {}
    parts = not_none(steps.parts_us)
    rest = describe(behind_launches(steps, us))
    modelled = np.maximum(parts, us) + Coefficients(**rest["coefficients"]).us(steps.work)
    whole = Points("launches", {}, steps.us + parts)
    report = {"points": len(whole.us), "impossible": 0, **errors(whole, modelled), "held_out": {}}
    return {"prefill_step": rest | {"fit": report}, "launches": {"coefficients": {"t0_us": us}, "fit": report}}


def launches_us(points: Points) -> float:
    """The host's time to launch a step with prompts; 0 if these steps show none.

    Launches overlap the operations, so that a step takes the longer of both, and a rest. Of some times of the launches the one is
    taken with which the steps are modelled best, if that is much better than without, and not by few steps.
    """
    if len(points.us) < LAUNCHES_POINTS:
        return 0.0
    parts = not_none(points.parts_us)
    whole = points.us + parts

    def error(us: float) -> float:
        rest = fit_coefficients(behind_launches(points, us)).us(points.work)
        return float(np.mean(np.abs((np.maximum(parts, us) + rest) / whole - 1)))

    tried = {float(f"{us:.4g}") for us in np.geomspace(whole.min() / 4, whole.max(), LAUNCHES_TRIED)}
    best, us = min((error(us), us) for us in tried)
    return us if best < LAUNCHES_BETTER * error(0.0) else 0.0


def behind_launches(points: Points, launches_us: float) -> Points:
    """The rest of each step beside the longer of its operations and its launches; a share of the step at least."""
    parts = not_none(points.parts_us)
    whole = points.us + parts
    hidden = np.minimum(np.maximum(parts, launches_us), (1 - LEAST_REST) * whole)
    return points._replace(us=whole - hidden, parts_us=hidden)


def describe(
    points: Points, limits: Mapping[str, float] | None = None, reported: Callable[[Points], np.ndarray] | None = None
) -> dict[str, Any]:
    """One operation's entry of a calibration file: its model and its errors.

    Args:
        reported: bool [n], the points that the held-out errors cover; None: all points.
    """
    possible = points.take(is_possible(points, limits))
    model = fit_model(possible, limits)
    report: dict[str, Any] = {"points": len(possible.us), "impossible": len(points.us) - len(possible.us)}
    report |= errors(possible, model.us(possible.work))
    within = reported(possible) if reported else None
    held = {name: held_out(possible, name, limits, within) for name in OPERATIONS[points.operation].columns}
    report["held_out"] = {name: found for name, found in held.items() if found}
    if shapes := held_out_shapes(possible, limits, within):
        report["held_out_shapes"] = shapes
    entry: dict[str, Any] = {"coefficients": _plain(model.coefficients)}
    if model.residuals:
        entry["residuals"] = _plain(model.residuals)
    return entry | {"fit": report}


def is_possible(points: Points, limits: Mapping[str, float] | None) -> np.ndarray:
    """bool [n]: whether each point is within the limits of the data sheet."""
    work, limits = points.work, limits or {}
    most_flops = limits.get("flops_per_s", np.inf) * points.us * 1e-6
    most_bytes = limits.get("bytes_per_s", np.inf) * points.us * 1e-6
    return (np.asarray(work.flops) <= most_flops) & (np.asarray(work.bytes) <= most_bytes)


def fit_model(points: Points, limits: Mapping[str, float] | None = None) -> OpModel:
    """The coefficients, and residuals if there are enough points."""
    coefficients = fit_coefficients(points, limits)
    return OpModel(coefficients, fit_residuals(points, coefficients))


def fit_coefficients(points: Points, limits: Mapping[str, float] | None = None) -> Coefficients:
    """Fit coefficients by ``scipy.optimize.least_squares`` over logarithms.

    A weak pull towards the start values determines the coefficients that no point depends on.

    Args:
        limits: Upper bounds of the rates, from the data sheet.
    """
    work, start = points.work, _start(points)
    first = np.log(list(start.values()))

    def off(logs: np.ndarray) -> np.ndarray:
        found = Coefficients(**dict(zip(start, np.exp(logs).tolist(), strict=True)))
        return np.concatenate([np.log(points.ratios(found.us(work))), 0.02 * (logs - first)])

    most = {name: np.log(limit) for name, limit in (limits or {}).items()} | {"q": np.log(8)}
    low = [np.log(0.5) if name == "q" else value - 12 for name, value in zip(start, first)]
    high = [most.get(name, value + 12) for name, value in zip(start, first)]
    best = _scipy("optimize").least_squares(off, first, bounds=(low, high), loss="soft_l1", f_scale=OUTLIER)
    return Coefficients(**{name: float(f"{np.exp(log):.5g}") for name, log in zip(start, best.x, strict=True)})


def _start(points: Points) -> dict[str, float]:
    """Start values: the shortest call and the highest observed rates, without coefficients for work that the operation lacks."""
    work, us = points.work, points.us
    if points.operation == "mixed_attention":
        return {"each_us": float(np.median(us / work.pieces))}
    # The smallest difference of a step and its parts may be almost 0, where the gradient vanishes.
    found = {"t0_us": float(us.min() if points.parts_us is None else np.median(us))}
    for name, amount in (("flops_per_s", work.flops), ("bytes_per_s", work.bytes)):
        if np.any(amount):
            found[name] = float(np.max(amount / us)) * 1e6
    if np.ptp(np.broadcast_to(work.pieces, us.shape)) > 0:
        return found | {"each_us": float(np.ptp(us) + 0.01 * us.min()) / float(np.max(work.pieces))}
    # With few points q would fit their noise.
    return found | ({"q": 2.0} if len(us) >= 6 else {})


def fit_residuals(points: Points, coefficients: Coefficients) -> Residuals | None:
    """A smooth table fitted to the logarithmic residuals of the coefficients; None if there are too few points."""
    axes, knots = _grid(points)
    if not axes or len(points.us) < LEAST_POINTS_FOR_RESIDUALS:
        return None
    left = np.log(points.us / coefficients.us(points.work))
    shape = tuple(map(len, knots))
    corner = corners(axes, knots, {name: points.column(name) for name in axes})
    # A point depends on the knots around it alone: 16 of two thousand for mixed_attention.
    design = _rows(corner, (len(left), int(np.prod(shape))))
    stiff = _stiffness(shape, LOOSE_STIFFNESS if points.has_knots_at_sizes else STIFFNESS)
    found, weights = np.zeros(design.shape[1]), np.ones(len(left))
    for _ in range(4):
        gram = (design.T @ (design * weights[:, None])).toarray()
        found = np.linalg.solve(gram + stiff, design.T @ (weights * left))
        # The weights of soft_l1 at the current errors.
        weights = (1 + ((design @ found - left) / OUTLIER) ** 2) ** -0.5
    return Residuals(axes, knots, tuple(np.clip(found, -2.4, 2.4).round(4).tolist()))


def _grid(points: Points) -> tuple[tuple[str, ...], tuple[tuple[float, ...], ...]]:
    """Axes along which the points vary, and knots from the smallest to the largest value."""
    if points.has_knots_at_sizes:
        axes_at_sizes = KNOTS_AT_SIZES[points.operation]
        knots = {name: tuple(np.unique(points.column(name)).tolist()) for name in axes_at_sizes}
    else:
        spacings = OPERATIONS[points.operation].knots
        knots = {name: _knots(points.column(name), each) for name, each in spacings.items() if each is not None}
    axes = tuple(name for name, values in knots.items() if len(values) > 1)
    return axes, tuple(knots[name] for name in axes)


def _knots(values: np.ndarray, spacing: float | tuple[float, ...]) -> tuple[float, ...]:
    low, high = values.min(), values.max()
    if isinstance(spacing, tuple):
        return tuple(np.unique(np.clip(spacing, low, high)).tolist())
    count = min(int(np.ceil(np.log2(high / low) / spacing)) + 1, len(np.unique(values)))
    return tuple(np.geomspace(low, high, count).round(3).tolist())


def _rows(entries: Sequence[tuple[np.ndarray, np.ndarray]], shape: tuple[int, int]) -> Any:
    """A sparse matrix; each entry has the column and the value of one element of every row."""
    columns, values = (np.stack([np.broadcast_to(part, shape[0]) for part in parts]) for parts in zip(*entries))
    rows = np.broadcast_to(np.arange(shape[0]), columns.shape)
    return _scipy("sparse").csr_array((values.ravel(), (rows.ravel(), columns.ravel())), shape=shape)


def _stiffness(shape: tuple[int, ...], stiffness: float) -> np.ndarray:
    """Penalty [size, size] that pulls a table towards linearity along every axis, and weakly towards zero."""
    size = int(np.prod(shape))
    number = np.arange(size).reshape(shape)
    rows = [_rows([(np.arange(size), np.asarray(stiffness * 0.3))], (size, size))]
    for axis in range(len(shape)):
        lines = np.moveaxis(number, axis, 0)
        neighbours = [part.ravel() for part in (lines[:-2], lines[1:-1], lines[2:])]
        bend = [(column, np.asarray(sign * stiffness)) for sign, column in zip((1, -2, 1), neighbours, strict=True)]
        rows.append(_rows(bend, (neighbours[1].size, size)))
    stiff = _scipy("sparse").vstack(rows)
    penalty: np.ndarray = (stiff.T @ stiff).toarray()
    return penalty


def held_out(
    points: Points, by: str, limits: Mapping[str, float] | None = None, within: np.ndarray | None = None
) -> dict[str, float]:
    """Errors at points that were left out of the fit, a third of the inner columns of ``by`` at a time.

    Args:
        within: bool [n], the points that the errors cover.
    """
    column = points.column(by)
    inner = np.unique(column)[1:-1]
    if len(inner) < 2:
        return {}
    covered, modelled = np.zeros(len(column), bool), np.zeros(len(column))
    for fold in range(min(FOLDS, len(inner))):
        out = np.isin(column, inner[fold::FOLDS])
        modelled[out] = fit_model(points.take(~out), limits).us(points.take(out).work)
        covered |= out
    covered &= True if within is None else within
    return {"points": int(covered.sum()), **errors(points.take(covered), modelled[covered])} if covered.any() else {}


def held_out_shapes(
    points: Points, limits: Mapping[str, float] | None = None, within: np.ndarray | None = None
) -> dict[str, dict[str, float]]:
    """Errors at all points of shapes that were left out of the fit.

    "interpolated": shapes within the others' range, a third at a time. "extrapolated": all shapes with the largest value of
    a size (the largest n, the largest k), left out together and predicted from the smaller ones; where every shape has one (an
    expert is divided by its width, or by the number of experts), the shapes with all of them.

    Args:
        within: bool [n], the points that the errors cover.
    """
    columns = np.stack(
        [points.column(name) for name in OPERATIONS[points.operation].shape] or [np.zeros(len(points.us))]
    )
    sizes = columns[[len(np.unique(column)) > 1 for column in columns]]
    if not len(sizes):
        return {}
    at_most = sizes == sizes.max(axis=1, keepdims=True)
    largest = at_most.all(axis=0) if at_most.any(axis=0).all() else at_most.any(axis=0)
    _, number = np.unique(sizes.T, axis=0, return_inverse=True)
    smallest = (sizes == sizes.min(axis=1, keepdims=True)).any(axis=0)
    inner = np.unique(number[~largest & ~smallest])
    folds = {"extrapolated": [largest]}
    if len(inner):
        folds["interpolated"] = [np.isin(number, inner[fold::FOLDS]) for fold in range(min(FOLDS, len(inner)))]
    covers = np.ones(len(points.us), bool) if within is None else within
    found = {}
    for name, outs in folds.items():
        if all(out.all() for out in outs) or not (covered := np.any(outs, axis=0) & covers).any():
            continue
        modelled = np.zeros(len(points.us))
        for out in outs:
            modelled[out] = fit_model(points.take(~out), limits).us(points.take(out).work)
        found[name] = {"points": int(covered.sum()), **errors(points.take(covered), modelled[covered])}
    return found


def errors(points: Points, modelled: np.ndarray) -> dict[str, float]:
    """Statistics of modelled over measured time minus one: median, mean, 90th and 95th percentile of its magnitude, and its
    mean."""
    off = points.ratios(modelled) - 1
    size = np.abs(off)
    percentiles = {"p90": np.quantile(size, 0.9), "p95": np.quantile(size, 0.95)}
    sizes = {"median_error": np.median(size), "mape": size.mean(), **percentiles, "bias": off.mean()}
    return {name: round(float(value), 4) for name, value in sizes.items()}


def limit_of(fit: Mapping[str, Any]) -> float:
    """The limit of an operation's median error, held out.

    A point of experts is the mean of two routings, and a trained router lies between them. Without knowing the router no prediction
    comes nearer than their distance from that mean, which is then the limit.

    Args:
        fit: Of the operation's entry.
    """
    return max(LIMIT, fit.get("routing_spread", 0.0))


def _plain(model: Any) -> dict[str, Any]:
    fields = ((name, getattr(model, name)) for name in model.__dataclass_fields__)
    return {name: value for name, value in fields if value}


def least_absolute(columns: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Coefficients of the linear model with the smallest mean absolute percentage error.

    Args:
        columns: float [calls, coefficients].
        us: float [calls], their microseconds.

    Raises:
        MissingExtra: scipy is not installed.
    """
    calls, count = columns.shape
    shares = columns / us[:, None]
    # Minimise the sum of ``above + below``, where ``shares @ coefficients - above + below = 1``.
    goal = np.concatenate([np.zeros(count), np.ones(2 * calls)])
    equal = np.hstack([shares, -np.eye(calls), np.eye(calls)])
    bounds = [(None, None)] * count + [(0, None)] * (2 * calls)
    found = _scipy("optimize").linprog(goal, A_eq=equal, b_eq=np.ones(calls), bounds=bounds)
    return np.asarray(found.x[:count])


def require_scipy() -> None:
    """Check for scipy before the measurement starts.

    Raises:
        MissingExtra: scipy is not installed.
    """
    _scipy("optimize")


def _scipy(part: str) -> ModuleType:
    try:
        return importlib.import_module(f"scipy.{part}")
    except ImportError:
        raise MissingExtra(f"fitting needs scipy: {install('fit')}") from None
