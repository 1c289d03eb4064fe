"""Fig 14: normalised latency by request rate with several sequences per request, OPT-13B on Alpaca.

Set-up, from the paper: two, four and six parallel samples (a-c) and beams (d-f), no FasterTransformer, an hour each.
Exact pairs are served for the hour. With drawn lengths the trace ends after a fixed number of requests, or after an hour if
that is shorter. Beams have fewer requests, because their steps are simulated one by one. The scale of the step time is
Fig 13a's.

Two numbers are fitted here, each on one value, as parts of the time per sequence of Fig 1, without the reading of keys
and values, which leaves 0.246 ms:

    0.246 ms * (1 - request + request / n + beam for beams), for each of a request's n sequences

- ``Shares.request`` on vLLM's four samples: time spent once per request. vLLM's first sampler looped over requests,
  with a call and a wait for the GPU in each (vllm/model_executor/layers/sampler.py of vLLM 0.1).
- ``Shares.beam`` on vLLM's four beams: extra time of each beam; most likely sorting candidates and forking tables on
  the host.

Everything else is predicted. A longer trace builds up a longer queue, and the first rows of the paper's file have shorter
outputs (54.1 tokens in the mean of the first 2,000, 58.5 in all). So the shares are fitted to drawn lengths and to exact pairs
apart, each with its number of requests.
"""

from __future__ import annotations

from typing import NamedTuple

from ..bench import Bench
from ..comparison import Payload
from ..constants import SWAPS, Constant, constant
from ..paper import SERIES, Source
from ..published import paper_figures
from ..rate_sweep.costs import Steps
from ..rate_sweep.panels import (
    ALPACA,
    ORACLE,
    VLLM,
    Panel,
    lengths_of,
    panel_document,
    published_panel,
    ratio_text,
    spare_seeds,
)
from ..rate_sweep.rate_sweep import Load, System
from ..rows import accuracy, ordered
from ..settings import paper_settings
from .fig12 import SCALE, load

FIGURE = "fig14"
SAMPLES, BEAMS = "parallel", "beam"
PANELS = dict(zip("abcdef", ((kind, n) for kind in (SAMPLES, BEAMS) for n in (2, 4, 6)), strict=True))
TITLES = {
    letter: f"beam search, width {n}" if kind == BEAMS else f"parallel sampling, {n} outputs"
    for letter, (kind, n) in PANELS.items()
}
#: Requests of a drawn trace, at most, and the maximum length of any in seconds.
MOST_REQUESTS, DURATION_S = {SAMPLES: 6_000, BEAMS: 2_000}, 3600.0


class Shares(NamedTuple):
    """Parts of Fig 1's time per sequence, without the reading of its keys and values.

    Attributes:
        request: Time per request.
        beam: Extra time of a beam.
    """

    request: float
    beam: float


#: Fitted to drawn lengths, and to the paper's own pairs.
DRAWN, EXACT = Shares(0.445, 0.639), Shares(0.507, 0.558)
SAMPLES_FITTED_ON, BEAMS_FITTED_ON = "b", "e"


def panel(letter: str, bench: Bench) -> Payload:
    """The panel as a document."""
    return panel_of(letter, bench.source, trace_requests(letter, bench.source))


def trace_requests(letter: str, source: Source) -> int | None:
    """The number of requests of a panel's traces; None for those of an hour."""
    return MOST_REQUESTS[PANELS[letter][0]] if source.exact_alpaca is None else None


def panel_of(letter: str, source: Source, most_requests: int | None) -> Payload:
    """As ``panel``, with a number of requests, or those of an hour."""
    kind, n = PANELS[letter]
    document = panel_document(build_panel(letter, source, most_requests))
    rows = document["rows"]
    shares = shares_of(source)
    return document | {
        "constants": [*document["constants"], *SWAPS, *_shares(kind, shares)],
        "findings": [accuracy(rows, f"Fig 14{letter}: {TITLES[letter]}"), ordered(rows)],
        "remarks": [
            *document["remarks"],
            ratio_text(rows, VLLM, ORACLE),
            _published_text(),
            _slope_text(kind, shares),
        ],
    }


def _shares(kind: str, shares: Shares) -> list[Constant]:
    samples = constant("share of a sequence's time spent once a request", shares.request, "Fig 14b's vLLM")
    beams = constant("share of a sequence's time that a beam adds", shares.beam, "Fig 14e's vLLM")
    return [samples] if kind == SAMPLES else [samples, beams]


def build_panel(letter: str, source: Source, most_requests: int | None) -> Panel:
    """The panel of ``panel_of`` before it is run."""
    kind, n = PANELS[letter]
    lengths, other_seeds = lengths_of(ALPACA, source), spare_seeds(source.seeds)
    published = published_panel(FIGURE, f"{letter} {kind} {n}")
    return Panel(
        figure=f"{FIGURE}{letter}",
        published=published,
        systems={series: system(kind, n, series, shares_of(source)) for series in published},
        scales=dict.fromkeys(published, SCALE),
        loads={
            (series, seed): load_of(lengths, rate, most_requests, seed)
            for series, rate in published.items()
            for seed in (*source.seeds, *other_seeds)
        },
        seeds=source.seeds,
        other_seeds=other_seeds,
        fitted=(VLLM,) if letter in (SAMPLES_FITTED_ON, BEAMS_FITTED_ON) else (),
        workload=f"OPT-13B on 1 x a100-40gb, Alpaca ({lengths.name}), {TITLES[letter]}, {_span_text(most_requests)}",
    )


def _span_text(most_requests: int | None) -> str:
    return f"{DURATION_S:,.0f} s" if most_requests is None else f"{most_requests:,} requests"


def load_of(lengths: Source, rate: float, most_requests: int | None, seed: int) -> Load:
    """The artifact's trace at a rate: a number of requests, or those of an hour."""
    most_s = DURATION_S if most_requests is None else most_requests / rate
    return load(lengths, rate, min(DURATION_S, most_s), seed)


def shares_of(source: Source) -> Shares:
    """The shares that are fitted to such lengths of Alpaca."""
    return DRAWN if source.exact_alpaca is None else EXACT


def system(kind: str, n: int, series: str, shares: Shares = DRAWN) -> System:
    """One of the four systems, with this many samples or beams per request."""
    chosen = paper_settings(policy=SERIES[series], use_beam_search=kind == BEAMS)
    return System(chosen, Steps(sequence_slope=sequence_slope(kind, n, shares)), n)


def sequence_slope(kind: str, n: int, shares: Shares = DRAWN) -> float:
    """The share of Fig 1's time per sequence, without the reading, that each of ``n`` samples or beams takes."""
    share = 1 - shares.request + shares.request / n
    return share + shares.beam if kind == BEAMS else share


def _published_text() -> str:
    said = paper_figures()[FIGURE]["text"]
    return f"The paper's text gives {said['one sample']:g} times with one sample and {said['beam 6']:g} with six beams."


def _slope_text(kind: str, shares: Shares) -> str:
    text = (
        f"Of Fig 1's time a sequence, without the reading of keys and values, {shares.request:.0%} are spent once a"
        " request, fitted on Fig 14b's vLLM alone"
    )
    if kind == BEAMS:
        return f"{text}, and {shares.beam:.0%} more on every beam, fitted on Fig 14e's vLLM alone."
    return f"{text}."
