"""The answer of a run: the first line on a terminal, and title, sentence and numbers of the first screen of its page.

All are made from ``summary.json`` and the settings in ``run.json``. The served rate is that while requests arrive, where they do not all
arrive at once. Waste is what sequences hold or nobody can use, without tokens; idle slots are free or cached. Both are means over time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from ...sim.metrics.registry import WHOLE_FROM, metric_text
from ...sim.metrics.views import UNUSED, WASTE, amount, nine_buckets
from ..style.labels import counted


class KeyNumber(NamedTuple):
    """A large number at the top of a report: what it is, the number with its unit as text, and a line below it, such as the p99 of a median."""

    label: str
    value: str
    note: str = ""


class Answer(NamedTuple):
    """The numbers of a run that answer.

    Attributes:
        served: Requests/s.
        ttft_ms, tpot_ms: Medians.
        waste_pct, idle_pct: Of the KV cache.
    """

    served: float
    ttft_ms: float
    tpot_ms: float
    preemptions: int
    waste_pct: float
    idle_pct: float


def answer_of(summary: Mapping[str, Any]) -> Answer:
    """The answer of a run by its summary; earlier versions have no rate while requests arrive."""
    arriving = summary.get("request_throughput_while_arriving")
    shares = nine_buckets(summary["waste"]["mean_over_time_pct"]["buckets"])
    return Answer(
        summary["request_throughput"] if arriving is None else arriving,
        summary["median_ttft_ms"],
        summary["median_tpot_ms"],
        sum(summary["preemptions"].values()),
        amount(shares, WASTE),
        amount(shares, UNUSED),
    )


def subject(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """What serves: policy, model and GPUs, as a phrase."""
    ranks = settings.get("tensor_parallel_size")
    name = settings["gpu"]
    if ranks is not None:
        gpus = ranks * settings.get("pipeline_parallel_size", 1) * summary.get("num_replicas", 1)
        name = f"{gpus} x {PurePath(name).stem if name.endswith('.json') else name}"
    return f"{settings['policy']}: {settings['model']} on {name}"


def sentence(summary: Mapping[str, Any], settings: Mapping[str, Any]) -> str:
    """The answer of a run."""
    who, found = subject(summary, settings), answer_of(summary)
    if not summary["completed"]:
        return f"{who} serves none of the requests."
    return (
        f"{who} serves {metric_text('request_throughput', found.served)} requests/s, median TTFT {duration(found.ttft_ms)} and TPOT"
        f" {duration(found.tpot_ms)}, with {counted(found.preemptions, 'preemption')}; {found.waste_pct:.1f} % of the KV"
        f" cache is waste and {found.idle_pct:.1f} % idle."
    )


def comparison(runs: Mapping[str, Mapping[str, Any]]) -> str:
    """The answer of several runs, by their names and summaries: which is the best by each number."""
    found = {name: answer_of(each) for name, each in runs.items() if each["completed"]}
    if not found:
        return "None of the runs serves any of the requests."
    best = {
        "the most requests/s": max(found, key=lambda name: found[name].served),
        "the lowest median TTFT": min(found, key=lambda name: found[name].ttft_ms),
        "the lowest median TPOT": min(found, key=lambda name: found[name].tpot_ms),
        "the least waste": min(found, key=lambda name: found[name].waste_pct),
    }
    parts = [
        f"{name} has {_listed([what for what, winner in best.items() if winner == name])}"
        for name in dict.fromkeys(best.values())
    ]
    return f"{'; '.join(parts)}."


def question(runs: Sequence[tuple[str, Mapping[str, Any], Mapping[str, Any]]], load: str) -> str:
    """The question that a page answers, for runs by name, summary and settings."""
    if len(runs) > 1:
        names = [name for name, *_ in runs]
        return f"Which serves {load} {'better' if len(runs) == 2 else 'best'}: {_listed(names, 'or')}?"
    [(_, summary, settings)] = runs
    policy, _, rest = subject(summary, settings).partition(": ")
    return f"How does {rest} serve {load} under {policy}?"


def key_numbers(summary: Mapping[str, Any]) -> list[KeyNumber]:
    """The five numbers of a run."""
    found, outputs = answer_of(summary), metric_text("output_throughput", summary["output_throughput"])
    return [
        KeyNumber("Median TTFT", duration(found.ttft_ms), f"p99 {duration(summary['p99_ttft_ms'])}"),
        KeyNumber("Median TPOT", duration(found.tpot_ms), f"p99 {duration(summary['p99_tpot_ms'])}"),
        KeyNumber("Requests/s", metric_text("request_throughput", found.served), f"{outputs} output tokens/s"),
        KeyNumber("Preemptions", f"{found.preemptions:,}", f"of {counted(summary['completed'], 'request')}"),
        KeyNumber("Waste of the KV cache", f"{found.waste_pct:.1f} %", f"{found.idle_pct:.1f} % idle"),
    ]


def duration(milliseconds: float) -> str:
    """A latency with its unit."""
    if milliseconds < WHOLE_FROM:
        return f"{metric_text('mean_e2el_ms', milliseconds)} ms"
    return f"{milliseconds / 1000:,.1f} s"


def _listed(names: Sequence[str], last: str = "and") -> str:
    *first, end = names
    return f"{', '.join(first)} {last} {end}" if first else end
