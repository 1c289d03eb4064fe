"""One sentence for a figure: what it shows, in the simulation and in the paper, with the numbers of its document."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from math import fsum

from ...reports.style.labels import number
from ..paper.block_sizes.block_sizes import RECOMPUTE, SWAP
from ..paper.comparison import Payload
from ..paper.figures import fig1, fig15, fig19a
from ..paper.figures.fig16 import PREFIX_TOKENS
from ..paper.rate_sweep.panels import CROSSING, MAX, ORACLE, VLLM
from ..paper.rate_sweep.rate_sweep import TARGET_S
from ..paper.rows import Row

_TOKEN_STATES, _BATCH = "token_states_pct", "batched_requests"
_AT_TARGET = f"at {TARGET_S:g} s/token"


def headline(document: Payload) -> str:
    """The sentence; empty for a figure without one, and for rows that lack the systems of the sentence."""
    panel = re.fullmatch(r"(fig1[24])[a-f]", document["figure"])
    make = _HEADLINES.get(panel[1] if panel else document["figure"])
    if make is None:
        return ""
    try:
        return make(*(_Values(document["rows"], side) for side in ("simulated", "published")))
    except KeyError:
        return ""


class _Values:
    """The values of one side of a document's rows.

    Args:
        side: ``simulated`` or ``published``.
    """

    def __init__(self, rows: Iterable[Row], side: str) -> None:
        self._at = {(row["series"], row["metric"], row.get("x")): row[side] for row in rows if row[side] is not None}

    def one(self, series: str, metric: str, x: float | None = None) -> float:
        """A value; ``KeyError`` if there is none."""
        return self._at[series, metric, x]

    def text(self, series: str, metric: str, x: float | None = None) -> str:
        """The same as text."""
        return number(metric, self.one(series, metric, x))

    def ratio(self, above: str, below: str, metric: str) -> float:
        """The value of one series over that of another."""
        return self.one(above, metric) / self.one(below, metric)

    def total(self, metric: str) -> float:
        """The sum over the series."""
        return sum(value for (_, of, _), value in self._at.items() if of == metric)

    def names(self) -> list[str]:
        """The series, in their order."""
        return list(dict.fromkeys(name for name, _, _ in self._at))

    def along(self, series: str) -> dict[float, float]:
        """The values of a series by x; ``KeyError`` if there are none."""
        found = {x: value for (name, _, x), value in self._at.items() if name == series and x is not None}
        if not found:
            raise KeyError(series)
        return found


def _slots(simulated: _Values, published: _Values) -> str:
    def text(side: _Values) -> str:
        return ", ".join(f"{side.text(name, 'kv_slots_k')} ({name})" for name in side.names())

    return f"Beside the weights the KV cache has {text(simulated)} thousand slots; published {text(published)}."


def _throughput(simulated: _Values, published: _Values) -> str:
    measured = fig1.SERIES["paper"][0]
    batch = max(published.along(measured))
    at = published.one(measured, fig1.METRIC, batch)
    predicted = " and ".join(
        f"{simulated.text(name, fig1.METRIC, batch)} by the {name} ({_off(simulated.one(name, fig1.METRIC, batch), at)})"
        for name, kind in fig1.SERIES.values()
        if kind == "predicted"
    )
    return f"A batch of {batch:g} sequences decodes {predicted} tokens/s; published {number(fig1.METRIC, at)}."


def _pool(simulated: _Values, published: _Values) -> str:
    def orcas(side: _Values) -> str:
        return _span(side.one(name, _TOKEN_STATES) for name in published.names() if name != VLLM)

    mine, printed = (side.text(VLLM, _TOKEN_STATES) for side in (simulated, published))
    return (
        f"Token states fill {mine} % of the pool under {VLLM} and {orcas(simulated)} under the Orcas; published"
        f" {printed} % and {orcas(published)}."
    )


def _reserved(simulated: _Values, published: _Values) -> str:
    used, kept, never = ("token_slots", "reserved_slots", "internal_slots")
    slots = sum(simulated.total(part) for part in (used, kept, never))
    return (
        f"Of {slots:,} slots of two requests {simulated.total(used):,} are token states and {simulated.total(never):,} internal,"
        f" all of them for output that never comes; published {published.total(used):,} and {published.total(never):,}."
    )


def _lengths(simulated: _Values, published: _Values) -> str:
    def text(side: _Values) -> str:
        prompt, output = "mean_prompt_tokens", "mean_output_tokens"
        return ", ".join(f"{name} {side.text(name, prompt)} and {side.text(name, output)}" for name in side.names())

    return f"Mean tokens of a prompt and an output: {text(simulated)}; published {text(published)}."


def _rates(simulated: _Values, published: _Values) -> str:
    """The lead of vLLM over the Orca that knows every length and over the one with the longest reservation."""
    parts = []
    for below in (ORACLE, MAX):
        mine, printed = (side.ratio(VLLM, below, CROSSING) for side in (simulated, published))
        parts.append(f"{mine:.2f} times that of {below} (published {printed:.2f}, {_off(mine, printed)})")
    return f"{_AT_TARGET.capitalize()} the request rate of {VLLM} is {' and '.join(parts)}."


def _batches(simulated: _Values, published: _Values) -> str:
    mine, printed = (side.ratio(VLLM, ORACLE, _BATCH) for side in (simulated, published))
    return (
        f"{VLLM} batches {simulated.text(VLLM, _BATCH)} requests in the mean, {mine:.2f} times as many as {ORACLE};"
        f" published {published.text(VLLM, _BATCH)} and {printed:.2f} times."
    )


def _shared(simulated: _Values, published: _Values) -> str:
    shown = (fig15.SAMPLES_ALPACA, fig15.BEAMS_ALPACA, fig15.SAMPLES_SHAREGPT, fig15.BEAMS_SHAREGPT)
    parts = (
        f"{name}: {_span(simulated.along(name).values())} (published {_span(published.along(name).values())})"
        for name in shown
    )
    few, many = fig15.SEQUENCES[0], fig15.SEQUENCES[-1]
    return f"Memory that sharing blocks saves with {few} to {many} sequences a request: {'; '.join(parts)}."


def _prefixes(simulated: _Values, published: _Values) -> str:
    def text(side: _Values) -> str:
        shots = (name.split(",")[0] for name in PREFIX_TOKENS)
        return " and ".join(f"{side.ratio(f'{VLLM}, {shot}', f'{ORACLE}, {shot}', CROSSING):.2f}" for shot in shots)

    prefixes = " and ".join(map(str, PREFIX_TOKENS.values()))
    return (
        f"Behind prefixes of {prefixes} tokens {VLLM} sustains {text(simulated)} times the request rate of {ORACLE}"
        f" {_AT_TARGET}; published {text(published)}."
    )


def _best_sizes(simulated: _Values, published: _Values) -> str:
    def text(side: _Values, series: str) -> str:
        latency, size = min((latency, size) for size, latency in side.along(series).items())
        return f"{size:g} ({number('latency_s_per_token', latency)} s/token)"

    parts = (f"{name}: {text(simulated, name)}, published {text(published, name)}" for name in simulated.names())
    return f"Block size with the lowest latency at {'; at '.join(parts)}."


def _swaps(simulated: _Values, published: _Values) -> str:
    small, large = min(simulated.along(RECOMPUTE)), max(simulated.along(RECOMPUTE))

    def text(side: _Values) -> tuple[str, str, str]:
        ways = ("swap out", "swap in")
        few, many = (fsum(side.one(way, fig19a.METRIC, size) for way in ways) for size in (small, large))
        return f"{few:.0f} ms", f"{many:.0f} ms", f"{side.one(RECOMPUTE, fig19a.METRIC, large):.0f} ms"

    mine, printed = text(simulated), text(published)
    return (
        f"Swapping {fig19a.TOKENS} tokens out and back in takes {mine[0]} with blocks of {small} and {mine[1]} with blocks of"
        f" {large}, recomputing them {mine[2]}; published {printed[0]}, {printed[1]} and {printed[2]}."
    )


def _recomputing(simulated: _Values, published: _Values) -> str:
    def text(side: _Values) -> str:
        again, swapped = side.along(RECOMPUTE), side.along(SWAP)
        quicker = [size for size in again if again[size] < swapped[size]]
        if len(quicker) == len(again):
            return f"all {len(again)} block sizes"
        sizes = ", ".join(f"{size:g}" for size in quicker) or "none"
        return f"block size{'s' if len(quicker) > 1 else ''} {sizes}"

    return (
        f"Recomputing preempted requests has a lower latency than swapping them at {text(simulated)}; published: at"
        f" {text(published)}."
    )


def _off(simulated: float, published: float) -> str:
    return f"{100 * (simulated / published - 1):+.0f} %"


def _span(percents: Iterable[float]) -> str:
    values = list(percents)
    return f"{min(values):.1f} to {max(values):.1f} %"


_HEADLINES: dict[str, Callable[[_Values, _Values], str]] = {
    "table1": _slots,
    "fig1": _throughput,
    "fig2": _pool,
    "fig3": _reserved,
    "fig11": _lengths,
    "fig12": _rates,
    "fig13a": _batches,
    "fig13b": _batches,
    "fig14": _rates,
    "fig15": _shared,
    "fig16": _prefixes,
    "fig17": _rates,
    "fig18b": _best_sizes,
    "fig19a": _swaps,
    "fig19b": _recomputing,
    "waste": _pool,
}
