"""``summary.md`` of a GPU day, from the JSON files of its parts that exist."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from ...sim.types.optional import not_none
from ..bench.table import HEADINGS, line

Found = dict[str, Any]


def summary(out: Path) -> str:
    """The page, in Markdown."""
    run = not_none(_read(out, "run"))
    sections = [_section(name, found) for name in SECTIONS if (found := _read(out, name))]
    return "\n\n".join([_heading(run, _device(out)), _parts(run), *sections]) + "\n"


def _section(name: str, found: Found) -> str:
    """A part's section. A fault in formatting it must not hide the other parts, so the section names the fault instead."""
    try:
        return SECTIONS[name](found)
    except Exception as error:
        return f"## {name}\n\n{name}.json exists and cannot be shown: {type(error).__name__}: {error}"


def _read(out: Path, name: str) -> Found | None:
    path = out / f"{name}.json"
    return json.loads(path.read_text()) if path.exists() else None


def _device(out: Path) -> str:
    """The device, from the first part's file that describes it."""
    measured = (_read(out, name) for name in ("ceiling", "bench", "grid"))
    device = next((found["device"] for found in measured if found), {"name": "no device answered"})
    driver = device.get("driver")
    return f"{device.get('name')}, driver {driver}" if driver else f"{device.get('name')}"


def _heading(run: Found, device: str) -> str:
    where = f"# GPU day on {run['device']}: {device}"
    return f"{where}\n\nfragmeter {run['fragmeter']}, {run['written']}, {run['seconds']:.0f} s in all."


def _parts(run: Found) -> str:
    rows = [
        (part["name"], part["state"], f"{part['seconds']:.1f}", ", ".join(part["files"]), part["error"] or "")
        for part in run["parts"]
    ]
    return _table(("part", "state", "seconds", "files", "why"), rows)


def _doctor(found: Found) -> str:
    rows = [(part["name"], "yes" if part["works"] else "no", part["found"]) for part in found["parts"]]
    return "## What works\n\n" + _table(("part", "works", "found"), rows)


def _smoke(found: Found) -> str:
    return _grid(found).replace("## Correctness", "## Correctness of a few points", 1)


def _grid(found: Found) -> str:
    rows = [
        (
            row["kernel"],
            row["dtype"],
            row["points"],
            row["failed"],
            _scientific(row["worst_error"]),
            f"{row['tolerance']:.0e}",
        )
        for row in found["summary"]
    ]
    headings = ("kernel", "dtype", "points", "failed", "worst error", "allowed")
    return "## Correctness, against float64\n\n" + _table(headings, rows)


def _modules(found: Found) -> str:
    kernels = found["kernels"]
    rows = [
        (row["kernel"], row.get("registers", "-"), row.get("local_bytes", "-"), row["error"] or "")
        for row in kernels
        if row["error"] or row["local_bytes"]
    ]
    text = f"## Kernels\n\n{len(kernels)} compiled in {found['compile_s']:.0f} s and loaded"
    if not rows:
        return f"{text}; none fails or needs local memory."
    headings = ("kernel", "registers", "local bytes", "error")
    return f"{text}; those that fail or need local memory:\n\n" + _table(headings, rows)


def _graphs(found: Found) -> str:
    rows = [
        (check["name"], "yes" if check["passes"] else "no", _scientific(check["error"]), check["tolerance"])
        for check in found["checks"]
    ]
    return "## Captured against eager\n\n" + _table(("what", "the same", "error", "allowed"), rows)


def _cpp_face(found: Found) -> str:
    checks = found["checks"]
    passed, equal = (sum(check[name] for check in checks) for name in ("passes", "equal"))
    counts = f"{passed} of {len(checks)} calls pass, {equal} have Python's bits"
    return f"## C++ face\n\nA torch extension, built in {found['build_s']:.0f} s: {counts}."


def _replay(found: Found) -> str:
    rows = f"{found['checked_rows']:,} rows of {found['checked_steps']:,} steps of a {found['plan']['policy']} plan"
    summary = f"{rows}: {found['wrong_rows']:,} wrong, relative L2 at most {_scientific(found['worst_error'])}."
    wrong = "".join(f"\n- {mismatch}" for mismatch in found["mismatches"])
    return f"## The simulator's own block tables\n\n{summary}\n{wrong}".rstrip()


def _ceiling(found: Found) -> str:
    rows = [(copy["kind"], f"{copy['bytes_per_s'] / 1e9:.1f}") for copy in found["copies"]]
    sheet = found["data_sheet_bytes_per_s"]
    sheet_line = f"\n\nData sheet: {sheet / 1e9:.0f} GB/s." if sheet else ""
    return "## Copies\n\n" + _table(("kind", "GB/s"), rows) + sheet_line


def _bench(found: Found) -> str:
    return "\n".join(["## Decode attention", "", "```", HEADINGS, *map(line, found["rows"]), "```"])


def _compare(found: Found) -> str:
    return _bench(found).replace("## Decode attention", "## Decode attention by others", 1)


def _calibration(found: Found) -> str:
    rows = []
    for name, entry in found["ops"].items():
        fit = entry["fit"]
        held = ", ".join(f"{by} {error['median_error']:.1%}" for by, error in fit["held_out"].items())
        errors = (f"{fit[error]:.1%}" for error in ("spread", "median_error", "mape", "bias"))
        rows.append((name, fit["points"], *errors, held or "-"))
    title = f"## Calibration: {found['model']}, {found['dtype']}{', quick' if found['quick'] else ''}"
    headings = ("operation", "points", "spread", "median error", "mean error", "bias", "median error, held out")
    return f"{title}\n\n" + _table(headings, rows)


def _validation(found: Found) -> str:
    """The validation results; a stopped validation has only the parts that it completed."""
    sections: dict[str, Callable[[Any], str]] = {
        "acceptance": _acceptance,
        "runs": _runs,
        "operations": _operations,
        "allocation": _allocation,
        "attention": _attention,
    }
    shown = [section(found[name]) for name, section in sections.items() if name in found]
    if "start_up" in found:
        shown.append(_start_up(found["start_up"]))
    return "\n\n".join([f"## Validation: {found['model']}, predicted against measured", *shown])


def _acceptance(found: Found) -> str:
    reasons = "".join(f"\n- {reason}" for reason in found["reasons"])
    noticed = [f"{what} {'-' if least is None else f'{least:.1%}'}" for what, least in found["noticed"].items()]
    return f"Validated: {'yes' if found['validated'] else 'no'}. Errors noticed from: {', '.join(noticed)}.\n{reasons}".rstrip()


def _runs(runs: Iterable[Found]) -> str:
    """Throughputs and errors of steps, and beside these the null models and the noise."""
    runs = list(runs)
    nulls = list(runs[0]["nulls"])
    throughputs = [
        (
            run["run"],
            *_errors(run["step"]),
            f"{run['predicted_tokens_per_s']:,.1f}",
            f"{run['measured_tokens_per_s']:,.1f}",
            f"{run['throughput_error']:+.1%}",
        )
        for run in runs
    ]
    beside = [
        (
            run["run"],
            f"{run['step']['mape']:.1%}",
            *(f"{run['nulls'][name]['mape']:.1%}" for name in nulls),
            "-" if run["times_better"] is None else f"{run['times_better']:.2f}",
            f"{run['noise']['step_mape']:.1%}" if run["noise"] else "-",
            f"{run['read_bytes']['kv_share']:.0%}",
        )
        for run in runs
    ]
    headings = ("mean error of a step", "ours", *nulls, "times better", "noise", "KV of the bytes read")
    tables = [
        _table(("run", *ERRORS, "predicted tokens/s", "measured", "error"), throughputs),
        _table(headings, beside),
    ]
    return "\n\n".join(tables)


def _operations(operations: Found) -> str:
    return _table(("operation", *ERRORS), [(name, *_errors(error)) for name, error in operations.items()])


def _allocation(allocation: Found) -> str:
    rows = [
        (
            f"{name} a block allocated",
            found["count"],
            *(found[side][rank] for side in ("measured", "predicted") for rank in ("p50_ms", "p99_ms")),
        )
        for name, found in allocation.items()
    ]
    return _table(("decode steps, ms", "steps", "p50", "p99", "predicted p50", "predicted p99"), rows)


def _attention(shapes: Iterable[Found]) -> str:
    rows = [
        (f"{one['batch']} x {one['context']}", one["paged_us"], one["contiguous_us"], f"{one['overhead']:+.1%}")
        for one in shapes
    ]
    return _table(("decode attention, us", "paged", "contiguous", "paged adds"), rows)


def _start_up(found: Found) -> str:
    times = f"{found['measured_ms']:,.1f} ms, predicted {found['predicted_ms']:,.1f} ms ({found['error']:+.1%})"
    return f"A prompt of {found['prompt_tokens']:,} tokens in {found['chunks']} chunks starts up in {times}."


def _serving(found: Found) -> str:
    """Each figure of requests served on the device's own clock, predicted before; and the ratios of throughputs."""
    figures = ("requests_per_s", "tpot_ms", "ttft_ms")
    rows = [
        (
            f"{run['policy']} at {run['load']:g}",
            *(
                f"{run[figure]['predicted']:.4g}, {run[figure]['measured']:.4g} ({run[figure]['error']:+.1%})"
                for figure in figures
            ),
            f"{run['preemptions']['predicted']}, {run['preemptions']['samples']}",
            ", ".join(f"{name} {off:.2f}" for name, off in run.get("of_limits", {}).items()),
        )
        for run in found["runs"]
    ]
    ratios = [
        (
            f"{one['policy']} over {one['than']} at {one['load']:g}",
            *(f"{one[side]:.3f}" for side in ("predicted", "measured")),
            f"{one['error']:+.1%}",
        )
        for one in found["ratios"]
    ]
    reasons = "".join(f"\n- {reason}" for reason in found["acceptance"]["reasons"])
    title = f"## Served on the device's own clock, predicted before (sha256 {found['prediction']['sha256'][:16]})"
    verdict = f"Within its limits: {'yes' if found['acceptance']['passes'] else 'no'}.\n{reasons}".rstrip()
    tables = [
        _table(
            ("predicted, measured", "requests/s", "TPOT, ms", "TTFT, ms", "preemptions", "errors of their limits"), rows
        ),
        _table(("ratio of requests/s", "predicted", "measured", "error"), ratios),
    ]
    return "\n\n".join([title, verdict, *tables])


#: Columns of the errors of steps, in the order of :func:`_errors`.
ERRORS = ("steps", "mean error", "p95", "bias", "of the sum")


def _errors(error: Found) -> tuple[Any, ...]:
    shares = (f"{error['mape']:.1%}", f"{error['p95']:.1%}", f"{error['bias']:+.1%}", f"{error['total_bias']:+.1%}")
    return error["count"], *shares


#: Formatters by file name, in the order of the page.
SECTIONS: dict[str, Callable[[Found], str]] = {
    "doctor": _doctor,
    "smoke": _smoke,
    "ceiling": _ceiling,
    "bench": _bench,
    "compare": _compare,
    "calibration": _calibration,
    "validation/validation": _validation,
    "serving": _serving,
    "replay": _replay,
    "graphs": _graphs,
    "cpp_face": _cpp_face,
    "grid": _grid,
    "modules": _modules,
}


def _scientific(error: float | None) -> str:
    """A formatted error; JSON stores NaN as null."""
    return "no number" if error is None else f"{error:.1e}"


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "\n".join("| " + " | ".join(str(cell).replace("|", "\\|") for cell in line) + " |" for line in lines)
