"""The report of a run, or of several runs of the same load: its sections and their texts.

A function makes each section from the inputs of the page, and returns None if there is nothing to show. ``SECTIONS``
has these functions in the order of the page.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import plotly.graph_objects as go

from ...sim.memory.accounting.worths import WORTHS
from ...sim.metrics.objectives import Objectives
from ...sim.metrics.registry import METRICS
from ...sim.metrics.views import SLOTS_VIEW, USAGE_VIEW, VIEWS, moved_text
from ...sim.recording.blocks import BlockMap
from ...sim.types.ticks import PER_SECOND
from ..blockmap.player import PlayedMap, Player
from ..blockmap.table_viewer import TableViewer, chosen_request
from ..data.answer import answer_of, comparison, key_numbers, question, sentence
from ..data.cache_worth import worth_over_time, worth_sentence
from ..data.pool_over_time import keeps_over_idle_spans, pool_over_time
from ..data.results import Result
from ..figures.figures import (
    free_run_histogram,
    hits_by_tier,
    largest_free_run,
    ledger_over_time,
    request_timeline,
    waste,
    worth_by_tier,
)
from ..style.palette import BUCKETS, WORTH_HUES
from . import serving_sections
from .page import Section, write_page
from .serving_sections import Measured


class PageInputs(NamedTuple):
    """The inputs of a page.

    Attributes:
        results: One run, or several runs of the same load.
        request: The request with the block tables to show; None selects one, see ``chosen_request``.
        goal: Objectives of every request.
        measured: The requests beside those of a real server; None without a measurement.
        step_times: What the step times of the runs rest on, a line each.
    """

    results: Sequence[Result]
    request: int | None = None
    goal: Objectives | None = None
    measured: Measured | None = None
    step_times: Sequence[str] = ()


#: Policies that admit no request below the watermark.
_WATERMARKED = ("vllm-sosp23", "vllm-v0", "vllm-v1", "sarathi")
_FREE_RUN = "free blocks, and the longest run of them"


def write_report(path: str | PathLike[str], inputs: PageInputs) -> Path:
    """Write the page to ``path``, and return the path.

    Raises:
        UserError: It cannot be written.
    """
    numbers = key_numbers(inputs.results[0].summary) if len(inputs.results) == 1 else ()
    return write_page(path, title(inputs), _lead(inputs), _sections(inputs), numbers=numbers)


def figures(inputs: PageInputs) -> list[go.Figure]:
    """Every figure of the page, in its order."""
    return [
        figure
        for section in _sections(inputs)
        for shown in (*(widget.figures for widget in section.widgets), section.figures)
        for figure in shown
    ]


def _sections(inputs: PageInputs) -> list[Section]:
    # The numbers of a single run stand above its pictures already.
    order = SECTIONS if len(inputs.results) > 1 else (*SECTIONS[1:], SECTIONS[0])
    return [made for make in order if (made := make(inputs)) is not None]


def _served(inputs: PageInputs) -> list[Result]:
    """The runs that served at least one request."""
    return [result for result in inputs.results if len(result.residencies)]


def _recorded(inputs: PageInputs) -> list[tuple[Result, BlockMap]]:
    """The runs with recorded blocks, and their block maps."""
    return [(result, blocks) for result in inputs.results if (blocks := result.blocks) is not None]


def _on_one_clock(figure: go.Figure, inputs: PageInputs) -> go.Figure:
    """A figure over time, from the start to the end of the longest of the compared runs."""
    return figure.update_xaxes(range=[0, max(result.end_s for result in inputs.results)])


def title(inputs: PageInputs) -> str:
    """The title of the page: the question that it answers."""
    loads = dict.fromkeys(result.about["workload"]["name"] for result in inputs.results)
    return question([(each.name, each.summary, each.about["settings"]) for each in inputs.results], " and ".join(loads))


def _lead(inputs: PageInputs) -> str:
    first, *others = inputs.results
    answer = comparison({each.name: each.summary for each in inputs.results})
    if not others:
        answer = sentence(first.summary, first.about["settings"])
    loads = dict.fromkeys(_load_text(result) for result in inputs.results)
    if len({result.about["workload"]["sha256"] for result in inputs.results}) > 1:
        loads["These runs served different requests; compare them with care."] = None
    return "\n\n".join((answer, *loads, *inputs.step_times))


def _load_text(result: Result) -> str:
    load, summary = result.about["workload"], result.summary
    tokens = f"{summary['total_input_tokens']:,} prompt tokens and {summary['total_output_tokens']:,} output tokens"
    return f"{load['name']}: {load['requests']:,} requests, {tokens}."


def _summary(inputs: PageInputs) -> Section:
    text = "Medians; requests/s while requests arrive; waste and idle slots as means over time."
    rows = [_summary_row(result) for result in inputs.results]
    # A run that shares, preempts or refuses nothing needs no column for it.
    given = [name for name in rows[0] if name not in _IF_ANY or any(row[name] for row in rows)]
    return Section("Summary", text, rows=[{name: row[name] for name in given} for row in rows])


_IF_ANY = ("Replicas", "Saved by sharing (%)", "Refused (pool too small)", "Rejected (queue limits)")


def _summary_row(result: Result) -> dict[str, Any]:
    settings, summary, found = result.about["settings"], result.summary, answer_of(result.summary)
    return {
        "Run": result.name,
        "Model": settings["model"],
        "GPU": settings["gpu"],
        "Replicas": result.num_replicas if result.num_replicas > 1 else None,
        "Median TTFT (ms)": METRICS["median_ttft_ms"].rounded(found.ttft_ms),
        "Median TPOT (ms)": METRICS["median_tpot_ms"].rounded(found.tpot_ms),
        "Requests/s": METRICS["request_throughput"].rounded(found.served),
        "Output tokens/s": METRICS["output_throughput"].rounded(summary["output_throughput"]),
        "Requests in a batch": METRICS["mean_batch"].rounded(summary["mean_batch"]),
        "Preemptions": found.preemptions,
        "Waste of the KV cache (%)": round(found.waste_pct, 1),
        "Idle (%)": round(found.idle_pct, 1),
        "Time (s)": round(summary["duration"], 1),
        "Saved by sharing (%)": round(summary["sharing"]["saved_pct"], 1) if summary.get("sharing") else None,
        "Refused (pool too small)": summary["refused"],
        "Rejected (queue limits)": summary.get("rejected", 0),
    }


def _block_maps(inputs: PageInputs) -> Section | None:
    maps = [PlayedMap(each.name, blocks, each.request_of_sequence) for each, blocks in _recorded(inputs)]
    if not maps:
        return None
    text = (
        "Every physical block over time: blue holds tokens or soon will, warm colours are waste, a pale shade is"
        " reserved. Where bands are wide enough to be seen each request has a shade of its own. Drag across a map to"
        " zoom; point at it, or at the blocks below, to see which request holds them; play, or move the time, to watch the pool"
        " fill and empty."
    )
    return Section("The block map", text, widgets=[Player(maps)])


def _memory(inputs: PageInputs) -> Section | None:
    served = _served(inputs)
    if not served:
        return None
    figures = [_on_one_clock(_ledger(result), inputs) for result in served]
    return Section("Memory over time", _ledger_text(served), figures)


def _ledger_text(results: Sequence[Result]) -> str:
    sentences = ["The ledger: every slot of the pool in exactly one bucket."]
    probed = [result for result in results if result.is_probed]
    unrecorded = [result for result in results if result.blocks is None and not result.is_probed]
    if probed:
        sentences.append("Of a live server from the file of the probe, at the start of every step.")
    if len(unrecorded) + len(probed) < len(results):
        sentences.append("Where blocks were recorded, at the moments of the block map.")
    if unrecorded:
        sentences.append("From memory.parquet, at every scheduling decision: changes in between show at the next one.")
    if any(map(keeps_over_idle_spans, unrecorded)):
        sentences.append(
            "It has no rows for blocks that are kept while no request runs: the last decision is drawn on."
        )
    return " ".join(sentences)


def _ledger(result: Result) -> go.Figure:
    """The ledger of a run; for several replicas, each with a watermark of its own, the sum."""
    table = pool_over_time(result)
    replica, replicas = result.about["replica"], result.num_replicas
    table = table.assign(start_s=table["start_ticks"] / PER_SECOND)
    heeds = result.policy in _WATERMARKED and replicas == 1
    watermark = replica.get("watermark_blocks", 0) * replica["block_size"] if heeds else 0
    of = f" of {replicas} replicas" if replicas > 1 else ""
    return ledger_over_time(table, f"{result.name}: KV slots{of} by bucket", watermark, result.end_s)


def _waste(inputs: PageInputs) -> Section | None:
    rows = [_waste_row(result) for result in _served(inputs)]
    if not rows:
        return None
    moved = (
        f"{row['policy']}: {text}."
        for row in rows
        if (text := moved_text({bucket: row[f"{bucket}_pct"] for bucket in SLOTS_VIEW.categories}))
    )
    text = (
        "The same slots in the paper's view (its Fig 2), and what becomes of each slot. The table has the KV cache usage in"
        " vLLM's two units: blocks in use (cached blocks without references are free), and slots that hold tokens. A mean"
        " over iterations counts each step of the span once, a mean over time weights each moment of the span equally."
    )
    usage = [row for result in _served(inputs) for row in _usage_rows(result)]
    pictures = [waste(rows, view) for view in VIEWS.values()]
    paragraphs = "\n\n".join((text, *moved))
    return Section("Use of the memory", paragraphs, pictures, rows=usage, definitions=USAGE_VIEW.definitions())


def _usage_rows(result: Result) -> list[dict[str, Any]]:
    """From the buckets, because older results have no ``usage``."""
    content = result.summary["waste"]
    start_s, end_s = content["window_s"]
    over_steps, over_time = (
        USAGE_VIEW.grouped(content[f"mean_over_{of}_pct"]["buckets"]) for of in ("iterations", "time")
    )
    return [
        {
            "Run": result.name,
            "KV cache usage": category.label,
            "Mean over iterations (%)": round(over_steps[unit], 1),
            "Mean over time (%)": round(over_time[unit], 1),
            "Span": f"{start_s:g} to {end_s:,.1f} s",
        }
        for unit, category in USAGE_VIEW.categories.items()
    ]


def _waste_row(result: Result) -> dict[str, Any]:
    shares = result.summary["waste"]["mean_over_iterations_pct"]
    return {
        "policy": result.name,
        "batched_requests": result.summary["mean_batch"],
        "output_tokens_per_s": result.summary["output_throughput"],
        **{f"{name}_pct": value for name, value in (shares["paper_view"] | shares["buckets"]).items()},
    }


def _prefix_cache(inputs: PageInputs) -> Section | None:
    """Hits on the GPU and on the host, of pages with a run that offloads."""
    if not any(result.summary.get("kv_offloading") for result in inputs.results):
        return None
    text = (
        "The host is asked for the tokens that the GPU does not have. Look-ups of preempted requests are not in the rates. Blocks that"
        " are loaded and stored are copied from and to the host."
    )
    rows = [row for result in inputs.results for row in _tier_rows(result)]
    worths = {
        result.name: worth for result in inputs.results if "host" in (worth := result.summary.get("cache_worth") or {})
    }
    drawn = [hits_by_tier({result.name: result.summary for result in inputs.results})]
    return Section("Prefix cache by tier", text, [*drawn, *([worth_by_tier(worths)] if worths else [])], rows=rows)


def _cache_worth(inputs: PageInputs) -> Section | None:
    """What the cached blocks were worth, of runs whose requests share prefixes."""
    divided = [result for result in _served(inputs) if "cache_worth" in result.summary]
    if not divided:
        return None
    tables = [(result, table) for result in divided if (table := worth_over_time(result)) is not None]
    layers = {"held": BUCKETS["live"], **WORTH_HUES, "free": BUCKETS["free"]}
    definitions = [(worth.label, f"cached slots {worth.which}") for worth in WORTHS.values()]
    figures = [
        _on_one_clock(
            ledger_over_time(
                table,
                f"{result.name}: KV slots by the worth of what is cached",
                end_s=result.end_s,
                layers=layers,
                definitions=definitions,
            ),
            inputs,
        )
        for result, table in tables
    ]
    finding = "\n\n".join(f"{result.name}: {worth_sentence(result.summary['cache_worth'])}" for result in divided)
    text = (
        "The ledger's cached slots, each by what became of its contents when the run went on. Held slots are in tables of requests."
        " Where nothing runs the last decision is drawn on."
    )
    return Section("Worth of the cached blocks", text, figures, finding=finding)


#: Tiers of the prefix cache, by their key in the summary.
_TIERS = {"prefix_cache": "GPU", "kv_offloading": "host"}


def _tier_rows(result: Result) -> list[dict[str, Any]]:
    tiers = {name: found for key, name in _TIERS.items() if (found := result.summary.get(key)) is not None}
    if (host := tiers.get("host")) is not None:
        queried = host["queried_tokens"]
        for label, tier in host.get("tiers", {}).items():
            tiers[f"of these from {label}"] = tier | {"queried_tokens": queried}
    return [
        {
            "Run": result.name,
            "Tier": tier,
            "Tokens looked up": found["queried_tokens"],
            "Tokens hit": found["hit_tokens"],
            "Hit rate (%)": round(100 * found["hit_rate"], 1),
            "Evicted blocks": found["evicted_blocks"],
            "Blocks": found.get("num_blocks", result.summary["num_gpu_blocks"]),
            "Blocks in use at most": found.get("max_used_blocks"),
            "Blocks loaded": found.get("loaded_blocks"),
            "Blocks stored": found.get("stored_blocks"),
        }
        for tier, found in tiers.items()
    ]


def _fragmentation(inputs: PageInputs) -> Section | None:
    recorded = _recorded(inputs)
    if not recorded:
        return None
    figures = [
        figure
        for result, blocks in recorded
        for figure in (
            _on_one_clock(largest_free_run(blocks, f"{result.name}: {_FREE_RUN}"), inputs),
            free_run_histogram(blocks, f"{result.name}: lengths of the free runs"),
        )
    ]
    text = (
        "A policy that reserves memory in one piece can use a free block only where its neighbours are free too."
        " A paged policy takes any block: it does not mind short runs. Stranded slots are free blocks here. The share outside the"
        " longest run is the classical index of external fragmentation; it is no category of the pool."
    )
    return Section("Runs of free blocks", text, figures)


def _latencies(inputs: PageInputs) -> Section | None:
    return serving_sections.latencies(inputs.results, inputs.goal)


def _serving(inputs: PageInputs) -> Section | None:
    return serving_sections.serving(inputs.results)


def _measured(inputs: PageInputs) -> Section:
    return serving_sections.measured(inputs.measured, [each.name for each in inputs.results if each.is_probed])


def _timeline(inputs: PageInputs) -> Section | None:
    served = _served(inputs)
    if not served:
        return None
    figures = [
        _on_one_clock(request_timeline(each.requests, each.residencies, f"{each.name}: requests over time"), inputs)
        for each in served
    ]
    return Section("Requests over time", "From arrival to the last token. Drag to zoom.", figures)


def _tables(inputs: PageInputs) -> Section | None:
    viewers = [viewer for result in inputs.results if (viewer := _viewer(result, inputs.request)) is not None]
    if not viewers:
        return None
    shown = ", ".join(f"request {viewer.data['request']} of {viewer.data['name']}" for viewer in viewers)
    text = (
        f"Logical blocks and the physical ones behind them, step by step, as the PagedAttention paper draws them in its"
        f" Figs 6 to 8: {shown}. A block that several tables name has a coloured edge: it is copied before one of them"
        " writes into it."
    )
    return Section("Block tables", text, widgets=viewers)


def _viewer(result: Result, request: int | None) -> TableViewer | None:
    """The block tables of one request, if a recorded plan has them."""
    plan, requests = result.plan, result.request_of_sequence
    if plan is None or not plan.is_paged:
        return None
    chosen = chosen_request(plan, requests) if request is None else request
    if chosen is None or not np.isin(np.flatnonzero(requests == chosen), plan.sequence).any():
        return None
    return TableViewer(result.name, plan, chosen, np.flatnonzero(requests == chosen).tolist())


SECTIONS: tuple[Callable[[PageInputs], Section | None], ...] = (
    _summary,
    _block_maps,
    _memory,
    _waste,
    _prefix_cache,
    _cache_worth,
    _fragmentation,
    _latencies,
    _serving,
    _timeline,
    _measured,
    _tables,
)
"""The page, in order; what a function has nothing to show for is left out."""
