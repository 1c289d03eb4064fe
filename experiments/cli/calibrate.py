"""``fragmeter calibrate``."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from ...gpu.devices import devices
from ...reports.page.table import Table
from ...sim.output.files import as_json, require_apart, write_whole
from ...sim.recording.probe import read_probe
from ...sim.spec import model as model_of
from ...sim.types.bounds import BlockSize, Seed
from ..measured.step_fit import fitted
from ..runs.inputs import named_files
from ..runs.output import RESULT_FILE, JsonTarget, Report, track
from ..runs.unread import refuse_flags


def calibrate(
    *,
    device: str | None = None,
    model: str | None = None,
    dtype: Literal["fp32", "fp16", "bf16"] | None = None,
    kv_cache_dtype: Literal["auto", "fp8"] | None = None,
    block_size: BlockSize | None = None,
    quick: bool = False,
    seed: Seed | None = None,
    probe: Path | None = None,
    out: Annotated[Path, RESULT_FILE] = Path("calibration.json"),
    json: JsonTarget = None,
) -> None:
    """Measure the operations of a step on a device, or fit step times to a server's recording.

    Args:
        device: cpu, cuda, or cuda:N. By default cpu.
        model: Preset, org/name on the Hugging Face hub, or path of a config.json or its folder, of an OPT- or
            Llama-like model; its shapes are measured. By default the one that validate takes: on a GPU llama-3.1-8b, with less than
            60 GB llama-3.2-3b, with less than 30 GB llama-3.2-1b; on a CPU, and with --quick, toy-llama.
        dtype: Number format of weights, activations and KV. By default fp32 on a CPU and fp16 on a GPU.
        kv_cache_dtype: Number format of the KV cache: auto, the default, is dtype; fp8 (e4m3) takes dtype fp16 or bf16 on a GPU. The file
            prices runs with this KV cache alone.
        block_size: Tokens per KV block. By default 16.
        quick: Few points, for a first try.
        seed: Seed of weights, block tables and lengths. By default 0.
        probe: Recording of a live vLLM server (fragmeter.probe). Fits the times of its steps; no device is measured,
            and the file is for this model on this server alone.
        out: File for the calibration, an argument of --cost.
    """
    report = Report(json, out=out)
    if probe is not None:
        measuring = {"device": device, "model": model, "dtype": dtype, "kv_cache_dtype": kv_cache_dtype}
        remedy = "has no effect with --probe, which measures no device; leave it out"
        refuse_flags(remedy, **measuring, block_size=block_size, quick=quick, seed=seed)
        require_apart({"out": out, "json": json}, {"probe": [probe]})
        _fit(probe, out, report)
        return
    require_apart({"out": out, "json": json}, named_files(model=model))
    named = None if model is None else model_of(model)
    opened = devices.open_timed(device or "cpu")
    spec = named or model_of("toy-llama" if quick else devices.usual_model(devices.memory_bytes(opened)))
    # Needs torch, which an open device has imported.
    from ...gpu.calibrate.calibrate import calibrate as measure

    watch = partial(track, subject="Measuring")
    found = measure(
        spec, opened, dtype, 16 if block_size is None else block_size, quick, seed or 0, watch, kv_cache_dtype or "auto"
    )
    write_whole(out, as_json(found))
    _print(found, report)
    report.point_to("Calibration", out)
    report.data({name: value for name, value in found.items() if name != "points"} | {"path": str(out)})


def _fit(probe: Path, out: Path, report: Report) -> None:
    run = read_probe(probe)
    found = fitted(run.header, run.steps, f"fitted to the steps of {probe.name}")
    write_whole(out, as_json(found))
    fit = found["fit"]
    report.print_line(f"{run.header['model']}, vLLM {run.header['vllm']}", style="bold")
    report.print_line(
        f"{fit['steps']} steps, median error {fit['median_error']:.1%}, p90 {fit['p90_error']:.1%}, in sample."
    )
    report.point_to("Step times", out)
    report.data(found | {"path": str(out)})


def _print(found: dict[str, Any], report: Report) -> None:
    kept = " with a KV cache of fp8" if found["kv_cache_dtype"] == "fp8" else ""
    report.print_line(f"{found['model']} in {found['dtype']}{kept} on {found['device']['name']}", style="bold")
    table = Table("", "points", "spread", "median error", "mean", "held out", "bias")
    for name, entry in found["ops"].items():
        fit = entry["fit"]
        held = max((error["median_error"] for error in fit["held_out"].values()), default=None)
        errors = (fit["spread"], fit["median_error"], fit["mape"], held, fit["bias"])
        table.add_row(name, str(fit["points"]), *map(_percent, errors))
    report.console.print(table)
    report.print_line(
        "Spread: interquartile range of the samples over their time, in the median. Errors are of the fitted models at the points "
        "they were fitted to, and held out: at points left out."
    )
    if (share := found.get("repeated_reads")) is not None:
        report.print_line(f"A repeated read of KV takes {share} of the time of a first one (repeated_reads).")


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:.1%}"
