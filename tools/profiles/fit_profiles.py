"""Fit the profile of a GPU to operation tables.

    python -m tools.profiles.fit_profiles --gpu CARD.json --tables FOLDER --out profile.json

reads the tables of one card (``tables``), fits the operations that dominate a step, writes the profile, and prints the
prediction error of held-out columns and of held-out shapes. Without ``--gpu`` it fits the profiles of the package again, to the
tables that NVIDIA publishes: ``pip download aiconfigurator-core==0.12.0 --no-deps``, ``--tables WHEEL``. These are neither a
dependency nor part of the package.

bf16 rows are read, fp8 and nvfp4 rows of GEMMs with a scale a tensor, quantising the activations included, and bf16 and
block-scaled fp8 rows of latent attention; rows of other number formats and of sliding windows are skipped.

Experts have models of their own (``fit_experts``), and so have states, sparse attention and unpacked weights (``fit_modules``).
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from fragmeter.gpu.calibrate.fitting import Points, Say, describe, errors, is_possible, limit_of
from fragmeter.sim.cost import op_work, shares
from fragmeter.sim.cost.calibration import PROFILES, Calibration
from fragmeter.sim.cost.operations import OpName
from fragmeter.sim.output import frames as pd
from fragmeter.sim.output.files import require_apart, require_writable_file, write_whole
from fragmeter.sim.spec.gpu import GpuSpec, gpu
from fragmeter.sim.types.errors import UserError

from .fit_experts import FORMATS, fitted_experts
from .fit_modules import MODULES, fitted_modules
from .rows import require_rows, silent
from .tables import FRAMEWORK, OperationTables

_TABLES: dict[OpName, str] = {
    "gemm": "gemm_perf",
    "gemm_fp8": "gemm_perf",
    "gemm_nvfp4": "gemm_perf",
    "decode_attention": "generation_attention_perf",
    "prefill_attention": "context_attention_perf",
    **dict.fromkeys(("mla_decode", "mla_decode_fp8"), "mla_generation_module_perf"),
    **dict.fromkeys(("mla_prefill", "mla_prefill_fp8"), "mla_context_module_perf"),
    "all_reduce": "custom_allreduce_perf",
}
#: Without these no step can be simulated.
_REQUIRED: tuple[OpName, ...] = ("gemm", "decode_attention", "prefill_attention")
#: What stands in for a table that a card lacks.
_INSTEAD = {
    "custom_allreduce_perf": "all-reduces are assumed from the links of the data sheet",
    "moe_perf": "experts count as GEMMs",
    "mla_generation_module_perf": "models with latent attention need --cost roofline",
    "mla_context_module_perf": "models with latent attention need --cost roofline",
}
_GEMM_FORMATS: dict[OpName, str] = {"gemm": "bfloat16", "gemm_fp8": "fp8", "gemm_nvfp4": "nvfp4"}
_LATENT: tuple[OpName, ...] = ("mla_decode", "mla_decode_fp8", "mla_prefill", "mla_prefill_fp8")
#: Presets with profiles that are fitted to published tables, and their systems there.
SYSTEMS = {
    "a100-80gb": "a100_sxm", "h100-80gb": "h100_sxm", "h200": "h200_sxm",
    "b200": "b200_sxm", "b300": "b300_sxm", "gb200": "gb200", "gb300": "gb300", "l40s": "l40s",
}  # fmt: skip
#: All-reduces of more GPUs cross nodes.
_MOST_RANKS = 8
#: Newer tables have other models with latent attention, too.
_LATENT_MODEL = "deepseek-ai/DeepSeek-V3"
#: Profiles of other tables (``fit_layers``) to which fp8 GEMMs, experts and all-reduces are added.
ADDED = {"rtx-pro-6000": "rtx_pro_6000_server"}
_ADDED: tuple[OpName, ...] = ("gemm_fp8", "gemm_nvfp4", "all_reduce")
#: Profiles without tables: scaled from a card with the same chip and faster memory.
SCALED = {"a100-40gb": "a100-80gb"}
#: Share of the data sheet's bandwidth that memory delivers: of decode attention over long contexts in the tables of A100 and H200.
_DELIVERED = 0.92
LICENCE = "derived from tables under Apache-2.0, Copyright (c) 2025-2026 NVIDIA CORPORATION & AFFILIATES; see NOTICE"

Which = Callable[[Points], np.ndarray]
#: Rows that are fitted. Smaller calls occur in no layer; all tables have head_dim 128.
FITTED: dict[OpName, Which] = {
    "gemm": lambda points: (points.column("n") >= 256) & (points.column("k") >= 256),
    "gemm_fp8": lambda points: (points.column("n") >= 256) & (points.column("k") >= 256),
    "gemm_nvfp4": lambda points: (points.column("n") >= 256) & (points.column("k") >= 256),
    "decode_attention": lambda points: (points.column("head_dim") == 128) & (points.column("length") >= 64),
    "prefill_attention": lambda points: (points.column("head_dim") <= 256) & (points.column("keys") >= 8),
    **dict.fromkeys(_LATENT, lambda points: points.us > 0),
    "all_reduce": lambda points: points.us > 0,
}
#: The same in words.
_FITTED_SIZES = {
    **dict.fromkeys(("gemm", "gemm_fp8", "gemm_nvfp4"), "n and k from 256"),
    "decode_attention": "head_dim 128 and 64 tokens or more",
    "prefill_attention": "head_dim up to 256 and prompts from 15 tokens",
}
#: Domain of the held-out errors of an operation: a description, and the rows in it.
REPORTED: dict[OpName, tuple[str, Which]] = {
    "gemm": ("n and k from 512", lambda points: (points.column("n") >= 512) & (points.column("k") >= 512)),
    "gemm_fp8": ("n and k from 512", lambda points: (points.column("n") >= 512) & (points.column("k") >= 512)),
    "gemm_nvfp4": ("n and k from 512", lambda points: (points.column("n") >= 512) & (points.column("k") >= 512)),
    "decode_attention": (
        "1 to 256 sequences of 512 to 32k tokens",
        lambda points: (
            (points.column("batch") <= 256) & ((points.column("length") >= 512) & (points.column("length") <= 32_768))
        ),
    ),
    "prefill_attention": ("prompts from 64 tokens", lambda points: points.column("keys") >= 32),
    **dict.fromkeys(_LATENT, ("8 to 128 heads", lambda points: points.column("heads") >= 8)),
    "all_reduce": ("256 bytes to 1 GiB on 2, 4 and 8 GPUs", lambda points: points.us > 0),
}
# aiconfigurator's own rule for operations without tables (systems/*.yaml: "nonofficial correction").
KERNEL_US, BANDWIDTH_SHARE = 3.0, 0.8
_RULE = (
    f"aiconfigurator's rule, not measured: {KERNEL_US} us a kernel and {BANDWIDTH_SHARE} of the data-sheet bandwidth"
)


class Card(NamedTuple):
    """A GPU and the tables that its profile is fitted to.

    Attributes:
        base: Profile that keeps its operations; only those of ``_ADDED`` are fitted. None: all are.
    """

    sheet: GpuSpec
    tables: OperationTables
    base: dict[str, Any] | None = None


def card(setting: str, tables: Path) -> Card:
    """A preset with its published tables, or any GPU with the tables of a folder.

    Args:
        setting: Preset, or path of the JSON file of a GPU.
        tables: The published tables, as a wheel or an unpacked folder, or a folder with the tables of this card.

    Raises:
        UserError: There is no such GPU, or no such folder.
    """
    sheet = gpu(setting)
    system = (SYSTEMS | ADDED).get(sheet.name)
    if system is None or not OperationTables(tables).has(system):
        return Card(sheet, OperationTables(tables))
    base = json.loads((PROFILES / f"{sheet.name}.json").read_text("utf-8")) if sheet.name in ADDED else None
    return Card(sheet, OperationTables(tables, system), base)


def profiles(folder: Path, say: Say = silent) -> Iterator[tuple[str, dict[str, Any]]]:
    """Names and profiles of the package; a scaled profile follows the profile that it is scaled from.

    Args:
        folder: The published tables, as a wheel or an unpacked folder.

    Raises:
        UserError: A preset has no tables there.
    """
    for name in (*SYSTEMS, *ADDED):
        described = card(name, folder)
        if described.tables.system is None:
            system = (SYSTEMS | ADDED)[name]
            raise UserError(f"{folder}: has no tables of {system}; give the published wheel, or its unpacked folder")
        fitted = profile(described, say)
        yield name, fitted
        for other in (other for other, measured in SCALED.items() if measured == name):
            yield other, _scaled(fitted, described.sheet, gpu(other))


def profile(described: Card, say: Say = silent) -> dict[str, Any]:
    """The content of a profile.

    Args:
        say: Is called with one line before each fit, which may take a minute.

    Raises:
        UserError: A table is missing, a row is wrong, or there are too few rows.
    """
    sheet, tables, base = described
    found = dict(_found(described, say))
    ops = {operation: _fitted(table, sheet, say) for operation, table in found.items()}
    more = fitted_experts(tables, sheet, say) | fitted_modules(tables, sheet, say)
    if base is not None:
        return _added(described, base, ops | more)
    faster = [str(operation).removeprefix("gemm_") for operation in ops if operation.startswith("gemm_")]
    formats = f"bf16, GEMMs in {' and '.join(faster)}, too" if faster else "bf16"
    licence = {} if tables.system is None else {"licence": LICENCE}
    return {
        "schema_version": 1,
        "kind": "profile",
        "device": {"name": found["gemm"].device, "gpu": sheet.name, "data_sheet": sheet.source},
        "source": _source(tables, formats, found["gemm"]),
        **licence,
        "dtype": "bf16",
        "ops": ops | more | assumed(sheet),
    }


def _found(described: Card, say: Say) -> Iterator[tuple[OpName, OperationRows]]:
    """The tables of the operations to fit; all are read and checked before the first fit."""
    sheet, tables, base = described
    for operation in FITTED if base is None else _ADDED:
        if operation.startswith("gemm_") and sheet.quantized_flops_per_s(operation.removeprefix("gemm_")) is None:
            continue
        if (table := read_table(tables, operation)) is not None and len(table.points.us):
            points = _selected(table.points, sheet)
            sizes = _FITTED_SIZES.get(operation, "any sizes")
            require_rows(table.path, points, _limits(sheet, operation), sizes, sheet.setting)
            yield operation, table
        elif operation in _REQUIRED:
            what = "has no rows in bfloat16 and without a window" if table else f"is not in {tables.place}"
            raise UserError(f"{table.path if table else _TABLES[operation]}: {what}; {operation} is fitted to them")
        elif table is not None:
            say(f"{sheet.name}: {operation}, no rows in {table.path}")
    for name in (name for name in _INSTEAD if base is None and tables.read(name) is None):
        say(f"{sheet.name}: no {name}: {_INSTEAD[name]}")


def _added(described: Card, base: dict[str, Any], added: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """A profile with some operations of other tables; those that stay are compared with these tables."""
    sheet, tables = described.sheet, described.tables
    model = Calibration(json.dumps(base).encode(), sheet.name).ops
    for operation in _REQUIRED:
        points = _points_of(tables, operation)
        points = points.take(FITTED[operation](points) & is_possible(points, _limits(sheet, operation)))
        points = points.take(REPORTED[operation][1](points))
        found = {"points": len(points.us), **errors(points, model[operation].us(points.work))}
        base["ops"][operation]["fit"].setdefault("held_out_shapes", {})["other table"] = found
    source = f"{_source(tables, 'fp8 and nvfp4 GEMMs, experts, all-reduces')}; {LICENCE}"
    return base | {"ops": base["ops"] | {name: each | {"source": source} for name, each in added.items()}}


def _source(tables: OperationTables, formats: str, own: OperationRows | None = None) -> str:
    if tables.system is not None or own is None:
        return f"fitted to aiconfigurator-core's tables for {tables.system} (vLLM's kernels, {formats})"
    return f"fitted to tables of {own.device} ({own.framework}; {formats})"


def _fitted(table: OperationRows, sheet: GpuSpec, say: Say) -> dict[str, Any]:
    """An operation's entry: model, number of fitted rows, errors in total and held out."""
    operation = table.points.operation
    form, limits = operation.rpartition("_")[2], _limits(sheet, operation)
    possible = is_possible(table.points, limits)
    points = _selected(table.points, sheet)
    say(f"{sheet.name}: {operation}, {len(points.us):,} rows of {table.path}")
    domain, reported = REPORTED[operation]
    entry = describe(points, limits, reported)
    rows = {
        "table": table.path,
        "rows": table.rows,
        f"rows_{form if sheet.quantized_flops_per_s(form) else 'bf16'}": len(table.points.us),
        "rows_above_data_sheet": int((~possible).sum()),
    }
    return entry | {"fit": rows | entry["fit"] | {"held_out_domain": domain}}


def _limits(sheet: GpuSpec, operation: OpName) -> dict[str, float]:
    faster = sheet.quantized_flops_per_s(operation.rpartition("_")[2])
    return {"flops_per_s": faster or sheet.fp16_flops_per_s, "bytes_per_s": sheet.memory_bytes_per_s}


def _selected(points: Points, sheet: GpuSpec) -> Points:
    """The points of an operation that are fitted."""
    points = points.take(FITTED[points.operation](points))
    # Stacked memory is not much slower than the cache.
    if points.operation != "decode_attention" or sheet.l2_bytes is None or sheet.is_data_centre:
        return points
    read = np.asarray(points.work.bytes)
    return points.take((read <= sheet.l2_bytes / 50) | (read >= 2 * sheet.l2_bytes))


def assumed(sheet: GpuSpec) -> dict[str, Any]:
    """Operations without tables: memory-bound kernels, copies, swaps, and the host."""
    bandwidth = BANDWIDTH_SHARE * sheet.memory_bytes_per_s
    link = shares.LINK_SHARE * sheet.pcie_bytes_per_s
    swap = f"{shares.LINK_SHARE} of the data sheet's PCIe, {shares.ASSUMED}; copies by SOSP'23 Fig 19a"
    return {
        "kv_write": _entry(_RULE, t0_us=KERNEL_US, bytes_per_s=bandwidth),
        # Four kernels: norm, rotary, norm, activation.
        "elementwise": _entry(_RULE, t0_us=4 * KERNEL_US, bytes_per_s=bandwidth),
        "embedding": _entry(_RULE, t0_us=KERNEL_US, bytes_per_s=bandwidth),
        # A copy reads and writes every byte.
        "block_copy": _entry(_RULE, t0_us=KERNEL_US, bytes_per_s=bandwidth / 2),
        "swap_out": _entry(swap, bytes_per_s=link, each_us=shares.COPY_OUT_US),
        "swap_in": _entry(swap, bytes_per_s=link, each_us=shares.COPY_IN_US),
        "step": _entry(f"host work, {shares.ASSUMED}", t0_us=shares.HOST_US),
    }


def _entry(source: str, **coefficients: float) -> dict[str, Any]:
    return {"coefficients": coefficients, "source": source}


def _scaled(fitted: dict[str, Any], measured: GpuSpec, wanted: GpuSpec) -> dict[str, Any]:
    """The profile of a card with the same chip as the measured one, and other memory (``op_model.OtherMemory``)."""
    ops = {name: dict(entry) for name, entry in fitted["ops"].items()} | assumed(wanted)
    rates = {"measured_bytes_per_s": measured.memory_bytes_per_s, "bytes_per_s": wanted.memory_bytes_per_s}
    memory = {"memory": {name: round(_DELIVERED * rate) for name, rate in rates.items()}}
    # All-reduces are bound by the links, which are the same.
    for name in (name for name in (*FITTED, *FORMATS, *MODULES) if name in ops and name != "all_reduce"):
        ops[name] |= memory
        if "shapes" in ops[name]:
            ops[name]["shapes"] = {shape: entry | memory for shape, entry in ops[name]["shapes"].items()}
    source = f"those of {measured.name}, longer where the memory of {wanted.name} bounds them; not measured"
    device = fitted["device"] | {"gpu": wanted.name, "data_sheet": wanted.source}
    return fitted | {"device": device, "source": f"{fitted['source']}; {source}", "ops": ops}


def report(name: str, fitted: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line per operation and held-out column, or shapes (interpolated, extrapolated)."""
    operations = (operation for operation in (*FITTED, *FORMATS, *MODULES) if operation in fitted["ops"])
    for operation in (operation for operation in operations if "table" in fitted["ops"][operation].get("fit", {})):
        fit = fitted["ops"][operation]["fit"]
        for column, found in (fit["held_out"] | fit.get("held_out_shapes", {})).items():
            limit, skipped = limit_of(fit), fit["rows_above_data_sheet"]
            met = {"limit": limit, "met": found["median_error"] <= limit}
            yield {"gpu": name, "op": operation, "held_out": column, **found, "above_data_sheet": skipped, **met}


def reached(described: Card) -> shares.Shares:
    """Shares of the data sheet that the tables' kernels reach, as ``sim.cost.shares`` defines them: medians of GEMMs, of 64 MB
    of weights or more where these bound them, and attention with 32 heads and 8 KV heads of 128."""
    sheet = described.sheet
    gemm, decode, prefill = (_points_of(described.tables, name) for name in _REQUIRED)
    weights = op_work.ELEMENT_BYTES * gemm.column("n") * gemm.column("k")
    few, many = (gemm.column("m") <= 64) & (weights >= 64e6), _large(gemm)
    read = np.asarray(decode.work.bytes) / decode.us * 1e6 / sheet.memory_bytes_per_s
    at_decode = [
        _llama(decode) & (decode.column("batch") == batch) & (decode.column("length") // 2 == length // 2)
        for batch, length in ((32, 4096), (128, 1024))
    ]
    one = prefill.column("context_tokens") == prefill.column("keys") * 2 - 1
    at_prefill = [_llama(prefill) & one & (prefill.column("tokens") == tokens) for tokens in (1024, 4096)]
    found = [
        np.median((weights / gemm.us * 1e6 / sheet.memory_bytes_per_s)[few]),
        np.median(_flops_share(gemm, sheet)[many]),
        np.mean([read[which].mean() for which in at_decode]),
        *(_flops_share(prefill, sheet)[which].mean() for which in at_prefill),
    ]
    return shares.Shares(*(round(float(share), 3) for share in found))


def _large(points: Points) -> np.ndarray:
    return np.all([points.column(name) >= 1024 for name in ("m", "n", "k")], axis=0)


def _llama(points: Points) -> np.ndarray:
    sizes = {"heads": 32, "kv_heads": 8, "head_dim": 128}
    return np.all([points.column(name) == size for name, size in sizes.items()], axis=0)


def _flops_share(points: Points, sheet: GpuSpec) -> np.ndarray:
    return np.asarray(points.work.flops) / points.us * 1e6 / sheet.fp16_flops_per_s


def quantized_share(described: Card, form: str) -> float:
    """Share of a number format's flops over share of the 16-bit flops that the same GEMMs reach: the median over GEMMs of 1,024
    tokens or more with n and k from 1,024 (``sim.cost.shares``).

    Args:
        form: "fp8" or "nvfp4", which the GPU has.
    """
    names: tuple[OpName, OpName] = ("gemm_fp8" if form == "fp8" else "gemm_nvfp4", "gemm")
    quantized, sixteen = (_large_gemms(described.tables, name) for name in names)
    ratios = [sixteen[shape] / us for shape, us in quantized.items() if shape in sixteen]
    sheet = described.sheet
    return float(np.median(ratios)) * sheet.fp16_flops_per_s / (sheet.quantized_flops_per_s(form) or 1)


def _large_gemms(tables: OperationTables, operation: OpName) -> dict[tuple[float, ...], float]:
    points = _points_of(tables, operation)
    sizes = np.stack([points.column(name) for name in ("m", "n", "k")], axis=1)
    large = _large(points)
    return {tuple(shape): us for shape, us in zip(sizes[large].tolist(), points.us[large].tolist(), strict=True)}


def as_text(fitted: dict[str, Any]) -> str:
    """JSON with each list of numbers on one line."""
    text = json.dumps(fitted, indent=2, allow_nan=False)
    return re.sub(r"\[[-\d.,e\s]+\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def main(arguments: list[str] | None = None) -> int:
    """Fit, write and print; returns 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m tools.profiles.fit_profiles", description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", help="GPU: a preset, or its JSON file; without it the presets of the published tables")
    parser.add_argument(
        "--tables", type=Path, required=True, help="folder of the card's tables, or the published wheel"
    )
    parser.add_argument("--out", type=Path, help="profile, by default profile.json; without --gpu a folder")
    parser.add_argument("--json", type=Path, help="write the printed table there")
    options = parser.parse_args(arguments)
    try:
        if options.json:
            require_writable_file(options.json)
        if options.gpu is None:
            rows = _fit_presets(options.tables, options.out or PROFILES)
        else:
            rows = _fit_one(options.gpu, options.tables, options.out or Path("profile.json"))
        if options.json:
            write_whole(options.json, json.dumps(rows, indent=2) + "\n")
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _fit_one(setting: str, tables: Path, out: Path) -> list[dict[str, Any]]:
    require_writable_file(out)
    described = card(setting, tables)
    path = described.sheet.path
    require_apart({"--out": out}, {"--gpu": [] if path is None else [path], "--tables": [tables]})
    fitted = profile(described, to_stderr)
    write_whole(out, as_text(fitted))
    # A table of a single size has nothing to hold out.
    if rows := list(report(described.sheet.name, fitted)):
        print_rows(rows)
    used = f'"profile": "{out.name}" in {path}, beside it' if path else f"--cost {out}"
    print(f"Profile: {out}. To use it: {used}.")
    return rows


def _fit_presets(tables: Path, out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for name, fitted in profiles(tables, to_stderr):
        write_whole(out / f"{name}.json", as_text(fitted))
        # The held-out errors of a scaled profile are those of its source.
        rows += () if name in SCALED else report(name, fitted)
    print_rows(rows)
    for name in (*SYSTEMS, *ADDED):
        described = card(name, tables)
        print(f"{name}: {reached(described)}")
        for form in (form for form in ("fp8", "nvfp4") if described.sheet.quantized_flops_per_s(form)):
            print(f"{name}: {form} GEMMs reach {quantized_share(described, form):.3f} of the share of 16 bits")
    return rows


def to_stderr(line: str) -> None:
    """Report progress."""
    print(line, file=sys.stderr, flush=True)


def print_rows(rows: list[dict[str, Any]]) -> None:
    """Print rows with the same keys as a table."""
    table = Table(*rows[0], box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for row in rows:
        table.add_row(*(f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values()))
    Console(width=140).print(table)


class OperationRows(NamedTuple):
    """The rows of one table that describe an operation.

    Attributes:
        path: As ``OperationTable`` has it.
        device, framework: Name and version in the rows.
        rows: Number of rows of the whole table, including other formats and windows.
    """

    path: str
    device: str
    framework: str
    rows: int
    points: Points


def read_table(tables: OperationTables, operation: OpName) -> OperationRows | None:
    """The table of an operation; None if there is none.

    Raises:
        UserError: There are several, or a row is wrong.
    """
    found = tables.read(_TABLES[operation])
    if found is None:
        return None
    points = _points(operation, found.frame)
    framework = " ".join(filter(None, (found.said("framework"), found.said("version"))))
    device = found.said("device") or "a device without a name"
    return OperationRows(found.path, device, framework or "unknown framework", len(found.frame), points)


def _points_of(tables: OperationTables, operation: OpName) -> Points:
    found = read_table(tables, operation)
    if found is None:
        raise UserError(f"{tables.place}: has no {_TABLES[operation]} of {FRAMEWORK} for {tables.system}")
    return found.points


def _points(operation: OpName, frame: pd.DataFrame) -> Points:
    """The rows of an operation's number format as its arguments."""
    if operation in _GEMM_FORMATS:
        frame = frame[frame.gemm_dtype == _GEMM_FORMATS[operation]]
        return Points(operation, _floats(m=frame.m, n=frame.n, k=frame.k), _us(frame))
    if operation == "all_reduce":
        # Launched by a CUDA graph, as vLLM does in decode steps; without one, launches are the host's time.
        frame = frame[(frame.backend == f"{FRAMEWORK}_graph") & (frame.num_gpus <= _MOST_RANKS)]
        # Sizes are in elements: aiconfigurator asks for tokens times the hidden size.
        sizes = op_work.ELEMENT_BYTES * frame.message_size
        return Points(operation, _floats(message_bytes=sizes, ranks=frame.num_gpus), _us(frame))
    if operation in _LATENT:
        form = "fp8_block" if operation.endswith("_fp8") else "bfloat16"
        frame = frame[(frame.gemm_type == form) & (frame.kv_cache_dtype == "bfloat16")]
        frame = frame[frame.model == _LATENT_MODEL]
        if operation.startswith("mla_decode"):
            held = frame.batch_size * (frame.step + 1)
            return Points(
                operation, _floats(batch=frame.batch_size, context_tokens=held, heads=frame.num_heads), _us(frame)
            )
        tokens = frame.batch_size * frame.isl
        pairs = tokens * (frame.isl + 1) / 2
        counts = _floats(tokens=tokens, pairs=pairs, context_tokens=tokens, heads=frame.num_heads)
        return Points(operation, counts, _us(frame))
    frame = frame[(frame.attn_dtype == "bfloat16") & (frame.kv_cache_dtype == "bfloat16")]
    if "window_size" in frame:
        frame = frame[frame.window_size == 0]
    heads = {"heads": frame.num_heads, "kv_heads": frame.num_key_value_heads, "head_dim": frame.head_dim}
    if operation == "decode_attention":
        # The context has ``step`` tokens before the decoded one.
        return Points(
            operation,
            _floats(batch=frame.batch_size, context_tokens=frame.batch_size * (frame.step + 1), **heads),
            _us(frame),
        )
    tokens = frame.batch_size * frame.isl
    counts = _floats(tokens=tokens, pairs=tokens * (frame.isl + 1) / 2, context_tokens=tokens, **heads)
    return Points(operation, counts, _us(frame))


def _floats(**columns: pd.Series) -> dict[str, np.ndarray]:
    return {name: column.to_numpy(float) for name, column in columns.items()}


def _us(frame: pd.DataFrame) -> np.ndarray:
    return frame.latency.to_numpy(float) * 1e3


if __name__ == "__main__":
    sys.exit(main())
