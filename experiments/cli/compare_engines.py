"""``fragmeter compare --engine-source A --engine-source B``: two vLLMs under one load, and what moved between buckets."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import permutations
from pathlib import Path
from typing import Any

from ...reports.page.table import Table
from ...sim.memory.accounting.buckets import DECLARED
from ...sim.metrics.registry import headings, metric_text
from ...sim.types.errors import SettingError, UserError
from ..runs.engine_sources import FirstStep, Side, first_difference, moved, sides
from ..runs.inputs import Inputs
from ..runs.output import Report
from ..runs.points import flat
from ..runs.serving import load_in_words

_MIB = 1 << 20
#: The policy under which vLLM schedules for itself.
_POLICY = "vllm-real"
_SHOWN = headings(
    "request_throughput",
    "output_throughput",
    "mean_ttft_ms",
    "p99_ttft_ms",
    "mean_tpot_ms",
    "p99_tpot_ms",
    "preemptions.recompute",
    "mean_batch",
) | {"prefix_cache.hit_tokens": "tokens found in the prefix cache", "prefix_cache.evicted_blocks": "evicted blocks"}
#: Numbers of a list that a line shows.
_MOST_SHOWN = 6


def compare_engines(report: Report, inputs: Inputs, sources: Sequence[Path], others: Mapping[str, Any]) -> None:
    """Report what two vLLMs do with one load.

    Args:
        others: Other flags of ``compare``, of which none applies.

    Raises:
        UserError: A flag does not apply, or a source cannot serve the load.
    """
    for name, value in others.items():
        if value:
            raise UserError(
                f"--engine-source compares two vLLMs under the settings as they are; leave out --{name.replace('_', '-')}"
            )
    if len(sources) != 2:
        raise SettingError("engine_source", len(sources), "two are compared; give it twice")
    if inputs.settings.policy != _POLICY:
        inputs = replace(inputs, settings=replace(inputs.settings, policy=_POLICY))
    lengths = inputs.lengths()
    base, other = sides(sources, inputs.settings, inputs.workload(lengths))
    names = [f"{os.fspath(source)} ({side.version})" for source, side in zip(sources, (base, other), strict=True)]
    first = first_difference(base, other)
    found = [_buckets(base, other), _metrics(base, other)]
    words = [*_steps(base, other, first), f"Memory of one GPU: a KV cache of {base.pool_bytes / _MIB:,.0f} MiB."]
    load = load_in_words(inputs)
    report.print_line(f"A: {names[0]}")
    report.print_line(f"B: {names[1]}")
    if load is not None:
        report.print_line(f"Load: {load}")
    for text in words:
        report.print_line(text)
    for table in found:
        report.print_line()
        report.console.print(table)
    report.markdown(lambda: "\n".join(_document(names, load, words, found)))
    report.data(
        {
            "sources": [
                {"source": os.fspath(source), "version": side.version, "steps": len(side.steps)}
                for source, side in zip(sources, (base, other), strict=True)
            ],
            "first_difference": None if first is None else first._asdict(),
            "buckets_bytes": {
                name: {"base": one, "other": two, "moved": two - one} for name, one, two in moved(base, other)
            },
            "metrics": {
                name: {"base": one, "other": two, "difference": two - one} for name, one, two in _values(base, other)
            },
        }
    )


def _document(names: Sequence[str], load: str | None, words: Sequence[str], tables: Sequence[Table]) -> Iterator[str]:
    """Lines of Markdown, for a pull request."""
    yield "### What moved in the KV cache"
    yield ""
    yield from (f"- {side}: `{name}`" for side, name in zip("AB", names, strict=True))
    if load is not None:
        yield f"- Load: {load}"
    yield from (f"- {text}" for text in words)
    for table in tables:
        yield ""
        yield from table.markdown()
    yield ""


def _steps(base: Side, other: Side, first: FirstStep | None) -> Iterator[str]:
    """How far both do the same, and the first step in which they do not."""
    if first is None:
        yield f"All {len(base.steps):,} steps are the same."
        return
    mine, theirs, alike = first.base, first.other, 0
    if isinstance(mine, list) and isinstance(theirs, list):
        alike = sum(each in theirs for each in mine)
        # Where only the order differs, all are shown.
        if (alike, alike) != (len(mine), len(theirs)):
            mine, theirs = ([each for each in own if each not in their] for own, their in permutations((mine, theirs)))
        else:
            alike = 0
    same = f" ({alike:,} are the same)" * (alike > 0)
    yield (
        f"The first {first.number:,} steps are the same (A has {len(base.steps):,}, B {len(other.steps):,}). "
        f"Step {first.number:,} differs, {first.field}{same}: A {_value(mine)}, B {_value(theirs)}."
    )


def _value(value: Any) -> str:
    if value is None:
        return "has no such step"
    if not isinstance(value, list):
        return f"{value:,}"
    if not value:
        return "none"
    texts = [f"{each[0]}: {each[1]}" if isinstance(each, list) else str(each) for each in value[:_MOST_SHOWN]]
    more = len(value) - len(texts)
    return ", ".join([*texts, *([f"and {more} more"] if more else [])])


def _buckets(base: Side, other: Side) -> Table:
    table = Table("mean over time, MiB", "A", "B", "moved")
    for name, one, two in moved(base, other):
        table.add_row(DECLARED[name].label, f"{one / _MIB:,.1f}", f"{two / _MIB:,.1f}", f"{(two - one) / _MIB:+,.1f}")
    return table


def _values(base: Side, other: Side) -> Iterator[tuple[str, float, float]]:
    one, two = (dict(flat(dict(side.summary))) for side in (base, other))
    for name in _SHOWN:
        if isinstance(one.get(name), int | float) and isinstance(two.get(name), int | float):
            yield name, one[name], two[name]


def _metrics(base: Side, other: Side) -> Table:
    table = Table("", "A", "B", "difference")
    for name, one, two in _values(base, other):
        table.add_row(_SHOWN[name], metric_text(name, one), metric_text(name, two), f"{two - one:+,.4g}")
    return table
