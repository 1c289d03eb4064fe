"""The results of ``make server-check`` as one document, and as a table."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import fsum
from pathlib import Path
from typing import Any

from fragmeter.experiments.measured.step_fit import LEAST_STEPS, fit_steps, step_table
from fragmeter.sim.cost.steps import FittedSteps, read_steps
from fragmeter.sim.output.files import as_json, write_whole
from fragmeter.sim.recording.probe import read_probe
from fragmeter.sim.types.ticks import PER_MS

from .decisions import compare_decisions
from .loads import CALIBRATION, Session
from .prediction import NULL_MODELS, RecordedLoad, calibrate, judged, null_models, predict, recorded, settings_of

SCHEMA_VERSION = 1
#: Largest error of each metric that is judged; twice the noise is accepted, too.
LIMITS = {
    "output_throughput": 0.03,
    "mean_tpot_ms": 0.05,
    "median_tpot_ms": 0.05,
    "mean_ttft_ms": 0.10,
    "median_ttft_ms": 0.10,
    "num_preemptions": 0.05,
}


def results(out: Path, repetitions: int, sessions: Sequence[Session], model: Path | None) -> dict[str, Any]:
    """Compare the recordings in a folder. Writes ``cost.json`` beside them.

    Args:
        repetitions: Recordings of each session, in folders 1, 2, ...
        model: ``config.json`` of the model; None if the recordings have it.

    Raises:
        UserError: A recording cannot be read, or is not of these loads.
    """
    decisions, served = [], {}
    for repetition in range(1, repetitions + 1):
        for session in sessions:
            folder = out / str(repetition) / session.name
            config = model or folder / "model" / "config.json"
            probe = read_probe(folder / "probe.jsonl.gz", digests=True)
            served[repetition, session.name] = recorded(session, folder, config, probe)
            compared = compare_decisions(probe, settings_of(probe.header, config))
            about = json.loads((folder / "session.json").read_text())
            decisions.append(
                {"repetition": repetition, "session": session.name, "loads": len(session.loads)}
                | asdict(compared)
                | {"difference": str(compared.difference) if compared.difference else None}
                | {"start_s": about["start_s"], "loads_s": about["loads_s"]}
            )
    first = served[1, CALIBRATION[0]][CALIBRATION[1]]
    source = f"load {CALIBRATION[1]} on one server, vLLM {first.header['vllm']}"
    fitted = calibrate(first, source)
    text = as_json(fitted)
    write_whole(out / "cost.json", text)
    cost = read_steps(text.encode(), "cost.json")
    costs = {"simulated": cost, **null_models(first, cost.outside_ticks / PER_MS)}
    loads = {}
    for session in sessions:
        for load in session.loads:
            same = [served[repetition, session.name][load.name] for repetition in range(1, repetitions + 1)]
            loads[f"{session.name}/{load.name}"] = _judged(same, costs)
    return {
        "schema_version": SCHEMA_VERSION,
        "server": dict(first.header),
        "calibration": fitted,
        "calibrated_on": "/".join(CALIBRATION),
        "decisions": decisions,
        "loads": loads,
    }


def _judged(same: list[RecordedLoad], costs: Mapping[str, FittedSteps]) -> dict[str, Any]:
    replayed = {name: predict(same[0], cost) for name, cost in costs.items()}
    table = step_table(same[0].steps)
    own = fit_steps(table)["coefficients"]["context_us"] if len(table["ns"]) >= LEAST_STEPS else None
    return {
        "steps": len(same[0].steps),
        "metrics": judged(same, replayed),
        "own_context_us": own,
        "repeated_share": float(table["repeated_slots"].sum() / max(1, table["decode_context"].sum())),
    }


def misses(metrics: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """The judged metrics of a load with an error beyond the limit and beyond twice the noise."""
    found = []
    for name, limit in LIMITS.items():
        row = metrics.get(name)
        if row is None or row["simulated_error"] is None:
            continue
        if abs(row["simulated_error"]) > max(limit, 2 * (row["noise"] or 0.0)):
            found.append(name)
    return found


def mean_error(metrics: Mapping[str, Mapping[str, float | None]], model: str) -> float:
    """Mean absolute error of a model over the judged metrics."""
    errors = [metrics[name][f"{model}_error"] for name in LIMITS if name in metrics]
    known = [abs(error) for error in errors if error is not None]
    return fsum(known) / len(known)


def table(found: Mapping[str, Any]) -> Iterator[str]:
    """Lines for a terminal."""
    for each in found["decisions"]:
        where = f"{each['session']} {each['repetition']}: {each['requests']} requests, {each['steps']} steps"
        counts = f"{each['preemptions']} preemptions, {each['evicted_blocks']} blocks evicted"
        yield f"{where}, {counts}: {each['difference'] or 'every decision equal'}"
    yield f"{'':24}{'metric':18}{'measured':>10}{'noise':>8}{'simulated':>11}{'error':>8}  null: {', '.join(NULL_MODELS)}"
    for name, load in found["loads"].items():
        missed = misses(load["metrics"])
        for metric in LIMITS:
            if (row := load["metrics"].get(metric)) is None:
                continue
            errors = [_percent(row[f"{model}_error"]) for model in ("simulated", *NULL_MODELS)]
            mark = "  miss" if metric in missed else ""
            values = f"{row['measured']:10.1f}{_percent(row['noise']):>8}{row['simulated']:11.1f}{errors[0]:>8}"
            nulls = "".join(f"{error:>8}" for error in errors[1:])
            yield f"{name:24}{metric:18}{values}  {nulls}{mark}"
        means = [f"{mean_error(load['metrics'], model):.1%}" for model in ("simulated", *NULL_MODELS)]
        nulls = "".join(f"{error:>8}" for error in means[1:])
        yield f"{name:24}{'mean error':18}{'':29}{means[0]:>8}  {nulls}"


def _percent(share: float | None) -> str:
    return "" if share is None else f"{share:+.1%}"
