"""Writes the computed parts of docs/results/real-server.md from the results of ``make server-check``."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from fragmeter.reports.page.table import filled, markdown
from fragmeter.sim.metrics.registry import METRICS
from tools.live.prediction import NULL_MODELS
from tools.live.results import LIMITS, mean_error, misses

PAGE = Path(__file__).parent / "results" / "real-server.md"
#: Ends of the names of loads in which the server is full.
FULL = ("-saturated", "-closed")
_NAMES = {path: METRICS[path].heading if path in METRICS else "preemptions" for path in LIMITS}


def parts(found: Mapping[str, Any]) -> dict[str, str]:
    """The parts of the page that are computed, by the names of their places."""
    predicted = {name: load for name, load in found["loads"].items() if name != found["calibrated_on"]}
    full = [load for name, load in predicted.items() if name.endswith(FULL)]
    fit, missed = found["calibration"]["fit"], sum(len(misses(load["metrics"])) for load in predicted.values())
    judged = sum(
        load["metrics"][name]["simulated_error"] is not None
        for load in predicted.values()
        for name in LIMITS
        if name in load["metrics"]
    )
    best = sum(nearer(load, NULL_MODELS) for load in full)
    better = sum(nearer(load, ("constant", "tokens")) for load in full)
    tables = {
        "decisions": _decisions(found["decisions"]),
        "waste": _waste(found["decisions"]),
        "times": _times(found["loads"]),
        "means": _means(found["loads"]),
    }
    return {name: "\n".join(lines) for name, lines in tables.items()} | {
        "vLLM": found["server"]["vllm"],
        "loads": str(len(found["loads"])),
        "outside": f"{found['calibration']['outside_ms']:.1f}",
        "fit": f"{fit['steps']:,} steps, median error of the fit {fit['median_error']:.1%}",
        "judged": f"Of {judged} figures of runs that were not calibrated on, {missed} miss their limit, in bold.",
        "nearer": f"{best} of {len(full)} loads, and than that of constant and tokens in {better}",
        "repeated": f"{found['calibration']['repeated_reads']:.2f}",
        "context": f"{found['calibration']['coefficients']['context_us']:.2f}",
    }


def nearer(load: Mapping[str, Any], models: Iterable[str]) -> bool:
    """Whether the throughput of a load is simulated better than by each of these null models."""
    row = load["metrics"]["output_throughput"]
    return all(abs(row["simulated_error"]) < abs(row[f"{model}_error"]) for model in models)


def _decisions(rows: list[Mapping[str, Any]]) -> list[str]:
    names = ("loads", "requests", "steps", "preemptions", "evicted_blocks", "hit_tokens")
    cells = (
        (f"{row['session']} {row['repetition']}", *(row[name] for name in names), row["difference"] or "0")
        for row in rows
    )
    headings = ("server", "runs", "requests", "steps", "preemptions", "blocks evicted", "tokens hit", "differences")
    return markdown(headings, cells)


def _waste(rows: list[Mapping[str, Any]]) -> list[str]:
    buckets = [name for name in rows[0]["waste"] if any(max(row["waste"][name]) > 0 for row in rows)]
    cells = (
        (f"{row['session']} {row['repetition']}", *("{:.4%}, {:.4%}".format(*row["waste"][name]) for name in buckets))
        for row in rows
    )
    return markdown(("server", *buckets), cells)


def _times(loads: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, load in loads.items():
        missed = misses(load["metrics"])
        for metric in LIMITS:
            row = load["metrics"].get(metric)
            if row is None or row["simulated_error"] is None:
                continue
            error, *nulls = (f"{row[f'{model}_error']:+.1%}" for model in ("simulated", *NULL_MODELS))
            shown = f"**{error}**" if metric in missed else error
            values = (f"{row['measured']:,.1f}", f"{row['noise']:.1%}", f"{row['simulated']:,.1f}", shown, *nulls)
            lines.append((name, _NAMES[metric], *values))
    return markdown(("run", "", "measured", "noise", "simulated", "error", *NULL_MODELS), lines)


def _means(loads: Mapping[str, Any]) -> list[str]:
    lines = []
    for name, load in loads.items():
        errors = (f"{mean_error(load['metrics'], model):.1%}" for model in ("simulated", *NULL_MODELS))
        own = load["own_context_us"]
        lines.append(
            (name, load["steps"], *errors, f"{load['repeated_share']:.0%}", None if own is None else f"{own:.2f}")
        )
    return markdown(("run", "steps", "simulated", *NULL_MODELS, "again", "context, us/token"), lines)


if __name__ == "__main__":
    document = json.loads(Path(sys.argv[1]).read_text("utf-8"))
    PAGE.write_text(filled(PAGE.read_text("utf-8"), parts(document)), "utf-8")
