"""Fig 17: a chatbot, OPT-13B on one A100-40GB; every prompt is the end of a conversation so far.

Set-up, from the paper: conversations of ShareGPT; the prompt is the last 1,024 tokens of the history, the output has at
most 1,016 tokens, and nothing is cached between rounds. A request starts a new conversation with some probability;
otherwise it continues an open one. The probability is 0.1 here, the default of the artifact's ``benchmark_chatbot.py``.
With it most prompts have 1,024 tokens, as in the paper; with the 0.5 of the artifact's run script, synthetic prompts
are too short. Only the shape is comparable: rounds after the first are not available, and every round is drawn from the
summary of first rounds here. The trace lasts an hour, and the scale of the step time is Fig 13a's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from ....traces import LengthPairs, catalogue, sample, stream
from ..bench import Bench
from ..comparison import Payload
from ..paper import SERIES, SYNTHETIC_SET, Source
from ..published import paper_figures
from ..rate_sweep.costs import Steps
from ..rate_sweep.panels import ORACLE, ORCAS, VLLM, Panel, panel_document, published_panel, ratio_text, spare_seeds
from ..rate_sweep.rate_sweep import System
from ..rows import Row, as_finding
from ..settings import paper_settings
from .fig12 import SCALE, load

FIGURE, PANEL = "fig17", "chatbot"
DURATION_S = 3600.0
PROMPT_TOKENS, OUTPUT_TOKENS = 1024, 1016
_OPENS = 0.1
_ROWS = 10_000
#: Limits of the shape: the largest difference between the Orcas, and the least ratio of vLLM's rate to the best of them.
_APART, _AHEAD = 0.10, 1.2
_SIDES = ("simulated", "published")


def fig17(bench: Bench) -> Payload:
    """The figure as a document."""
    return figure_of(bench.source, DURATION_S)


def figure_of(source: Source, duration_s: float) -> Payload:
    """As ``fig17``, with traces of this length."""
    document = panel_document(build_panel(source, duration_s))
    rows = document["rows"]
    return document | {
        "findings": list(findings(rows)),
        "remarks": [
            *document["remarks"],
            ratio_text(rows, VLLM, ORACLE),
            f"The paper's text gives {paper_figures()[FIGURE]['text']['vLLM']:g} times, more than its figure shows.",
            "Shape only: later rounds are drawn as first ones are, as the conversations are not available.",
        ],
    }


def build_panel(source: Source, duration_s: float) -> Panel:
    """The panel of ``figure_of`` before it is run."""
    published, other_seeds = published_panel(FIGURE, PANEL), spare_seeds(source.seeds)
    rounds = {seed: conversations(seed) for seed in (*source.seeds, *other_seeds)}
    return Panel(
        figure=FIGURE,
        published=published,
        systems={series: system(series) for series in published},
        scales=dict.fromkeys(published, SCALE),
        loads={
            (series, seed): load(lengths, rate, duration_s, seed)
            for series, rate in published.items()
            for seed, lengths in rounds.items()
        },
        seeds=source.seeds,
        other_seeds=other_seeds,
        workload=f"OPT-13B on 1 x a100-40gb, made-up conversations, {duration_s:g} s",
    )


def system(series: str) -> System:
    """One of the four systems."""
    return System(paper_settings(policy=SERIES[series]), Steps())


def conversations(seed: int) -> Source:
    """Rounds of synthetic conversations, in the order of their requests."""
    rows = next(entry.rows for entry in catalogue.describe() if entry.name == SYNTHETIC_SET)
    drawn = sample(SYNTHETIC_SET, min(rows, _ROWS), stream(seed, f"rounds {SYNTHETIC_SET}"))
    rng = stream(seed, "conversations")
    open_tokens: list[int] = []
    prompts, outputs = [], []
    for prompt, output in zip(drawn.prompt_tokens.tolist(), drawn.output_tokens.tolist(), strict=True):
        if not open_tokens or rng.random() < _OPENS:
            open_tokens.append(0)
            place = len(open_tokens) - 1
        else:
            place = int(rng.integers(len(open_tokens)))
        history = open_tokens[place] + prompt
        prompts.append(min(history, PROMPT_TOKENS))
        outputs.append(min(output, OUTPUT_TOKENS))
        open_tokens[place] = history + output
    return Source((seed,), LengthPairs("made-up conversations", np.array(prompts), np.array(outputs)))


def findings(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Findings on the figure's shape: prompts are so long that every Orca reserves the model's maximum, and vLLM is ahead."""
    apart, published = (max(_orcas(rows, side)) / min(_orcas(rows, side)) - 1 for side in _SIDES)
    text = f"The three Orcas are at most {_APART:.0%} apart: {apart:.0%}; in the figure {published:.0%}."
    yield as_finding(text, apart <= _APART)
    vllm = next(row for row in rows if row["series"] == VLLM)
    ahead, published = (vllm[side] / max(_orcas(rows, side)) for side in _SIDES)
    text = f"vLLM has at least {_AHEAD:g} times the rate of the best Orca: {ahead:.2f}; in the figure {published:.2f}."
    yield as_finding(text, ahead >= _AHEAD)


def _orcas(rows: Sequence[Row], side: str) -> list[float]:
    return [row[side] for row in rows if row["series"] in ORCAS]
