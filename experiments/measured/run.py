"""``fragmeter validate --against``: replay a benchmark, fit the knobs, and print simulated beside measured metrics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from hashlib import sha256
from math import isfinite
from pathlib import Path
from typing import Any

from ...reports.page.table import Table
from ...sim import Settings
from ...sim.cost import ServerConstants
from ...sim.metrics.registry import METRICS
from ...sim.output import frames as pd
from ...sim.output.files import as_json, write_whole
from ...sim.output.folders import FolderKind, OutputFolder
from ...sim.spec import gpu
from ...traces import measured, read
from ...traces.clients.load import ClientLoad
from ..runs.near_saturation import ServedLoad
from ..runs.output import Report, track
from .constants import fitted_to, replay_served, served, server_document, server_fit
from .evidence import evidence
from .knobs import EXPLAINS, NO_ERROR, Knob, ranked, vary_knobs
from .replay import (
    Benchmark,
    BenchmarkOfRequests,
    Replayed,
    SummarisedBenchmark,
    compared,
    replay,
    scatter,
    total_error,
)
from .scrapes import VLLM
from .server_class import client_of
from .servers_like import Served
from .start import Server, benchmark, replica, started_line, statements
from .statements import contradictions

#: Allowed difference between the server's count of requests and the benchmark's: scrapes do not start with the benchmark,
#: and vLLM's client sends one trial request first.
_SAME_LOAD = 0.1
#: What metrics of a server are compared by, and its name in words.
_COMPARED = {
    "num_gpu_blocks": "size of the KV cache", "kv_usage": "use of the KV cache", "preemptions": "preemptions",
    "hit_rate": "hits of the prefix cache", "ttft_s": "TTFT", "itl_s": "ITL",
}  # fmt: skip
_LABELS = {
    "num_gpu_blocks": "KV blocks",
    "mean_kv_cache_usage": "KV cache usage, mean",
    "max_kv_cache_usage": "KV cache usage, max",
    "mean_num_requests_running": "running, mean",
    "mean_num_requests_waiting": "waiting, mean",
    "num_preemptions": "preemptions",
    "prefix_cache_hit_rate": "prefix cache hit rate",
    **{f"server_{path}": f"{METRICS[path].heading}, by the server" for path in ("mean_ttft_ms", "mean_itl_ms")},
}
_KNOBS = {
    "step_scale": "--step-scale",
    "num_gpu_blocks": "--num-gpu-blocks-override",
    "ttft_offset_ms": "ms outside of the engine",
    "all": "all together",
}


def print_comparison(
    benchmark: BenchmarkOfRequests | SummarisedBenchmark, base: Replayed, rows: Sequence[Mapping[str, Any]], knobs: list[Knob], error: float,
    report: Report,
) -> None:  # fmt: skip
    """Print the whole comparison."""
    for text in _request_lines(benchmark, base):
        report.print_line(text)
    report.print_line()
    report.console.print(_rows_table(rows))
    report.print_line()
    report.console.print(_knobs_table(error, knobs))
    report.print_line()
    report.print_line(first_knob_text(error, knobs))
    for knob in ranked(knobs):
        if error < NO_ERROR or knob.removed >= EXPLAINS:
            report.line(f"  {_KNOBS[knob.name]}: {knob.advice}")
    for text in _pointers(rows, error, knobs):
        report.print_line(text)


def _request_lines(benchmark: BenchmarkOfRequests | SummarisedBenchmark, base: Replayed) -> Iterator[str]:
    trace, metrics = benchmark.trace, benchmark.metrics
    seen: ClientLoad = benchmark.measured
    clients = "" if seen.max_concurrency is None else f" from {seen.max_concurrency} clients in a closed loop"
    lasted = f", in {benchmark.duration_s:,.1f} s" if isfinite(benchmark.duration_s) else ""
    yield f"{trace.name}: {len(trace):,} requests{clients}{lasted}"
    if trace.left_out.failed:
        yield f"Left out: {trace.left_out.failed:,} requests that the server did not answer; they are part of its load."
    if benchmark.drawn:
        yield "The file has no start_times: arrivals are drawn at its rate, and single requests are not comparable."
    refused = int(base.run.refused.sum())
    if refused:
        blocks = base.run.replica.num_blocks
        yield f"Refused: {refused:,} requests that the simulated pool of {blocks:,} blocks cannot hold."
    if isinstance(benchmark, SummarisedBenchmark):
        yield from benchmark.measured.caveats
    elif benchmark.measured.gaps_s is None:
        yield "The file has no times between tokens: ITL is left out."
    elif not benchmark.gaps_are_of_tokens:
        yield "Tokens arrived in groups: the client's gaps are not inter-token latencies and are left out."
    if metrics is not None:
        from_start = ", counters since the server's start" if metrics.num_scrapes == 1 else ""
        yield f"Metrics: {metrics.num_scrapes:,} scrapes{from_start}."
        if metrics.server != VLLM:
            missing = [name for field, name in _COMPARED.items() if getattr(metrics, field) is None]
            lacks = f" They have no {', '.join(missing)}: not compared." if missing else ""
            yield f"They are of {metrics.server}.{lacks}"
    sent = len(trace) + trace.left_out.failed
    if metrics is not None and metrics.first_tokens is not None and abs(metrics.first_tokens / sent - 1) > _SAME_LOAD:
        yield (
            f"The metrics are of {metrics.first_tokens:,.0f} requests, the benchmark of {sent:,}: what the server says"
            " of itself may be another load's. Scrape from before the benchmark to its end, with no other clients."
        )
    if metrics is not None and metrics.hit_rate and base.run.replica.cache_log is None:
        yield (
            f"The server found {metrics.hit_rate:.1%} of the prompts in its prefix cache. What prompts have in common"
            " is not in the file, so none of it is simulated: TTFT and throughput are those without."
        )


def _rows_table(rows: Sequence[Mapping[str, Any]]) -> Table:
    table = Table("", "simulated", "measured", "error")
    for row in rows:
        # Adding zero turns -0.0 into 0.0.
        error = "-" if row["error"] is None else f"{round(row['error'], 3) + 0.0:+.1%}"
        table.add_row(_label(row["metric"]), *(_value(row, side) for side in ("simulated", "measured")), error)
    return table


def _label(path: str) -> str:
    return METRICS[path].heading if path in METRICS else _LABELS[path]


def _value(row: Mapping[str, Any], side: str) -> str:
    path, value = row["metric"].removeprefix("server_"), row[side]
    if path in METRICS:
        return METRICS[path].text(value)
    if path.endswith(("usage", "hit_rate")):
        return f"{value:.1%}"
    return f"{value:,.0f}" if path.startswith("num_") else f"{value:,.2f}"


def _knobs_table(error: float, knobs: list[Knob]) -> Table:
    table = Table("knob, alone", "from", "to", "error left", "removed")
    table.add_row("nothing", "", "", f"{error:.1%}", "")
    for knob in (*ranked(knobs), *(knob for knob in knobs if knob.name == "all")):
        removed = f"{round(knob.removed, 2) + 0.0:.0%}"
        table.add_row(_KNOBS[knob.name], _place(knob.was), _place(knob.value), f"{knob.error:.1%}", removed)
    return table


def _place(value: float | None) -> str:
    """A knob's setting as text."""
    if value is None:
        return ""
    return f"{value:,.4g}" if value < 1e4 else f"{value:,.0f}"


def first_knob_text(error: float, knobs: list[Knob]) -> str:
    """One sentence: the knob to calibrate first."""
    first = ranked(knobs)[0]
    together = next(knob for knob in knobs if knob.name == "all")
    if error < NO_ERROR:
        return f"Nothing to calibrate: the error is {error:.2%} over throughput, TTFT, TPOT, ITL and E2EL."
    if first.removed < EXPLAINS:
        if together.removed >= EXPLAINS:
            return f"No knob alone explains the error of {error:.1%}. All together leave {together.error:.1%}: {together.advice}"
        rest = "the scheduler's limits, prefix caching or another load on the server may. Set none of them"
        return f"None of these explains the error of {error:.1%}; {rest}."
    text = f"Calibrate first: {_KNOBS[first.name]}, which removes {first.removed:.0%} of the error of {error:.1%}."
    if together.error >= first.error:
        return f"{text} With the other knobs, too, no less is left: {together.error:.1%} against {first.error:.1%}."
    return f"{text} All together leave {together.error:.1%}: {together.advice}"


def _pointers(rows: Sequence[Mapping[str, Any]], error: float, knobs: list[Knob]) -> Iterator[str]:
    """Commands that find the cause in the server's flags: where a side preempts, or no knob explains the error."""
    preempted = [row for row in rows if row["metric"] == "num_preemptions" and (row["simulated"] or row["measured"])]
    unexplained = error >= NO_ERROR and all(knob.removed < EXPLAINS for knob in knobs)
    if preempted:
        yield (
            "Requests are preempted: fragmeter diagnose with the same --serve, --gpu and --metrics, and the benchmark as --bench,"
            " finds flags that make requests faster."
        )
    elif unexplained:
        yield "fragmeter diagnose, with the benchmark as --bench, tests the flags of the line."


SCHEMA_VERSION = 1
#: Knobs with a replay, ``all`` among them.
_MOST_KNOBS = 4
RESULT, REQUESTS = "against.json", "requests.parquet"
#: Key of a comparison with a summary, which has no table of requests.
OF_SUMMARY = "of_summary"
AGAINST = FolderKind("comparison with a server", (RESULT, REQUESTS))


def validate_against(
    path: Path,
    metrics: Path | None,
    server: Server,
    folder: OutputFolder | None,
    report: Report,
    save_server: Path | None = None,
) -> None:
    """Simulate the server of a benchmark under the requests that it sent, and report the differences.

    Args:
        path: Result of the benchmark, as ``vllm bench serve --save-result`` writes it.
        metrics: The server's ``/metrics`` after it; None for none.
        server: The line or settings of the server.
        folder: Where the comparison and its requests are kept; None for nowhere.
        save_server: File for the constants of the server.

    Raises:
        UserError: As in ``start``, or the results cannot be written.
    """
    answer = started_line(server)
    chosen = replica(server, answer, measured(path, read(path)).model_id)
    bench = benchmark(path, metrics, chosen)
    if save_server is not None:
        # Before any output, because the settings may be refused.
        served(chosen, ServerConstants())
    contradicted = contradictions(statements(server, answer, path, bench.measured, metrics, bench.metrics))
    for text in contradicted:
        report.print_line(text)
    report.print_line(
        f"{chosen.policy}: {chosen.model} on {gpu(chosen.gpu).name}, compared with the benchmark", style="bold"
    )
    base = replay(bench, chosen)
    work = bench.workload(0)
    known = evidence(chosen, Served(ServedLoad.of(base.run, work).load_class, client_of(work)))
    report.print_line(known.text())
    rows = compared(bench, base)
    error = total_error(rows)
    knobs = list(track(vary_knobs(bench, chosen, base), "Trying what to calibrate", _MOST_KNOBS))
    print_comparison(bench, base, rows, knobs, error, report)
    kept = None if save_server is None else _saved(bench, chosen, path, save_server, rows, report)
    pairs = scatter(bench, base) if isinstance(bench, BenchmarkOfRequests) else None
    document: dict[str, Any] = {
        "schema_version": SCHEMA_VERSION,
        "settings": chosen.as_dict(),
        "evidence": known.as_dict(),
        "benchmark": path.name,
        "requests": len(bench.trace),
        "failed": bench.trace.left_out.failed,
        "refused": int(base.run.refused.sum()),
        "server_metrics": None if bench.metrics is None else asdict(bench.metrics),
        "contradictory_inputs": contradicted,
        "rows": rows,
        "error": error,
        "calibrate_first": [knob.name for knob in ranked(knobs)],
        "knobs": [knob.as_dict() for knob in knobs],
        "saved_server": kept,
    }
    if pairs is None:
        document[OF_SUMMARY] = True
    if folder is not None:
        folder.write(RESULT, as_json(document))
        if pairs is not None:
            folder.write(REQUESTS, pd.DataFrame(pairs).to_parquet(index=False))
        report.point_to("Results", folder.path)
    report.data(document | ({} if pairs is None else {"scatter": pairs}))


def _saved(
    bench: Benchmark, chosen: Settings, path: Path, target: Path, before: Sequence[dict[str, Any]], report: Report
) -> dict[str, Any]:
    """Fit the server's constants, write and print them; ``before`` are the rows of ``compared`` without them."""
    constants = fitted_to(bench, chosen)
    source = f"fitted to {path.name}: {len(bench.trace):,} requests in {bench.duration_s:,.1f} s"
    after = compared(bench, replay_served(bench, chosen, constants))
    fit = server_fit(bench, sha256(path.read_bytes()).hexdigest(), before, after)
    document = server_document(chosen, constants, source, fit)
    write_whole(target, as_json(document))
    steps = f"{constants.step_us:,.0f} us a step beside the operations"
    if constants.host_us is not None:
        steps = f"{constants.host_us:,.0f} us of host work a step"
    report.print_line(
        f"This server: {constants.outside_ms:.3g} ms a request outside of the engine, {steps}."
        f" With them the error is {total_error(after):.1%} instead of {total_error(before):.1%}, on this benchmark."
    )
    report.point_to("Constants (--server)", target)
    return document
