"""The metrics of a run, each declared once. Whatever computes, prints, draws or exports one takes name, label, unit and format here.

    LATENCIES x STATISTICS   the keys of vllm bench serve, such as ``p99_ttft_ms``, with labels such as "p99 TTFT"
    METRICS                  these and every other metric with a line in a table, by its path in ``summary.json``

Percentiles are generated: one more in ``PERCENTILES`` is in the summary, its table, and comparisons with measured summaries.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import floor, isfinite, log10
from typing import Literal

from .views import PAPER_VIEW

Direction = Literal["more", "less", ""]
#: Values from which a metric is shown without decimals.
WHOLE_FROM = 10_000


@dataclass(frozen=True, slots=True)
class Latency:
    """A time of requests, or of gaps between tokens.

    Attributes:
        name: vLLM's, in keys.
        meaning: In words.
        family, about: Its histogram at vLLM's ``/metrics`` and the description there; empty where a run exports none.
        of_requests: Whether each request has one value; gaps are many.
    """

    name: str
    meaning: str
    family: str = ""
    about: str = ""
    of_requests: bool = True

    @property
    def label(self) -> str:
        """Its abbreviation."""
        return self.name.upper()


@dataclass(frozen=True, slots=True)
class Metric:
    """A number of a summary.

    Attributes:
        path: Its keys in ``summary.json``, joined by dots.
        label: In words, without its unit.
        unit: Empty if the label says it, or for a count.
        better: Whether more of it is better, or less; empty where that depends.
        decimals: In text, below ``WHOLE_FROM``; 0 for a count.
        digits: Significant digits at the least, for a value below 1: 0.196 goodput, not 0.20.
    """

    path: str
    label: str
    unit: str = ""
    better: Direction = ""
    decimals: int = 1
    digits: int = 0

    @property
    def heading(self) -> str:
        """Label and unit, in a table."""
        return f"{self.label}, {self.unit}" if self.unit else self.label

    @property
    def title(self) -> str:
        """Label and unit, as a page has them."""
        return f"{self.label} ({self.unit})" if self.unit else self.label

    def text(self, value: float) -> str:
        """A value as every table, sentence and page shows it, without the unit."""
        return f"{value:,.{self._places(value)}f}"

    def rounded(self, value: float) -> float:
        """A value with the decimals of ``text``, for tables that sort numbers."""
        return round(value, self._places(value) or None)

    def _places(self, value: float) -> int:
        # The mean of a count over several runs.
        decimals = self.decimals or int(value % 1 != 0)
        if self.digits and value and isfinite(value):
            decimals = max(decimals, self.digits - 1 - floor(log10(abs(value))))
        return decimals if abs(value) < WHOLE_FROM else 0


LATENCIES = {
    each.name: each
    for each in (
        Latency("ttft", "time to first token", "vllm:time_to_first_token_seconds", "Time to first token in seconds."),
        Latency(
            "tpot",
            "time per output token",
            "vllm:request_time_per_output_token_seconds",
            "Time per output token of a request in seconds.",
        ),
        Latency("itl", "inter-token latency", of_requests=False),
        Latency(
            "e2el",
            "end-to-end latency",
            "vllm:e2e_request_latency_seconds",
            "End-to-end request latency in seconds.",
        ),
    )
}
OF_REQUESTS = tuple(name for name, each in LATENCIES.items() if each.of_requests)
#: Percentiles beside the median.
PERCENTILES = (90, 95, 99)
#: Statistics of a latency that tables show, by vLLM's names, and the percentile of each; None is the mean.
STATISTICS: dict[str, int | None] = {"mean": None, "median": 50, **{f"p{rank}": rank for rank in PERCENTILES}}
#: Statistics by which simulated latencies are held against measured ones.
COMPARED = {which: STATISTICS[which] for which in ("mean", "median", "p99")}


def share(category: str) -> str:
    """The path of the mean share of the pool, over time, of a category of the paper's view of waste."""
    return f"waste.mean_over_time_pct.paper_view.{category}"


def key(statistic: str, latency: str) -> str:
    """The path of a statistic of a latency, in ms."""
    return f"{statistic}_{latency}_ms"


_OF_SHARES: dict[str, Direction] = {"token_states": "more", "external_and_others": ""}
METRICS = {
    each.path: each
    for each in (
        Metric("request_throughput", "requests/s", better="more", decimals=2, digits=3),
        Metric("output_throughput", "output tokens/s", better="more"),
        Metric("total_token_throughput", "tokens/s", better="more"),
        Metric("request_goodput", "goodput, requests/s", better="more", decimals=2, digits=3),
        *(
            Metric(key(statistic, name), f"{statistic} {latency.label}", "ms", "less")
            for name, latency in LATENCIES.items()
            for statistic in STATISTICS
        ),
        Metric("mean_normalized_latency_s", "latency/token", "s", "less", decimals=4),
        Metric("mean_batch", "mean batch", decimals=2),
        # Of external & others a pool that is not full has more.
        *(
            Metric(share(name), each.label, "%", _OF_SHARES.get(name, "less"))
            for name, each in PAPER_VIEW.categories.items()
        ),
        Metric("preemptions.recompute", "recomputed", better="less", decimals=0),
        Metric("preemptions.swap", "swapped", better="less", decimals=0),
        Metric("refused", "refused", better="less", decimals=0),
        Metric("kv_offloading.hit_rate", "hits on the host", better="more", decimals=3),
        Metric("speculative_decoding.spec_decode_acceptance_length", "acceptance length", better="more", decimals=2),
        Metric("speculative_decoding.spec_decode_acceptance_rate", "acceptance", "%", "more"),
    )
}


def metric_text(path: str, value: float) -> str:
    """The value of a metric as text, without the unit; a number of a summary that is no metric has four digits."""
    return METRICS[path].text(value) if path in METRICS else f"{value:,.4g}"


def headings(*paths: str) -> dict[str, str]:
    """The headings of some metrics, by path."""
    return {path: METRICS[path].heading for path in paths}
