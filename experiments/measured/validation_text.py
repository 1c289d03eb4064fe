"""A validation on the terminal: predicted beside measured."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich import box
from rich.table import Table

from ..runs.output import Report

Document = Mapping[str, Any]
_OPERATIONS = {
    "gemm": "GEMMs",
    "decode_attention": "decode attention",
    "prefill_attention": "prefill attention",
    "kv_write": "KV write",
    "elementwise": "norms, rotary, activation",
    "embedding": "embedding",
    "step": "host's work",
    "beside": "these four together",
    "block_copy": "block copies",
    "swap_out": "swaps to the host",
    "swap_in": "swaps from the host",
}


def tell(document: Document, report: Report) -> None:
    """All that was measured, in tables."""
    calibration = document["calibration"]
    report.say(f"{document['model']} on {document['device']['name']}", style="bold")
    report.say(f"Predicted by: {calibration['source']}, {calibration['device']}. It saw none of these runs.")
    for table in (_runs(document["runs"]), _throughput(document["runs"]), _operations(document["operations"])):
        _print(table, report)
    drift = document["drift"]
    if drift["calls"]:
        again = f"{drift['calls']} calls of the calibration, measured again before and after each run"
        report.say()
        report.say(f"Machine: by how much it has become slower since it was calibrated; the median of {again}.")
    _print(_allocation(document["allocation"]), report)
    start_up = document["start_up"]
    report.say()
    report.say(
        f"A prompt of {start_up['prompt_tokens']:,} tokens in {start_up['chunks']} chunks starts up in "
        f"{start_up['measured_ms']:,.1f} ms; predicted {start_up['predicted_ms']:,.1f} ms ({start_up['error']:+.1%})."
    )
    _print(_attention(document["attention"]), report)


def tell_plan(name: str, found: Document, report: Report) -> None:
    """The steps of one plan."""
    report.say(name, style="bold")
    table = _steps()
    table.add_row("", f"{found['step']['count']:,}", *_shares(found["step"]))
    _print(table, report)
    sums = (found["predicted_ms"], found["measured_ms"])
    report.say("All steps: predicted {:,.1f} ms, measured {:,.1f} ms.".format(*sums))


def _runs(runs: list[Document]) -> Table:
    """Errors of steps, and by how much the machine was slower during the run than when it was calibrated."""
    table = _steps("machine")
    for run in runs:
        drift = "" if run["drift"] is None else f"{run['drift']:+.1%}"
        table.add_row(run["policy"], f"{run['step']['count']:,}", *_shares(run["step"]), drift)
    return table


def _steps(*more: str) -> Table:
    return _table("step time", "steps", "MAPE", "p95", "bias", "sum", *more)


def _operations(operations: Mapping[str, Document]) -> Table:
    table = _table("operation", "steps", "MAPE", "p95", "bias", "sum")
    for name, label in _OPERATIONS.items():
        if name in operations:
            table.add_row(label, f"{operations[name]['count']:,}", *_shares(operations[name]))
    return table


def _throughput(runs: list[Document]) -> Table:
    """Rates, and how many times that of the first run they are."""
    table = _table("output tokens/s", "predicted", "measured", "error", "times, predicted", "measured")
    for run in runs:
        sides = [(run[side], runs[0][side]) for side in ("predicted_tokens_per_s", "measured_tokens_per_s")]
        rates = [f"{rate:,.1f}" for rate, _ in sides]
        times = [f"{rate / first:.2f}" for rate, first in sides]
        table.add_row(run["policy"], *rates, f"{run['throughput_error']:+.1%}", *times)
    return table


def _allocation(allocation: Mapping[str, Document]) -> Table:
    table = _table("decode steps, ms", "steps", "p50", "p99", "predicted p50", "p99")
    for name, found in allocation.items():
        sides = [f"{found[side][rank]:,.2f}" for side in ("measured", "predicted") for rank in ("p50_ms", "p99_ms")]
        table.add_row(f"{name} a block allocated", f"{found['count']:,}", *sides)
    return table


def _attention(shapes: list[Document]) -> Table:
    table = _table("decode attention, us", "paged", "contiguous", "paged adds")
    for found in shapes:
        times = (f"{found['paged_us']:,.1f}", f"{found['contiguous_us']:,.1f}", f"{found['overhead']:+.1%}")
        table.add_row(f"{found['batch']} x {found['context']} tokens", *times)
    return table


def _shares(error: Document) -> tuple[str, ...]:
    signed = (f"{error[name]:+.1%}" for name in ("bias", "total_bias"))
    return (f"{error['mape']:.1%}", f"{error['p95']:.1%}", *signed)


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _print(table: Table, report: Report) -> None:
    report.say()
    report.console.print(table)
