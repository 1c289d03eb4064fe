"""The verdicts of ``gpu/results`` by the rules of today, from their raw times: ``python docs/validations.py`` prints the tables, and
``--write`` writes them into docs/gpu.md.

``sizes.json`` has what the files of a validation from before 2026-11-29 lack: the sizes of the steps of runs and of the calibration, and
the part of each predicted step that is attention. They were computed once, by the program that had served the runs, from each folder's
calibration; its steps and predicted times are those of ``steps.csv``.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.gpu.validate import acceptance
from fragmeter.gpu.validate.acceptance import Run, Sizes
from fragmeter.reports.page.table import markdown

PAGE = Path(__file__).with_name("gpu.md")
RESULTS = Path(__file__).parents[1] / "gpu" / "results"
BEGIN, END = "<!-- verdicts -->", "<!-- end of verdicts -->"


def folders() -> list[Path]:
    """Folders of cards with a validation, from the oldest on."""
    return sorted(path for path in RESULTS.iterdir() if (path / "validation").is_dir())


def runs_of(folder: Path) -> list[Run]:
    """The runs of a folder's validation."""
    validation = folder / "validation"
    sizes = json.loads((validation / "sizes.json").read_text())
    fitted, fitted_us = _calibrated(sizes["calibration_steps"])
    with (validation / "steps.csv").open() as file:
        rows = list(csv.DictReader(file))
    found = []
    for run in _document(folder)["runs"]:
        mine, known = [row for row in rows if row["run"] == run["run"]], sizes["runs"][run["run"]]
        predicted, *samples = (
            np.array([float(row[name]) for row in mine])
            for name in ("predicted_us", *(name for name in rows[0] if name.startswith("repetition_")))
        )
        of_steps = Sizes(*(np.array(known[name]) for name in ("decodes", "context_tokens", "prompt_tokens")))
        nulls = acceptance.null_models(of_steps, fitted, fitted_us)
        attention = np.array(known["attention_us"])
        # On a GPU the median of the repetitions is the measured time.
        found.append(Run(run["run"], predicted, attention, np.array(samples), 0.5, nulls, run["read_bytes"]))
    return found


def _calibrated(steps: list[dict[str, float]]) -> tuple[Sizes, np.ndarray]:
    columns = (
        np.array([step[name] for step in steps]) for name in ("decodes", "context_tokens", "prompt_tokens", "us")
    )
    *sizes, us = columns
    return Sizes(*sizes), us


def _document(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "validation" / "validation.json").read_text()))


def tables() -> str:
    """The verdicts and, of each run, its errors beside those of the null models."""
    verdicts, beside = [], []
    for folder in folders():
        runs, document = runs_of(folder), _document(folder)
        found = acceptance.acceptance(runs)
        then = "yes" if document["acceptance"]["validated"] else "no"
        noticed = (f"{100 * found['noticed'][what]:.1f} %" for what in acceptance.PLANTED)
        reasons = "; ".join(found["reasons"]) or "none"
        name = f"[{folder.name}](../gpu/results/{folder.name}/summary.md)"
        verdicts.append((name, then, "yes" if found["validated"] else "no", *noticed, reasons))
        beside += _beside(folder, runs)
    columns = ("run of a card", "validated then", "by today's rules", "notices, of time", "of attention", "reasons")
    errors = ("run of a card", "run", "ours", *acceptance.NULLS, "noise")
    return "\n".join([*markdown(columns, verdicts), "", *markdown(errors, beside)])


def _beside(folder: Path, runs: list[Run]) -> Iterator[tuple[str, ...]]:
    for run in runs:
        noise = run.noise["step_mape"] if run.noise else 0.0
        errors = (run.error, *run.null_errors.values(), noise)
        yield folder.name, run.name, *(f"{100 * error:.1f} %" for error in errors)


def page(text: str) -> str:
    """The page with the tables of now."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n\n{tables()}\n\n{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print(tables())
