"""A run's summary on the terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

_LATENCIES = {
    "ttft": "time to first token",
    "tpot": "time per output token",
    "itl": "inter-token latency",
    "e2el": "end-to-end latency",
}
_VIEWS = {"paper_view": "the paper's view", "popular_view": "the popular view"}


def print_summary(content: Mapping[str, Any], console: Console) -> None:
    """What ``sim.metrics.summary`` says, in tables: throughput, latency, waste, and KV groups where there are any."""
    groups = [_groups(content["kv_groups"])] if content.get("kv_groups") else []
    replicas = [_replicas(content["replicas"])] if "replicas" in content else []
    for table in (_throughput(content), *replicas, _latency(content), _waste(content["waste"]), *groups):
        console.print(table)
        console.print()


def _table(*headings: str) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, heading in enumerate(headings):
        table.add_column(heading, justify="right" if place else "left", no_wrap=True)
    return table


def _throughput(content: Mapping[str, Any]) -> Table:
    table = _table("throughput", "", "")
    table.add_row("completed", f"{content['completed']:,}", f"in {content['duration']:,.1f} s")
    table.add_row("refused", f"{content['refused']:,}", "")
    table.add_row("requests/s", f"{content['request_throughput']:,.2f}", "")
    table.add_row("output tokens/s", f"{content['output_throughput']:,.1f}", "")
    table.add_row("mean batch", f"{content['mean_batch']:,.2f}", f"over {content['waste']['num_steps']:,} steps")
    preemptions = content["preemptions"]
    table.add_row("preemptions", f"{sum(preemptions.values()):,}", f"{preemptions['swap']:,} by swapping")
    table.add_row("KV pool", f"{content['num_gpu_blocks']:,}", f"blocks of {content['block_size']} slots")
    if content["copied_slots"]:
        table.add_row("copied", f"{content['copied_slots']:,}", "slots on the device")
    host = content.get("host_pool")
    if host is not None:
        table.add_row("swap space", f"{host['max_used_blocks']:,}", f"of {host['num_cpu_blocks']:,} blocks at most")
    moved = content.get("kv_transfer")
    if moved is not None:
        table.add_row("KV transferred, GB", f"{moved['bytes'] / 1e9:,.2f}", f"in {moved['mean_ms']:,.2f} ms on average")
    cache = content["prefix_cache"]
    if cache is not None:
        asked = f"of {cache['queried_tokens']:,} tokens looked up"
        table.add_row("prefix cache hits", f"{cache['hit_rate']:.1%}", asked)
    return table


def _replicas(content: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("replica", "requests", "tokens in", "tokens out", "batch", "KV used", "hits", "busy")
    for replica in content:
        seconds, hits = replica["work"]["seconds"], replica["prefix_cache_hit_rate"]
        busy = 1 - seconds["idle"] / sum(seconds.values()) if sum(seconds.values()) else 0.0
        counts = (f"{replica[name]:,}" for name in ("requests", "input_tokens", "output_tokens"))
        table.add_row(
            f"{replica['replica']}" if replica["role"] == "both" else f"{replica['replica']} {replica['role']}",
            *counts,
            f"{replica['mean_batch']:,.2f}",
            f"{replica['kv_usage_pct']:.1f} %",
            "-" if hits is None else f"{hits:.1%}",
            f"{busy:.1%}",
        )
    return table


def _latency(content: Mapping[str, Any]) -> Table:
    ranks = ("mean", "median", "p90", "p95", "p99")
    table = _table("latency, ms", *ranks)
    for key, label in _LATENCIES.items():
        table.add_row(label, *(_ms(content[f"{rank}_{key}_ms"]) for rank in ranks))
    return table


def _ms(value: float) -> str:
    return f"{value:,.1f}" if value < 10_000 else f"{value:,.0f}"


def _waste(content: Mapping[str, Any]) -> Table:
    start_s, end_s = content["window_s"]
    table = _table(f"% of the KV pool, {start_s:g} to {end_s:,.1f} s", "mean over iterations", "mean over time")
    over_steps, over_time = content["mean_over_iterations_pct"], content["mean_over_time_pct"]
    for view, heading in _VIEWS.items():
        table.add_row(heading, style="bold")
        for group, value in over_steps[view].items():
            table.add_row(f"  {group.replace('_', ' ')}", f"{value:.1f}", f"{over_time[view][group]:.1f}")
    return table


def _groups(content: Sequence[Mapping[str, Any]]) -> Table:
    table = _table("% of the KV pool, by KV group", "layers", "window", "live", "reserved", "block tail")
    for group in content:
        shares = group["mean_over_iterations_pct"]
        held = (f"{shares[bucket]:.1f}" for bucket in ("live", "reserved", "block_tail"))
        table.add_row(f"  {group['name']}", f"{group['layers']}", f"{group['window'] or '-'}", *held)
    return table
