"""``fragmeter validate --against``: replay, compare, turn the knobs, tell."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from ...sim.output import frames as pd
from ...sim.output.files import as_json
from ...sim.output.folders import FolderKind, OutputFolder
from ...traces import measured, read
from ..runs.output import Report, track
from .knobs import ranked, turned
from .replay import compared, replay, scatter, total_error
from .start import Server, benchmark, replica
from .text import tell

SCHEMA_VERSION = 1
#: Knobs that are turned, all together among them.
_MOST_KNOBS = 4
RESULT, REQUESTS = "against.json", "requests.parquet"
AGAINST = FolderKind("comparison with a server", (RESULT, REQUESTS))


def hold_against(path: Path, metrics: Path | None, server: Server, folder: OutputFolder | None, report: Report) -> None:
    """Hold a replica against a benchmark.

    Raises:
        UserError: As ``against_start`` says, or there is no place for the results.
    """
    chosen = replica(server, measured(path, read(path)).model_id)
    bench = benchmark(path, metrics, chosen)
    report.say(f"{chosen.policy}: {chosen.model} on {chosen.gpu}, held against", style="bold")
    base = replay(bench, chosen)
    rows = compared(bench, base)
    error = total_error(rows)
    knobs = list(track(turned(bench, chosen, base), "Trying what to calibrate", _MOST_KNOBS))
    tell(bench, base, rows, knobs, error, report)
    pairs = scatter(bench, base)
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": chosen.as_dict(),
        "benchmark": path.name,
        "requests": len(bench.trace),
        "failed": bench.trace.left_out.failed,
        "refused": int(base.run.refused.sum()),
        "server_metrics": None if bench.metrics is None else asdict(bench.metrics),
        "rows": rows,
        "error": error,
        "calibrate_first": [knob.name for knob in ranked(knobs)],
        "knobs": [knob.as_dict() for knob in knobs],
    }
    if folder is not None:
        folder.write(RESULT, as_json(document))
        folder.write(REQUESTS, pd.DataFrame(pairs).to_parquet(index=False))
        report.point_to("Results", folder.path)
    report.data(document | {"scatter": pairs})
