"""Models of gated delta nets, of sparse latent attention, of GEMMs with unpacked weights and of the smallest kernels, for ``fit_profiles``.

    gdn_perf        convolution, and recurrence or scan, of one layer: two rows of the same sizes are one point. On the A100, of which vLLM has no
                    table, decodes of SGLang's, whose kernels take 0.99 of the time of vLLM's on an H100 (median; 0.91 to 1.11); it has no scan
    dsa_*           the module of one layer: projections, indexer, attention; one model for each model and KV format in the tables, with
                    the errors of the worst
    msa_*           the module of one layer of MiniMax M3 with sparse attention, as dsa_*; all heads are of its shape
    dsv4_*          the module of one layer of DeepSeek V4 Flash and Pro, of each kind of layer, as dsa_*
    mhc             both mixings of hidden states of one of its layers: the kernel before and that behind are one point
    gemm_perf       of TensorRT-LLM on the A100, where vLLM's table has 16 bits alone: weights of 8 and 4 bits. vLLM runs Marlin's kernels, which
                    have a table of experts alone, SGLang's; a GEMM takes no less than at the highest rate of these
    small_kernel    the median over tables of their shortest calls

Prefills of more than ``MOST_TOKENS`` tokens are left out: no step has them, and kernels change there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from fragmeter.gpu.calibrate.fitting import Points, Say, describe, is_possible
from fragmeter.sim.cost.layer_work import GDN_DIM, MSA_WIDTHS, sparse_name
from fragmeter.sim.cost.operations import OpName
from fragmeter.sim.output import frames as pd
from fragmeter.sim.spec.gpu import GpuSpec

from .fit_experts import OTHER_ENGINE, marlin_experts
from .rows import require_rows, silent
from .tables import OperationTables

MOST_TOKENS = 32_768
#: Operations of this module that a scaled profile takes over, with its own memory.
MODULES: tuple[OpName, ...] = (
    "dsa_decode", "dsa_decode_fp8", "dsa_prefill", "dsa_prefill_fp8", "msa_decode", "msa_decode_fp8", "msa_prefill", "msa_prefill_fp8",
    "csa_decode", "csa_prefill", "hca_decode", "hca_prefill",
    "hyper_connections", "gdn_decode", "gdn_prefill", "gemm_w8", "gemm_w4",
)  # fmt: skip
#: Models of the tables of sparse attention, with their hidden sizes.
_SPARSE_MODELS = {
    "dsa": {"deepseek-ai/DeepSeek-V3.2": 7168, "zai-org/GLM-5": 6144},
    "msa": {"MiniMaxAI/MiniMax-M3": MSA_WIDTHS.hidden_size},
}
_SPARSE_FORMATS = {"": "bfloat16", "_fp8": "fp8_block"}
#: Bytes of MiniMax M3's 427 billion weights in these formats, and the cards that a server has at most. A table is left out where they do not fit.
_MSA_BYTES = {"bfloat16": 854e9, "fp8_block": 427e9}
_MOST_CARDS = 8
#: Kinds of layers of DeepSeek V4, and the hidden sizes of its models, by a part of the names that tables of several copies have.
_COMPRESSED = ("csa", "hca")
_COMPRESSED_MODELS = {"V4-Flash": 4096, "V4-Pro": 7168}
_UNPACKED: dict[OpName, str] = {"gemm_w8": "int8_wo", "gemm_w4": "int4_wo"}
#: The engine of which tables have kernels that unpack weights.
UNPACKING = "trtllm"
UNPACKED_SOURCE = (
    "fitted to aiconfigurator-core's table of TensorRT-LLM's kernels for weights of 8 and 4 bits, no faster than the experts of SGLang's Marlin"
    " kernel in its table, {:.0f} TFLOP/s; vLLM has Marlin's there, of which no table is published"
)
_STATES_SOURCE = "fitted to aiconfigurator-core's table of SGLang's kernels for decodes of gated delta nets; vLLM's have no table there"
_Entry = dict[str, Any]
_Which = Callable[[Points], np.ndarray]


def fitted_modules(tables: OperationTables, sheet: GpuSpec, say: Say = silent) -> dict[str, _Entry]:
    """The entries of all operations that a card's tables have.

    Args:
        say: Is called with one line before each fit.

    Raises:
        UserError: A row is wrong, or there are too few rows.
    """
    found: dict[str, _Entry] = {}
    for fits in (_delta_nets, _sparse, _compressed, _unpacked):
        found |= dict(fits(tables, sheet, say))
    return found | _smallest(tables)


def _limits(sheet: GpuSpec, eight_bit: bool = False) -> dict[str, float]:
    faster = sheet.quantized_flops_per_s("fp8") if eight_bit else None
    return {"flops_per_s": faster or sheet.fp16_flops_per_s, "bytes_per_s": sheet.memory_bytes_per_s}


def _entry(
    points: Points, path: str, rows: int, sheet: GpuSpec, domain: str, within: _Which | None, eight_bit: bool = False
) -> _Entry:
    limits = _limits(sheet, eight_bit)
    require_rows(path, points, limits, domain, sheet.setting)
    entry = describe(points, limits, within)
    faster = int((~is_possible(points, limits)).sum())
    about = {"table": path, "rows": rows, "rows_fitted": len(points.us), "rows_above_data_sheet": faster}
    return entry | {"fit": about | entry["fit"] | {"held_out_domain": domain}}


def _delta_nets(tables: OperationTables, sheet: GpuSpec, say: Say) -> Iterator[tuple[str, _Entry]]:
    table, source = tables.read("gdn_perf"), {}
    phases: dict[OpName, str] = {"gdn_decode": "generation", "gdn_prefill": "context"}
    if table is None and tables.system is not None:
        table = OperationTables(tables.place, tables.system, OTHER_ENGINE).read("gdn_perf")
        source = {"source": _STATES_SOURCE}
        del phases["gdn_prefill"]
    if table is None:
        return
    path, frame = table
    frame = frame[(frame.head_k_dim == GDN_DIM) & (frame.head_v_dim == GDN_DIM)]
    frame = frame.assign(us=frame.latency * 1e3)
    sizes = ["batch_size", "seq_len", "num_k_heads", "num_v_heads"]
    for operation, phase in phases.items():
        rows = frame[frame.phase == phase]
        # Models share the sizes of a rank. Of each kernel the mean, then both kernels together.
        kernels = rows.groupby([*sizes, "kernel_source"]).us.mean().reset_index().groupby(sizes).us
        calls = kernels.sum()[kernels.count() == rows.kernel_source.nunique()].reset_index()
        tokens = calls.batch_size * calls.seq_len
        calls = calls[tokens <= MOST_TOKENS]
        heads = {"key_heads": calls.num_k_heads, "value_heads": calls.num_v_heads}
        if operation == "gdn_decode":
            points = Points(operation, _floats(batch=calls.batch_size, **heads), calls.us.to_numpy(float))
        else:
            given = _floats(tokens=calls.batch_size * calls.seq_len, length=calls.seq_len, **heads)
            points = Points(operation, given, calls.us.to_numpy(float))
        say(f"{sheet.name}: {operation}, {len(points.us):,} rows of {path}")
        yield operation, _entry(points, path, len(table.frame), sheet, f"heads of {GDN_DIM}", None) | source


def _sparse(tables: OperationTables, sheet: GpuSpec, say: Say) -> Iterator[tuple[str, _Entry]]:
    phases = {"decode": "generation", "prefill": "context"}
    for kind, phase in ((kind, phase) for kind in _SPARSE_MODELS for phase in phases):
        table = tables.read(f"{kind}_{phases[phase]}_module_perf")
        if table is None or (kind == "msa" and not _serves_msa(table.frame, sheet)):
            continue
        for suffix, form in _SPARSE_FORMATS.items():
            operation: Any = f"{kind}_{phase}{suffix}"
            shapes = {}
            for model, hidden_size in _SPARSE_MODELS[kind].items():
                for kv_dtype in ("bfloat16", "fp8"):
                    frame = table.frame
                    frame = frame[
                        (frame.model == model) & (frame.gemm_type == form) & (frame.kv_cache_dtype == kv_dtype)
                    ]
                    if not len(frame):
                        continue
                    points = _of_module(operation, frame, hidden_size)
                    say(f"{sheet.name}: {operation}, {len(points.us):,} rows of {table.path}, {model}, {kv_dtype} KV")
                    within = lambda points: points.column("heads") >= 8  # noqa: E731
                    shapes[sparse_name(hidden_size, kv_dtype)] = _entry(
                        points, table.path, len(frame), sheet, "8 to 128 heads", within, bool(suffix)
                    )
            if shapes:
                yield operation, _together(shapes)


def _serves_msa(frame: pd.DataFrame, sheet: GpuSpec) -> bool:
    """Whether a server has memory for MiniMax M3 in a format of its table: not one of L40S, or of RTX PRO 6000 in 16 bits."""
    return min(_MSA_BYTES[form] for form in set(frame.gemm_type) & set(_MSA_BYTES)) < _MOST_CARDS * sheet.memory_bytes


def _together(shapes: dict[str, _Entry]) -> _Entry:
    """One entry with the models of all shapes. Its coefficients are those of the first, its held-out errors of each kind the largest."""
    fits = [entry["fit"] for entry in shapes.values()]
    fit = fits[0] | {
        part: {
            kind: max((fit[part][kind] for fit in fits if kind in fit[part]), key=lambda errors: errors["median_error"])
            for kind in fits[0][part]
        }
        for part in ("held_out", "held_out_shapes")
    }
    without = {name: {part: value for part, value in entry.items() if part != "fit"} for name, entry in shapes.items()}
    return {"coefficients": next(iter(shapes.values()))["coefficients"], "fit": fit, "shapes": without}


def _of_module(operation: OpName, frame: pd.DataFrame, hidden_size: int) -> Points:
    us, sizes = frame.latency.to_numpy(float) * 1e3, {"heads": frame.num_heads}
    if not operation.startswith("msa"):
        sizes["hidden_size"] = frame.num_heads * 0 + hidden_size
    if operation.removesuffix("_fp8").endswith("_decode"):
        held = frame.batch_size * (frame.step + 1)
        return Points(operation, _floats(batch=frame.batch_size, context_tokens=held, **sizes), us)
    tokens, before = frame.batch_size * frame.isl, frame.batch_size * frame.step
    pairs = tokens * (frame.isl + 1) / 2 + tokens * frame.step
    points = Points(operation, _floats(tokens=tokens, pairs=pairs, context_tokens=tokens + before, **sizes), us)
    # A prompt of one token is a decode of MiniMax M3: on a B200 16 take 29 us, and one prompt of 16 tokens takes 62.
    alone = operation.startswith("msa") & (frame.isl.to_numpy(float) == 1)
    return points.take((points.column("tokens") <= MOST_TOKENS) & ~alone)


def _compressed(tables: OperationTables, sheet: GpuSpec, say: Say) -> Iterator[tuple[str, _Entry]]:
    for kind in _COMPRESSED:
        for phase, name in (("decode", "generation"), ("prefill", "context")):
            table = tables.read(f"dsv4_{kind}_{name}_module_perf")
            if table is None:
                return
            operation: Any = f"{kind}_{phase}"
            shapes = {}
            for model, hidden_size in _COMPRESSED_MODELS.items():
                frame = table.frame[table.frame.model.str.contains(model)]
                if not len(frame):
                    continue
                points = _of_module(operation, frame, hidden_size)
                say(f"{sheet.name}: {operation}, {len(points.us):,} rows of {table.path}, {model}")
                shapes[str(hidden_size)] = _entry(points, table.path, len(frame), sheet, "8 to 128 heads", None, True)
            if shapes:
                yield operation, _together(shapes)
    table = tables.read("mhc_module_perf")
    if table is None:
        return
    sizes = ["num_tokens", "hidden_size"]
    calls = table.frame.groupby([*sizes, "op_name"]).latency.mean().reset_index().groupby(sizes).latency
    both = (calls.sum()[calls.count() == table.frame.op_name.nunique()] * 1e3).reset_index()
    arguments = _floats(tokens=both.num_tokens, hidden_size=both.hidden_size)
    points = Points("hyper_connections", arguments, both.latency.to_numpy(float))
    say(f"{sheet.name}: hyper_connections, {len(points.us):,} rows of {table.path}")
    yield "hyper_connections", _entry(points, table.path, len(table.frame), sheet, "any number of tokens", None)


def _unpacked(tables: OperationTables, sheet: GpuSpec, say: Say) -> Iterator[tuple[str, _Entry]]:
    if tables.system is None:
        return
    table, most_flops = OperationTables(tables.place, tables.system, UNPACKING).read("gemm_perf"), marlin_flops(tables)
    if table is None or most_flops is None:
        return
    for operation, form in _UNPACKED.items():
        frame = table.frame[table.frame.gemm_dtype == form]
        if not len(frame):
            continue
        points = Points(operation, _floats(m=frame.m, n=frame.n, k=frame.k), frame.latency.to_numpy(float) * 1e3)
        points = points._replace(us=np.maximum(points.us, points.work.flops / most_flops * 1e6))
        points = points.take((points.column("n") >= 256) & (points.column("k") >= 256))
        say(f"{sheet.name}: {operation}, {len(points.us):,} rows of {table.path}")
        within = lambda points: (points.column("n") >= 512) & (points.column("k") >= 512)  # noqa: E731
        entry = _entry(points, table.path, len(table.frame), sheet, "n and k from 512", within)
        yield operation, entry | {"source": UNPACKED_SOURCE.format(most_flops / 1e12)}


def marlin_flops(tables: OperationTables) -> float | None:
    """Highest rate of experts in Marlin's kernel, in flops/s; None without a table of them."""
    experts = marlin_experts(tables)
    return None if experts is None else float(np.max(experts.points.work.flops / experts.points.us)) * 1e6


def _smallest(tables: OperationTables) -> dict[str, _Entry]:
    """The median of the shortest calls of GEMMs, of quantising activations and of convolutions."""
    shortest = {}
    for name in ("gemm_perf", "scale_matrix_perf", "gdn_perf"):
        if (table := tables.read(name)) is not None:
            shortest[name] = round(float(table.frame.latency.min()) * 1e3, 3)
    us = round(float(np.median(list(shortest.values()))), 3)
    return {"small_kernel": {"coefficients": {"t0_us": us}, "fit": {"shortest_us": shortest}}} if shortest else {}


def _floats(**columns: pd.Series) -> dict[str, np.ndarray]:
    return {name: column.to_numpy(float) for name, column in columns.items()}
