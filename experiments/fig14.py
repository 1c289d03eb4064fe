"""Fig 14: normalised latency by request rate with several sequences a request, OPT-13B on Alpaca.

The paper's: two, four and six parallel samples (a-c) and beams (d-f), an hour each. The scale of the step time is
Fig 12a's, fitted on vLLM there; FasterTransformer is not in the figure. The traces are an hour here too, or
as long as a number of requests takes to come, fewer of beams, because beams do not leap: a queue then has less time
to grow, and rates come out a little higher.

One thing is chosen on this figure, on vLLM's value of two samples: the 0.42 ms that Fig 1 has for a sequence are
taken to be a *request's*, whatever samples it has. vLLM's first sampler looped over requests, with a call and a
wait for the GPU in each (vllm/model_executor/layers/sampler.py of vLLM 0.1). Beams are each handled on the host,
and count each.
"""

from __future__ import annotations

from ..sim.settings import settings
from .bench import Bench
from .comparison import Payload
from .fig12 import Asked, fitted_scale, load
from .paper import SERIES, Source
from .rate_costs import Steps
from .rate_panels import (
    ALPACA,
    ORACLE,
    VLLM,
    Panel,
    lengths_of,
    ordered,
    panel_document,
    published_panel,
    ratio_told,
    spare_seeds,
)
from .rate_sweep import System
from .rows import within

FIGURE = "fig14"
SAMPLES, BEAMS = "parallel", "beam"
PANELS = dict(zip("abcdef", ((kind, n) for kind in (SAMPLES, BEAMS) for n in (2, 4, 6)), strict=True))
#: Requests of a trace, at most, and its length in seconds.
MOST_REQUESTS, DURATION_S = {SAMPLES: 12_000, BEAMS: 3_000}, 3600.0
_CHOSEN_ON, _WITHIN = "a", 0.20


def panel(letter: str, bench: Bench) -> Payload:
    """The panel as a document."""
    return panel_of(letter, bench.source, MOST_REQUESTS[PANELS[letter][0]])


def panel_of(letter: str, source: Source, most_requests: int, fitting_s: float | None = None) -> Payload:
    """As ``panel``, with a number of requests; the trace on which the scale is fitted takes ``fitting_s``, or an hour."""
    kind, n = PANELS[letter]
    lengths, wandering = lengths_of(ALPACA, source), spare_seeds(source.seeds)
    published = published_panel(FIGURE, f"{letter} {kind} {n}")
    scale = fitted_scale(Asked("OPT-13B", source, fitting_s), VLLM)
    document = panel_document(
        Panel(
            figure=f"{FIGURE}{letter}",
            published=published,
            systems={series: system(kind, n, series) for series in published},
            scales=dict.fromkeys(published, scale),
            loads={
                (series, seed): load(lengths, rate, min(DURATION_S, most_requests / rate), seed)
                for series, rate in published.items()
                for seed in (*source.seeds, *wandering)
            },
            seeds=source.seeds,
            wandering=wandering,
            fitted=(VLLM,) if letter == _CHOSEN_ON else (),
            workload=f"OPT-13B on 1 x a100-40gb, Alpaca ({lengths.name}), {kind} {n}, at most {most_requests:,} requests",
        )
    )
    rows = document["rows"]
    return document | {
        "findings": [within(rows, _WITHIN, f"Fig 14{letter}: {kind} {n}"), ordered(rows)],
        "remarks": [*document["remarks"], ratio_told(rows, VLLM, ORACLE), _slope_told(kind)],
    }


def system(kind: str, n: int, series: str) -> System:
    """One of the four, with so many samples or beams a request."""
    chosen = settings(policy=SERIES[series], use_beam_search=kind == BEAMS)
    return System(chosen, Steps(sequences_a_slope=n if kind == SAMPLES else 1), n)


def _slope_told(kind: str) -> str:
    if kind == BEAMS:
        return "Fig 1's 0.42 ms a sequence are spent on every beam."
    return "Fig 1's 0.42 ms a sequence are spent once a request, for all its samples: chosen on Fig 14a's vLLM value."
