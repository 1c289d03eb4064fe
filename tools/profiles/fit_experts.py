"""Models of the experts of a layer (``moe``) from aiconfigurator-core's tables, for ``fit_profiles``.

A row of ``moe_perf`` is one call of all experts of a layer on one GPU: ``moe_ep_size`` GPUs divide the experts,
``moe_tp_size`` the matrices of each. Kernels are tuned shape by shape, so every shape has a model of its own, beside one over all
shapes for those without a table. A point is the geometric mean of two rows: tokens spread evenly over the experts
("balanced"), and skewed routing ("power_law_1.01"). A trained router lies between them. The A100's table has
skewed rows alone, and of 16 bits. Its experts in int4 are those of SGLang's table, whose kernel is Marlin's as vLLM's is, and of GPUs that divide
the matrices alone: where the experts are divided its calls are other ones. In bf16, of which both engines have the same calls there, SGLang's
take 1.00 to 1.03 times as long as vLLM's, shape by shape in the median.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from fragmeter.gpu.calibrate.fitting import Points, Say, describe, errors, fit_model, is_possible
from fragmeter.sim.cost.op_work import experts_name
from fragmeter.sim.cost.operations import OpName
from fragmeter.sim.output import frames as pd
from fragmeter.sim.spec.gpu import GpuSpec

from .rows import require_rows, silent
from .tables import OperationTables

#: Number formats in the tables, of which the first one that a table has is fitted.
FORMATS: dict[OpName, tuple[str, ...]] = {
    "moe": ("bfloat16",),
    "moe_fp8": ("fp8_block", "fp8"),
    "moe_nvfp4": ("nvfp4",),
    "moe_mxfp4": ("w4a16_mxfp4",),
    "moe_mxfp4_mxfp8": ("w4a8_mxfp4_mxfp8",),
    "moe_int4": ("int4_wo",),
}
_ROUTINGS = ("balanced", "power_law_1.01")
#: Experts without a gate (Nemotron 3), by hidden size and by experts of a token: their calls are other ones.
_UNGATED_HIDDEN, _UNGATED_USED = 2688, 22
#: mxfp4 of other models than gpt-oss takes another kernel than theirs.
_GPT_OSS = "gptoss"
#: Narrower slices of an expert occur in no deployment.
_LEAST_WIDTH = 64
_FOLDS = 3
#: An engine with the same kernels of experts in int4 and of gated delta nets, for cards of which vLLM's tables have none.
OTHER_ENGINE = "sglang"
OTHER_SOURCE = "fitted to aiconfigurator-core's table of SGLang's Marlin kernel for experts in 4 bits; vLLM runs its own there, of which no table is published"


class Experts(NamedTuple):
    """Points, the name of the shape of each, and how far the two routings are from their mean.

    Attributes:
        spread: e^(|ln(skewed / balanced)| / 2) - 1, the median; None if the table has one routing.
        path: Of their table, where it is another engine's.
    """

    points: Points
    names: np.ndarray
    spread: float | None
    path: str = ""


def fitted_experts(tables: OperationTables, sheet: GpuSpec, say: Say = silent) -> dict[str, dict[str, Any]]:
    """The entries of all number formats that a card's table has; none if there is no table.

    Args:
        say: Is called with one line before each fit.

    Raises:
        UserError: A row is wrong, or there are too few rows.
    """
    table = tables.read("moe_perf")
    if table is None:
        return {}
    path, frame = table
    entries: dict[str, dict[str, Any]] = {}
    for operation, formats in FORMATS.items():
        chosen = next((form for form in formats if (frame.moe_dtype == form).any()), None)
        if chosen is None:
            continue
        experts = _points(operation, frame[frame.moe_dtype == chosen])
        if not len(experts.names):
            say(f"{sheet.name}: {operation}, no rows in {path}")
            continue
        sizes = f"{chosen}, {' or '.join(_ROUTINGS)} routing and slices from {_LEAST_WIDTH}"
        require_rows(path, experts.points, _limits(experts.points, sheet), sizes, sheet.setting)
        shapes = len(np.unique(experts.names))
        say(f"{sheet.name}: {operation}, {len(experts.names):,} rows of {path}, {shapes} shapes of experts")
        entries[operation] = _entry(experts, sheet, {"table": path, "format": chosen})
    return entries | ({} if "moe_int4" in entries else _of_other_engine(tables, sheet, say))


def marlin_experts(tables: OperationTables) -> Experts | None:
    """Experts in int4 of SGLang's table; None if there is none."""
    if tables.system is None:
        return None
    table = OperationTables(tables.place, tables.system, OTHER_ENGINE).read("moe_perf")
    if table is None:
        return None
    (form,) = FORMATS["moe_int4"]
    found = _points("moe_int4", table.frame[(table.frame.moe_dtype == form) & (table.frame.moe_ep_size == 1)])
    return found._replace(path=table.path) if len(found.names) else None


def _of_other_engine(tables: OperationTables, sheet: GpuSpec, say: Say) -> dict[str, dict[str, Any]]:
    experts = marlin_experts(tables)
    if experts is None:
        return {}
    say(f"{sheet.name}: moe_int4, {len(experts.names):,} rows of {experts.path}")
    about: dict[str, object] = {"table": experts.path, "format": FORMATS["moe_int4"][0]}
    return {"moe_int4": _entry(experts, sheet, about) | {"source": OTHER_SOURCE}}


def _points(operation: OpName, frame: pd.DataFrame) -> Experts:
    frame = frame[frame.distribution.isin(_ROUTINGS)]
    frame = frame[(frame.hidden_size != _UNGATED_HIDDEN) & (frame.topk != _UNGATED_USED)]
    if operation == "moe_mxfp4":
        frame = frame[frame.kernel_source.str.contains(_GPT_OSS)]
    sizes = ["num_tokens", "topk", "num_experts", "moe_ep_size", "moe_tp_size", "hidden_size", "inter_size"]
    logs = frame.assign(log=np.log(frame.latency * 1e3)).groupby(sizes)
    far = (logs.log.max() - logs.log.min())[logs.distribution.nunique() == len(_ROUTINGS)]
    spread = float(np.expm1(far.median() / 2)) if len(far) else None
    rows = logs.log.mean().reset_index()
    rows = rows[rows.inter_size // rows.moe_tp_size >= _LEAST_WIDTH]
    arguments = {
        "tokens": rows.num_tokens,
        "used": rows.topk,
        "count": rows.num_experts,
        "held": rows.num_experts / rows.moe_ep_size,
        "hidden_size": rows.hidden_size,
        "width": rows.inter_size / rows.moe_tp_size,
    }
    shapes = zip(rows.num_experts, rows.topk, rows.hidden_size, rows.inter_size, strict=True)
    names = np.array([experts_name(*shape) for shape in shapes])
    columns = {name: column.to_numpy(float) for name, column in arguments.items()}
    return Experts(Points(operation, columns, np.exp(rows.log.to_numpy(float))), names, spread)


def _limits(points: Points, sheet: GpuSpec) -> dict[str, float]:
    # Of weights and activations, those that are multiplied have the larger format.
    form = points.operation.removeprefix("moe").removeprefix("_").removeprefix("mxfp4_")
    faster = sheet.quantized_flops_per_s(form)
    return {"flops_per_s": faster or sheet.fp16_flops_per_s, "bytes_per_s": sheet.memory_bytes_per_s}


def _entry(experts: Experts, sheet: GpuSpec, about: dict[str, object]) -> dict[str, Any]:
    points, names, spread, _ = experts
    limits = _limits(points, sheet)
    possible = is_possible(points, limits)
    points, names = points.take(possible), names[possible]
    entry = describe(points, limits)
    shapes, known = {}, np.zeros(len(points.us))
    for name in np.unique(names):
        of_shape = names == name
        own = points.take(of_shape)
        described = describe(own, limits)
        shapes[str(name)] = {part: value for part, value in described.items() if part != "fit"}
        known[of_shape] = _held_out_tokens(own, limits)
    far = {} if spread is None else {"routing_spread": round(spread, 4)}
    fit = about | {"rows_above_data_sheet": int((~possible).sum())} | far | entry["fit"]
    fit["held_out"] = {"tokens of a known shape": {"points": len(known), **errors(points, known)}}
    return entry | {"fit": fit, "shapes": shapes}


def _held_out_tokens(points: Points, limits: Mapping[str, float]) -> np.ndarray:
    """Microseconds of a shape's points, of a third of its numbers of tokens at a time left out of the fit."""
    tokens, modelled = points.arguments["tokens"], fit_model(points, limits).us(points.work)
    inner = np.unique(tokens)[1:-1]
    for fold in range(_FOLDS):
        out = np.isin(tokens, inner[fold::_FOLDS])
        modelled[out] = fit_model(points.take(~out), limits).us(points.take(out).work)
    return modelled
