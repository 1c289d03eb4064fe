"""The verdicts of ``gpu/results`` by the rules of today, from their raw times, and what a validation reads on cards of other sizes:
``python docs/validations.py`` prints the tables, and ``--write`` writes them into docs/results/gpu.md.

``sizes.json`` has what the files of a validation from before 2026-11-29 lack: the sizes of the steps of runs and of the calibration, and
the part of each predicted step that is attention. They were computed once, by the program that had served the runs, from each folder's
calibration; its steps and predicted times are those of ``steps.csv``.
"""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fragmeter.experiments.measured.repriced import priced
from fragmeter.experiments.measured.validation import chosen_steps
from fragmeter.experiments.measured.validation_runs import BLOCK_SIZE, RUNS, Loads, gpu_scale, room_of
from fragmeter.gpu.devices.devices import usual_model
from fragmeter.gpu.validate import acceptance
from fragmeter.gpu.validate.acceptance import Run, Sizes
from fragmeter.reports.page.table import filled, markdown
from fragmeter.sim import Settings
from fragmeter.sim.cost import cost, default_cost
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.spec.deployment import Deployment
from fragmeter.sim.types.ticks import PER_SECOND

PAGE = Path(__file__).parent / "results" / "gpu.md"
RESULTS = Path(__file__).parents[1] / "gpu" / "results"
#: Presets of which what a validation reads is computed.
CARDS = ("a100-40gb", "a100-80gb", "l40s", "a10", "rtx-4090", "rtx-5080", "h100-80gb", "h200")
#: A run that shows errors of attention: its share of KV, and the sequences of its median step.
SHOWS_KV, SHOWS_ROWS = 0.4, 16
#: Of a card's memory what a driver leaves to programs.
_USABLE = 0.985


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


class Read(NamedTuple):
    """What the timed steps of a run read.

    Attributes:
        kv_share: KV in the bytes.
        rows: Sequences that decode in the median step.
        timed_s: Predicted seconds of all passes.
    """

    kv_share: float
    rows: int
    timed_s: float

    @property
    def shows(self) -> bool:
        """Whether the run shows errors of attention."""
        return self.kv_share >= SHOWS_KV and self.rows >= SHOWS_ROWS


def reads_of(card: str, names: Iterable[str] = RUNS) -> dict[str, Read]:
    """What runs of ``fragmeter validate`` would read on a card, with step times of its profile."""
    preset, name = gpu(card), model_of(card)
    spec, room = model(name), room_of(int(_USABLE * preset.memory_bytes), name, "fp16")
    times = default_cost(spec, preset)
    price = cost(times, spec, preset, block_size=BLOCK_SIZE, deployment=Deployment(cuda_graphs=True))
    scale = gpu_scale(name, room)
    loads, found = Loads(scale, 1, price, room), {}
    for run in names:
        served = loads.served(run)
        common = {"model": name, "gpu": card, "cost": times, "seed": 1, "block_size": BLOCK_SIZE}
        one = priced(Settings(**common, **served.settings), served.workload, served.shuffle_ids, price)
        steps = chosen_steps(one.plan, scale.timed_steps)
        share = acceptance.read_bytes(one.plan, spec, 2, steps.tolist())["kv_share"]
        rows = int(np.median(acceptance.sizes_of(one.plan, steps.tolist()).sequences))
        found[run] = Read(share, rows, scale.rounds * float(one.ticks(price)[steps].sum()) / PER_SECOND)
    return found


def model_of(card: str) -> str:
    """The model that is validated on a card by default."""
    return usual_model(gpu(card).memory_bytes)


def cards() -> str:
    """What the runs read on cards of several sizes."""
    rows = []
    for card in CARDS:
        reads = reads_of(card)
        shares = (f"{run} {read.kv_share:.0%} ({read.rows})" for run, read in reads.items() if read.shows)
        seconds = sum(read.timed_s for read in reads.values())
        rows.append((card, model_of(card), ", ".join(shares), f"{seconds:.0f} s"))
    columns = (
        "card",
        "model",
        f"runs with {SHOWS_KV:.0%} of KV and {SHOWS_ROWS} sequences or more",
        "timed steps, predicted",
    )
    return "\n".join(markdown(columns, rows))


def tables() -> str:
    """The verdicts and, of each run, its errors beside those of the null models."""
    verdicts, beside = [], []
    for folder in folders():
        runs, document = runs_of(folder), _document(folder)
        found = acceptance.acceptance(runs)
        then = "yes" if document["acceptance"]["validated"] else "no"
        noticed = (f"{100 * found['noticed'][what]:.1f} %" for what in acceptance.PLANTED)
        reasons = "; ".join(found["reasons"]) or "none"
        name = f"[{folder.name}](../../gpu/results/{folder.name}/summary.md)"
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


#: What stands between markers of the page, by the name of the marker.
PARTS: dict[str, Callable[[], str]] = {"verdicts": tables, "cards": cards}


def page(text: str, names: Iterable[str] = PARTS) -> str:
    """The page with parts as they are now."""
    return filled(text, {name: PARTS[name]() for name in names})


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text()))
    else:
        print("\n\n".join(part() for part in PARTS.values()))
