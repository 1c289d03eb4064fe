"""The page of measured servers, docs/results/servers.md, part by part: ``python -m tools.servers --markdown``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import Any

from fragmeter.experiments.paper.comparison import Payload
from fragmeter.reports.page.table import markdown
from fragmeter.sim.metrics.registry import COMPARED, OF_REQUESTS, key

#: Headings of errors and values.
_METRICS = {
    "output_throughput": "output tokens/s",
    **{key(which, name): f"{name.upper().removesuffix('L')}, {which}" for name in OF_REQUESTS for which in COMPARED},
}
_BOARD_METRICS = {"throughput": "output tokens/s", "ttft": "TTFT", "tpot": "TPOT", "e2el": "E2E"}
_ENGINES = "rtx-pro-6000 qwen3-30b-a3b 2 engines"
#: Errors that a sentence has: run and metric.
_NAMED = {
    "4 users on a B200": ("b200 llama-3.1-70b 8k1k 4 users", "mean_tpot_ms"),
    "64 users on a B200": ("b200 llama-3.1-70b 8k1k 64 users", "mean_tpot_ms"),
    "TPOT in lock step": (_ENGINES, "mean_tpot_ms"),
    "TTFT in lock step": (_ENGINES, "mean_ttft_ms"),
}
#: Measured over simulated p99 of TTFT from which a held-out run is named.
_LONG_TAIL = 10


def markdown_parts(found: Payload) -> dict[str, str]:
    """The parts of the page that are computed, by the names of their places."""
    rows = found["rows"]
    missed = sum(target["outcome"] == "fail" for target in found["targets"])
    held_out, given = ([row for row in rows if row["kind"] == kind] for kind in ("held out", "given"))
    others = [row for row in rows if row["kind"] in ("fitted", "predicted")]
    h100 = [row for row in others if row["run"].startswith("h100") and row["constants"] != "nothing"]
    moe = [row["error"] for row in h100 if "mixtral" in row["run"] and row["metric"] == "mean_tpot_ms"]
    light = [
        abs(row["errors"]["ttft"])
        for row in found["board"]
        if row["load"] == "open loop" and not row["busy"] and row["standing"] != "fitted" and "ttft" in row["errors"]
    ]
    tables = {
        "constants": _constants(found["constants"]),
        "targets": _targets(found["targets"]),
        "classes": _classes(found["classes"]),
        "peers": _peers(found["peers"]),
        "intervals": _intervals(found["intervals"]),
        "errors": error_table(others),
        "held-out cards and models": _groups(found["summary"]),
        "held-out errors": error_table(held_out),
        "given errors": error_table(given),
        "values": _values(rows),
        "sources": _sources(rows),
    }
    longest = max(_tail(row) for row in h100 if row["metric"] == "p99_ttft_ms")
    return {name: "\n".join(lines) for name, lines in tables.items()} | {
        "runs": str(len({row["run"] for row in rows})),
        "missed": f"{missed} of {len(found['targets'])} limits are missed." if missed else "All limits are met.",
        "light runs": str(len(light)),
        "their TTFT": f"{median(light):.1%}",
        "longest tail": f"{longest:.0f}",
        "tails": ", ".join(_long_tails(held_out)),
        "Mixtral's TPOT": f"{sum(moe) / len(moe):+.1%}",
        **{
            name: f"{row['error']:+.1%}"
            for name, of in _NAMED.items()
            for row in rows
            if (row["run"], row["metric"]) == of
        },
    }


def _tail(row: Mapping[str, Any]) -> float:
    return float(row["measured"] / row["simulated"])


def _intervals(intervals: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each metric and class."""
    lines = []
    for each in intervals:
        ends = f"{each['low']:.2f} to {each['high']:.2f}" if "low" in each else ""
        shares = (f"{each[name]:.1%}" for name in ("coverage", "half_width"))
        scores = (f"{each[name]:.2f}" for name in ("interval_score", "box_score"))
        counts = str(each["runs"]), str(each["servers"])
        lines.append((_BOARD_METRICS[each["metric"]], each["class"] or "all", *counts, *shares, *scores, ends))
    return markdown(("metric", "class", "runs", "servers", "covered", "half width", "score", "box", "interval"), lines)


def _classes(classes: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each class."""
    lines = []
    for each in classes:
        errors = each["median_absolute_error"]
        cells = (f"{errors[metric]:.1%}" if metric in errors else "" for metric in _BOARD_METRICS)
        lines.append((each["class"], str(len(each["runs"])), str(each["unseen"]), *cells))
    return markdown(("class", "runs", "unseen", *_BOARD_METRICS.values()), lines)


def _peers(peers: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each other simulator and metric."""
    lines = []
    for each in peers:
        errors = f"{each['peer_median']:.1%}", f"{each['our_median']:.1%}"
        lines.append((each["peer"], _BOARD_METRICS[each["metric"]], str(each["runs"]), *errors))
    return markdown(("simulator", "", "runs", "published", "ours"), lines)


def _constants(fits: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = []
    for name, fit in fits.items():
        on = ", ".join(fit["fitted_on"]) or "-"
        lines.append((name, on, f"{fit['outside_ms']:.1f}", f"{fit['step_us']:.0f}"))
    return markdown(("constants of", "fitted on", "outside_ms", "step_us"), lines)


def _targets(targets: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    for target in targets:
        about = (f"{target['runs']} ({target['num_runs']})", target["constants"], target["kind"])
        numbers = f"{target['limit']:.0%}", f"{target['mean_absolute_error']:.1%}", f"{target['bias']:+.1%}"
        lines.append((*about, _METRICS[target["metric"]], *numbers, target["outcome"]))
    return markdown(("runs", "constants of", "", "metric", "limit", "error", "bias", "outcome"), lines)


def _long_tails(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Runs with a measured p99 of TTFT of more than ``_LONG_TAIL`` times the simulated one, and that factor; the longest first."""
    found = [(_tail(row), row["run"]) for row in rows if row["metric"] == "p99_ttft_ms"]
    for factor, name in sorted(found, reverse=True):
        if factor > _LONG_TAIL:
            yield f"{factor:.0f} times in {name}"


def _groups(summary: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each card and model with held-out runs."""
    shown = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
    table = []
    lines: dict[str, dict[str, str]] = {}
    runs: dict[str, int] = {}
    for row in summary:
        if row["kind"] == "held out":
            value = f"{row['mean_absolute_error']:.1%} ({row['bias']:+.1%})"
            lines.setdefault(row["runs"], {})[row["metric"]] = value
            runs[row["runs"]] = max(row["num_runs"], runs.get(row["runs"], 0))
    for name, values in lines.items():
        table.append((f"{name} ({runs[name]})", *(values.get(metric, "") for metric in shown)))
    return markdown(("runs", *(_METRICS[metric] for metric in shown)), table)


def error_table(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Markdown of the errors: a line for each run and its server constants, followed by a line for each other simulator that published
    errors of that run."""
    table = []
    lines: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        lines.setdefault((row["run"], row["constants"], row["kind"]), {})[row["metric"]] = row["error"]
        for name, error in row.items():
            if name.startswith("published_"):
                by = name.removeprefix("published_").removesuffix("_error")
                lines.setdefault((row["run"], f"*{by}*", "published"), {})[row["metric"]] = error
    for about, errors in sorted(lines.items(), key=lambda line: line[0][0]):
        table.append((*about, *(f"{errors[metric]:+.1%}" if metric in errors else "" for metric in _METRICS)))
    return markdown(("run", "constants of", "", *_METRICS.values()), table)


def _values(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Measured and simulated values, in ms unless stated."""
    table = []
    lines: dict[str, dict[str, str]] = {}
    for row in rows:
        if row["constants"] == "nothing":
            value = f"{_number(row['measured'])}, {_number(row['simulated'])}"
            lines.setdefault(row["run"], {})[row["metric"]] = value
    for name, values in sorted(lines.items()):
        table.append((name, *(values.get(metric, "") for metric in _METRICS)))
    yield from markdown(("run", *_METRICS.values()), table)


def _sources(rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    by_source: dict[str, list[str]] = {}
    for name, source in dict.fromkeys((row["run"], row["source"]) for row in rows):
        by_source.setdefault(source, []).append(name)
    for source, names in by_source.items():
        yield f"- {source}: {', '.join(names)}."


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.1f}"
