"""Measured servers beside their simulation: throughput, TTFT, TPOT and E2E, with signed errors.

Every run is simulated with the profile of its card and the server's constants (``sim.cost.server``): none, those fitted to
the run itself, or those fitted to other runs (``FITS``). A prediction is judged on no run that it was fitted to. A *held-out*
run was collected after everything was fitted: it is simulated without constants, and no constant is fitted to it.

The requests of a run are in a file outside of the package (``--runs FOLDER``), or follow from its figures
(``loads``). The stages with fixed prompts give means: their TPOT is (mean E2E - mean TTFT) / (output tokens - 1).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from importlib import resources
from math import log
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fragmeter.experiments.measured.constants import Deviation, fitted_constants, fitted_to, served
from fragmeter.experiments.measured.intervals import SHARE
from fragmeter.experiments.measured.replay import BenchmarkOfRequests
from fragmeter.experiments.paper.comparison import Payload
from fragmeter.experiments.runs.near_saturation import LoadClass, ServedLoad, times_of
from fragmeter.experiments.runs.output import Report, track
from fragmeter.reports.page.table import Column, Table
from fragmeter.sim import Settings, Workload, settings, simulate
from fragmeter.sim.cluster import Cluster, ClusterRun, simulate_cluster
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.cost import ServerConstants
from fragmeter.sim.metrics.registry import COMPARED, OF_REQUESTS, key
from fragmeter.sim.metrics.requests import RequestTimes, end_of_answers
from fragmeter.sim.output import frames as pd
from fragmeter.sim.policy.options import OUTSIDE_MS
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types import ticks
from fragmeter.sim.types.errors import SettingError, UserError
from fragmeter.traces import Measured, Trace

from .board import (
    METRICS,
    WORSE,
    BoardRow,
    accepted,
    beside_peers,
    board_row,
    classes_of,
    worsened,
)
from .coverage import COVERAGE, coverage
from .loads import LOADS

FIGURE = "servers"
#: ``class`` of a fact that nothing may be fitted to.
HELD_OUT = "held out"
#: Columns of a file of requests.
REQUEST_COLUMNS = ("arrival_s", "prompt_tokens", "output_tokens", "first_token_s", "last_token_s")

Figures = dict[str, float]


class Simulated(NamedTuple):
    """Figures of a simulated run, and the class of its load."""

    figures: Figures
    load: LoadClass


@dataclass(frozen=True)
class Fit:
    """Constants, and what they are fitted on and used for.

    Attributes:
        name: Of the fit.
        on: Prefixes of names of runs; none for no constants.
        to: Runs that it is shown for; held-out ones are shown without constants only.
    """

    name: str
    on: tuple[str, ...]
    to: tuple[str, ...]


_STAGES_7B = ("h100-80gb llama-2-7b",)
FITS = (
    Fit("nothing", (), ("",)),
    Fit("rtx-4090", ("rtx-4090",), ("rtx-",)),
    Fit("rtx-pro-6000", ("rtx-pro-6000",), ("rtx-",)),
    Fit("h100 llama-2-7b", _STAGES_7B, ("h100-80gb",)),
    # The constants of a server at one rate, judged at another.
    Fit("h100 general 8/s", ("h100-80gb llama-2-7b general 8/s",), ("h100-80gb llama-2-7b general",)),
    Fit("h100 codegen 5/s", ("h100-80gb llama-2-7b codegen 5/s",), ("h100-80gb llama-2-7b codegen",)),
)
#: Largest errors of means, by metric: of constants that are fitted to the run itself, to the other card's run, and to the
#: other stages.
_OWN = {"output_throughput": 0.03, "mean_tpot_ms": 0.02, "mean_ttft_ms": 0.07}
_OTHER_CARD = {"output_throughput": 0.03, "mean_tpot_ms": 0.03, "mean_ttft_ms": 0.10}
_OTHER_STAGES = {"mean_e2el_ms": 0.05, "mean_tpot_ms": 0.05, "mean_ttft_ms": 0.12}
#: (runs, constants of, kind, limits).
TARGETS = (
    ("rtx-4090", "rtx-4090", "fitted", _OWN),
    ("rtx-pro-6000", "rtx-pro-6000", "fitted", _OWN),
    ("rtx-4090", "rtx-pro-6000", "predicted", _OTHER_CARD),
    ("rtx-pro-6000", "rtx-4090", "predicted", _OTHER_CARD),
    ("h100-80gb", "h100 llama-2-7b", "predicted", _OTHER_STAGES),
)


@cache
def facts() -> Mapping[str, Any]:
    """The whole of ``facts/servers.json``."""
    return json.loads(resources.files(__package__).joinpath("facts/servers.json").read_text("utf-8"))


class ServerRun:
    """A measured run.

    Args:
        fact: Its entry of ``facts/servers.json``.
    """

    def __init__(self, fact: Mapping[str, Any]) -> None:
        self.fact, self.name = fact, str(fact["name"])
        # Of runs with a class no constants are fitted.
        self.apart = "class" in fact
        called = {"endpoint": fact["endpoint"]} if "endpoint" in fact else {}
        self.settings: Settings = settings(policy="vllm-v1", **called, **fact["settings"])

    @cached_property
    def measured(self) -> Figures:
        """Measured figures, by vLLM's names."""
        found = {key: value for key, value in self.fact["measured"].items() if not isinstance(value, dict)}
        found |= _flat(self.fact["measured"])
        if not {"mean_tpot_ms", "median_tpot_ms"} & found.keys():
            between = self.fact["shared_prefix"]["output_tokens"] - 1
            found["mean_tpot_ms"] = (found["mean_e2el_ms"] - found["mean_ttft_ms"]) / between
        return found

    @cached_property
    def workload(self) -> Workload:
        """Its requests."""
        load = next(name for name in LOADS if name in self.fact)
        return LOADS[load](self.name, **self.fact[load])

    def simulated(self, constants: ServerConstants | None) -> Figures:
        """Simulated figures with these constants, or as shipped, by the names of the measured ones."""
        return self.outcome(constants).figures

    def outcome(self, constants: ServerConstants | None) -> Simulated:
        """Simulated figures with these constants, or as shipped, by the names of the measured ones, and the class of the load."""
        work, cost = self.workload, None if constants is None else served(self.settings, constants)
        chosen, engines = only_read(self.settings, work), self.settings.data_parallel_size
        run: Run | ClusterRun
        if engines > 1:
            run = simulate_cluster(chosen, work, Cluster(num_replicas=engines), cost)
            end_ticks = run.end_ticks
        else:
            run = simulate(chosen, work, cost)
            end_ticks = end_of_answers(run)
        found = _figures(times_of(run), end_ticks)
        return Simulated({name: found[name] for name in self.measured}, ServedLoad.of(run, work).load_class)

    def deviation(self, constants: ServerConstants) -> Deviation:
        """See ``fitted_constants``; of the means."""
        found, seen = self.simulated(constants), self.measured
        ratio = seen["mean_tpot_ms"] / found["mean_tpot_ms"]
        return Deviation(log(ratio), found["mean_tpot_ms"] * 1e3, seen["mean_ttft_ms"] - found["mean_ttft_ms"])


class RequestsRun(ServerRun):
    """A run with a file of its requests.

    Args:
        folder: Folder of that file.

    Raises:
        UserError: The file is missing or lacks a column.
    """

    def __init__(self, fact: Mapping[str, Any], folder: Path) -> None:
        super().__init__(fact)
        self.benchmark = _benchmark(folder / fact["requests_file"])

    @cached_property
    def workload(self) -> Workload:
        """Its requests."""
        return self.benchmark.workload(0)


def _benchmark(path: Path) -> BenchmarkOfRequests:
    if not path.is_file():
        raise SettingError(
            "runs", str(path.parent), f"has no {path.name}; give the folder with the requests of the runs"
        )
    table = pd.read_csv(path)
    missing = [column for column in REQUEST_COLUMNS if column not in table]
    if missing:
        raise UserError(f"{path}: {missing[0]} is missing")
    arrival, prompts, outputs, first, last = (table[column].to_numpy() for column in REQUEST_COLUMNS)
    at = np.rint(arrival * 1e6).astype(np.int64) * ticks.PER_US
    trace = Trace(path.name, prompts.astype(np.int64), outputs.astype(np.int64), at)
    seen = Measured(
        ttft_s=first - arrival,
        e2el_s=last - arrival,
        gaps_s=None,
        duration_s=None,
        request_rate=None,
        burstiness=1.0,
        max_concurrency=None,
        model_id=None,
    )
    return BenchmarkOfRequests(trace, seen)


def runs_of(folder: Path | None) -> list[ServerRun]:
    """The runs that can be simulated.

    Args:
        folder: Folder of the files of requests; None leaves those runs out.

    Raises:
        UserError: A file is missing or damaged.
    """
    found: list[ServerRun] = []
    for fact in facts()["runs"]:
        if "requests_file" not in fact:
            found.append(ServerRun(fact))
        elif folder is not None:
            found.append(RequestsRun(fact, folder))
    return found


def fit_constants(runs: Sequence[ServerRun]) -> ServerConstants:
    """One set of constants for runs of one server: TPOT and TTFT come out right in the mean over the runs."""
    if len(runs) == 1 and isinstance(runs[0], RequestsRun):
        return fitted_to(runs[0].benchmark, runs[0].settings)

    def look(constants: ServerConstants) -> Deviation:
        found = [run.deviation(constants) for run in runs]
        return Deviation(*(float(np.mean(values)) for values in zip(*found, strict=True)))

    return fitted_constants(look, asynchronous=True)


def compare_servers(folder: Path | None) -> Payload:
    """Every run with every fit that is for it, and the board (``board``) of all runs.

    Args:
        folder: See ``runs_of``.
    """
    runs = runs_of(folder)
    rows: list[dict[str, Any]] = []
    constants: dict[str, dict[str, Any]] = {}
    for fit in FITS:
        own = [run for run in runs if run.name.startswith(fit.on or "-") and not run.apart]
        if fit.on and not own:
            continue
        found = fit_constants(own) if fit.on else None
        constants[fit.name] = {
            "fitted_on": [run.name for run in own],
            **vars(found or ServerConstants(outside_ms=OUTSIDE_MS)),
        }
        shown = [run for run in runs if run.name.startswith(fit.to) and not (fit.on and run.apart)]
        for run in track(shown, f"Simulating with {fit.name} fitted", len(shown)):
            # The defaults rest on some runs, too.
            rests = run in own if fit.on else "fitted" in run.fact
            kind = run.fact.get("class", "fitted" if rests else "predicted")
            rows += _rows(run, fit.name, kind, run.outcome(found))
    board = board_of(runs, rows)
    classes = classes_of(board)
    return {
        "figure": FIGURE,
        "notes": facts()["notes"],
        "constants": constants,
        "rows": rows,
        "summary": list(_summary(rows)),
        "targets": list(_targets(rows)),
        "board": [row.as_dict() for row in board],
        "classes": classes,
        "intervals": coverage(row.as_dict() for row in board),
        "peers": beside_peers(board),
        "worsened": list(worsened(accepted(), classes)),
        "left_out": [fact["name"] for fact in facts()["runs"] if fact["name"] not in {run.name for run in runs}],
    }


def board_of(runs: Sequence[ServerRun], rows: Sequence[Mapping[str, Any]]) -> list[BoardRow]:
    """The board's row of each run.

    Args:
        rows: As ``compare_servers`` has them.
    """
    by_run: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row["constants"] == "nothing":
            by_run.setdefault(row["run"], []).append(row)
    return [board_row(run.fact, run.settings, by_run[run.name]) for run in runs]


def data_sheet_rows(folder: Path | None = None) -> Iterator[dict[str, Any]]:
    """The errors of all runs that no constant is fitted to, simulated with ``--cost roofline``: what a data sheet is worth where it stands in.

    Args:
        folder: See ``runs_of``.
    """
    for run in runs_of(folder):
        run.settings = replace(run.settings, cost="roofline")
        row = board_row(run.fact, run.settings, list(_rows(run, "nothing", "", run.outcome(None))))
        if row.standing != "fitted":
            yield {name: getattr(row, name) for name in ("run", "server", "busy", "overload", "standing", "errors")}


def _rows(run: ServerRun, fit: str, kind: str, simulated: Simulated) -> Iterator[dict[str, Any]]:
    others = {
        simulator: {
            name: value / run.measured[name] - 1 for name, value in _flat(figures).items() if name in run.measured
        }
        for simulator, figures in run.fact.get("published", {}).items()
    } | run.fact.get("published_errors", {})
    for metric, measured in run.measured.items():
        yield {
            "run": run.name,
            "source": run.fact["source"],
            "constants": fit,
            "kind": kind,
            "metric": metric,
            "measured": measured,
            "simulated": simulated.figures[metric],
            "error": simulated.figures[metric] / measured - 1,
            "load": simulated.load,
            **{f"published_{by}_error": errors[metric] for by, errors in others.items() if metric in errors},
        }


def _summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """Mean absolute error and signed bias over runs of one card and model, by fit and metric."""
    groups: dict[tuple[str, ...], list[float]] = {}
    for row in rows:
        card_and_model = " ".join(row["run"].split()[:2])
        groups.setdefault((card_and_model, row["constants"], row["kind"], row["metric"]), []).append(row["error"])
    for (runs, constants, kind, metric), errors in groups.items():
        about = {"runs": runs, "num_runs": len(errors), "constants": constants, "kind": kind, "metric": metric}
        yield about | _mean_errors(errors)


def _targets(rows: Sequence[Mapping[str, Any]]) -> Iterator[dict[str, Any]]:
    """The targets of which there are runs, with the mean absolute error over these."""
    for runs, constants, kind, limits in TARGETS:
        shown = [
            row for row in rows if row["run"].startswith(runs) and (row["constants"], row["kind"]) == (constants, kind)
        ]
        num_runs = len({row["run"] for row in shown})
        about = {"runs": runs, "num_runs": num_runs, "constants": constants, "kind": kind}
        for metric, limit in limits.items() if shown else ():
            found = _mean_errors([row["error"] for row in shown if row["metric"] == metric])
            outcome = "pass" if found["mean_absolute_error"] <= limit else "fail"
            yield {**about, "metric": metric, "limit": limit, **found, "outcome": outcome}


def _mean_errors(errors: Sequence[float]) -> Figures:
    return {"mean_absolute_error": float(np.mean(np.abs(errors))), "bias": float(np.mean(errors))}


def _flat(figures: Mapping[str, Any]) -> Figures:
    """``{"ttft_ms": {"mean": 1}}`` as ``{"mean_ttft_ms": 1}``."""
    return {
        key(which, latency): figures[f"{latency}_ms"][which]
        for latency in OF_REQUESTS
        for which in COMPARED
        if which in figures.get(f"{latency}_ms", {})
    }


def _figures(times: RequestTimes, end_ticks: int) -> Figures:
    found = {"output_throughput": float(times.output_tokens.sum() / (end_ticks / ticks.PER_SECOND))}
    for latency in OF_REQUESTS:
        values = getattr(times, f"{latency}_ms")
        for which, rank in COMPARED.items():
            found[key(which, latency)] = float(values.mean() if rank is None else np.percentile(values, rank))
    return found


#: Figures on the terminal.
_SHOWN = ("output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms")
_HEADINGS = ("tokens/s", "TTFT", "TPOT", "E2E")
#: Cells by metric, name, and constants and kind of the runs.
_Groups = dict[tuple[str, str], dict[str, dict[str, str]]]


def print_servers(payload: Payload, report: Report) -> None:
    """Print the signed errors of every run, their means, and the constants."""
    report.print_line("Simulated over measured, less one; means", style="bold")
    errors: _Groups = {}
    for row in payload["rows"]:
        found = errors.setdefault((row["constants"], row["kind"]), {}).setdefault(row["run"], {})
        found[row["metric"]] = f"{row['error']:+.1%}"
    _print_groups("run", errors, report)
    report.print_line("Medians and 99th percentiles are in the JSON document (--json).")
    report.print_line()
    report.print_line("Mean absolute error, and bias, in percent over the runs of a card and model", style="bold")
    means: _Groups = {}
    counts: dict[str, int] = {}
    for row in payload["summary"]:
        # Not every run has every metric.
        counts[row["runs"]] = max(row["num_runs"], counts.get(row["runs"], 0))
    for row in payload["summary"]:
        name = f"{row['runs']} ({counts[row['runs']]})"
        found = means.setdefault((row["constants"], row["kind"]), {}).setdefault(name, {})
        found[row["metric"]] = f"{row['mean_absolute_error'] * 100:.1f} {row['bias'] * 100:+.1f}"
    _print_groups("card and model (runs)", means, report)
    for row in payload["targets"]:
        report.print_line(
            f"{row['outcome']}: {row['runs']}, constants of {row['constants']} ({row['kind']}), {row['metric']}:"
            f" {row['mean_absolute_error']:.1%} of at most {row['limit']:.0%}, bias {row['bias']:+.1%}"
        )
    for name, found in payload["constants"].items():
        if found["fitted_on"]:
            values = f"{found['outside_ms']:.3g} ms outside of the engine, {found['step_us']:,.0f} us a step"
            report.print_line(f"{name}: {values}; fitted on {', '.join(found['fitted_on'])}.")
    _print_board(payload, report)
    if payload["left_out"]:
        report.print_line(f"Left out without --runs: {', '.join(payload['left_out'])}.")


def _print_board(payload: Payload, report: Report) -> None:
    """Print the median errors by class, the intervals, errors of peers, and what is worse than accepted."""
    report.print_line()
    report.print_line("Median absolute error by class, with the shipped defaults", style="bold")
    table = _error_table("class (card, attention, model, load)", "runs", *_HEADINGS)
    for each in payload["classes"]:
        errors = each["median_absolute_error"]
        cells = (f"{errors[metric]:.1%}" if metric in errors else "-" for metric in METRICS)
        table.add_row(each["class"], str(len(each["runs"])), *cells)
    report.console.print(table)
    report.print_line()
    _print_intervals(payload["intervals"], report)
    report.print_line()
    report.print_line("Median absolute error of other simulators, and ours of the same runs", style="bold")
    table = _error_table("simulator", "metric", "runs", "theirs", "ours")
    for each in payload["peers"]:
        errors = f"{each['peer_median']:.1%}", f"{each['our_median']:.1%}"
        table.add_row(each["peer"], each["metric"], str(each["runs"]), *errors)
    report.console.print(table)
    report.print_line()
    for each in payload["worsened"]:
        change = f"{each['accepted']:.1%} to {each['now']:.1%}"
        report.print_line(f"worse: {each['class']}: median error of {each['metric']} from {change}")
    if not payload["worsened"]:
        report.print_line(f"No class is worse than accepted by {WORSE:.0%} or more.")


def _print_intervals(intervals: Sequence[Mapping[str, Any]], report: Report) -> None:
    """Print how good the intervals are, and whether that is good enough."""
    report.print_line(f"Intervals for {SHARE:.0%} of servers, judged without the errors of their server", style="bold")
    for metric in dict.fromkeys(each["metric"] for each in intervals):
        table = _error_table(metric, "runs", "covered", "±", "score", "box", wraps=False)
        for each in (each for each in intervals if each["metric"] == metric):
            shares = (f"{each[name]:.1%}" for name in ("coverage", "half_width"))
            scores = (f"{each[name]:.2f}" for name in ("interval_score", "box_score"))
            table.add_row(each["class"] or "all", str(each["runs"]), *shares, *scores)
        report.console.print(table)
    for each in intervals:
        if "outcome" in each:
            low, high = COVERAGE
            report.print_line(
                f"{each['outcome']}: {each['metric']}: {each['coverage']:.1%} of the runs are covered, {low:.0%} to {high:.0%} are asked for,"
                f" with an interval score of {each['interval_score']:.2f}, and {each['box_score']:.2f} of past errors as a box."
            )


def _error_table(name: str, *headings: str, wraps: bool = True) -> Table:
    return Table(Column(name, is_text=True, wraps=wraps), *headings, gap=2)


def _print_groups(heading: str, groups: _Groups, report: Report) -> None:
    """A table for each group, after a line with its constants and its kind."""
    width = max(len(name) for rows in groups.values() for name in rows)
    for (constants, kind), rows in groups.items():
        fitted = "No constants" if constants == "nothing" else f"Constants of {constants}"
        report.print_line(f"{fitted}, {kind}:")
        table = Table(Column(heading, is_text=True, least_width=width), *_HEADINGS, gap=2)
        for name, cells in rows.items():
            table.add_row(name, *(cells.get(metric, "-") for metric in _SHOWN))
        report.console.print(table)
        report.print_line()
