"""Fig 16: translation with a prefix that all requests share, LLaMA-13B on one A100-40GB.

Set-up, from the paper: WMT16 English to German with one example (80 tokens) or five (341) as the prefix, Orca (Oracle)
and vLLM, which computes the prefix once. Traces last 300 s here; the artifact's scripts use 1,200 s. Only the shape is
comparable, because the texts in LLaMA tokens are not available and the lengths are synthetic. Sentences of about 21
words are taken to be 28 tokens of English and 40 of German, lognormal with a standard deviation of 0.55 in the
logarithm; the German length follows the English one. The scale of the step time is Fig 13a's: LLaMA-13B has the layers
and the width of OPT-13B.
"""

from __future__ import annotations

import numpy as np

from ....traces import LengthPairs, stream
from ..bench import Bench
from ..comparison import Payload
from ..paper import SERIES, Source
from ..published import paper_figures
from ..rate_sweep.costs import Steps
from ..rate_sweep.panels import ORACLE, VLLM, Panel, panel_document, published_panel, ratio_text, spare_seeds
from ..rate_sweep.rate_sweep import System
from ..rows import Row, as_finding, ordered
from ..settings import paper_settings
from .fig12 import SCALE, load

FIGURE = "fig16"
PREFIX_TOKENS = {"1-shot, 80 prefix tokens": 80, "5-shot, 341 prefix tokens": 341}
DURATION_S = 300.0
SOURCE_TOKENS, TARGET_TOKENS, _SPREAD, _FOLLOWING = 28, 40, 0.55, 0.25
_ROWS = 40_000


def fig16(bench: Bench) -> Payload:
    """The figure as a document."""
    return figure_of(bench.source, DURATION_S)


def figure_of(source: Source, duration_s: float) -> Payload:
    """As ``fig16``, with traces of this length."""
    parts = [panel_document(build_panel(name, source, duration_s)) for name in PREFIX_TOKENS]
    first, said = parts[0], paper_figures()[FIGURE]["text"]
    ratios = [ratio_text(_plain(part["rows"]), VLLM, ORACLE) for part in parts]
    return first | {
        "figure": FIGURE,
        "workload": f"LLaMA-13B on 1 x a100-40gb, made-up sentences, {duration_s:g} s",
        "rows": [row for part in parts for row in part["rows"]],
        "curves": [row for part in parts for row in part["curves"]],
        "findings": [grows(parts), *(ordered(part["rows"]) for part in parts)],
        "remarks": [
            *first["remarks"],
            *(f"{name}: {text}" for name, text in zip(PREFIX_TOKENS, ratios, strict=True)),
            f"The paper's text gives {said['1-shot']:g} and {said['5-shot']:g} times.",
            "Shape only: the lengths are made up, as the texts are not available.",
        ],
    }


def build_panel(name: str, source: Source, duration_s: float) -> Panel:
    """One of the two panels of ``figure_of`` before it is run."""
    published = published_panel(FIGURE, name)
    other_seeds = spare_seeds(source.seeds)
    shots = name.split(",")[0]
    labelled = {f"{series}, {shots}": rate for series, rate in published.items()}
    return Panel(
        figure=FIGURE,
        published=labelled,
        systems={label: system(label.split(",")[0], PREFIX_TOKENS[name]) for label in labelled},
        scales=dict.fromkeys(labelled, SCALE),
        loads={
            (label, seed): load(sentences(PREFIX_TOKENS[name], seed), rate, duration_s, seed)
            for label, rate in labelled.items()
            for seed in (*source.seeds, *other_seeds)
        },
        seeds=source.seeds,
        other_seeds=other_seeds,
        workload=name,
    )


def system(series: str, prefix_tokens: int) -> System:
    """One of the two systems: vLLM stores the prefix once, Orca computes and stores it for every request."""
    prefix = prefix_tokens if series == VLLM else 0
    return System(
        paper_settings(policy=SERIES[series], model="llama-13b", shared_prefix_tokens=prefix), Steps("llama-13b")
    )


def sentences(prefix_tokens: int, seed: int) -> Source:
    """Synthetic sentences to translate, each after a prefix."""
    rng = stream(seed, "sentences to translate")
    spread, mean = rng.normal(size=(2, _ROWS)), -(_SPREAD**2) / 2
    source = np.exp(mean + _SPREAD * spread[0]) * SOURCE_TOKENS
    target = source * TARGET_TOKENS / SOURCE_TOKENS * np.exp(_FOLLOWING * spread[1] - _FOLLOWING**2 / 2)
    lengths = (np.maximum(np.rint(tokens), 1).astype(np.int64) for tokens in (source, target))
    prompt, output = lengths
    return Source((seed,), LengthPairs("made-up sentences", prompt + prefix_tokens, output))


def _plain(rows: list[Row]) -> list[Row]:
    """The rows under the names of the systems."""
    return [row | {"series": row["series"].split(",")[0]} for row in rows]


def grows(parts: list[Payload]) -> dict[str, object]:
    """A finding on the figure's main result: a longer prefix favours the system that shares it."""

    def ratio(part: Payload) -> float:
        by = {row["series"]: row["simulated"] for row in _plain(part["rows"])}
        return by[VLLM] / by[ORACLE]

    short, long = map(ratio, parts)
    text = f"The longer the prefix, the further vLLM is ahead: {short:.2f} and {long:.2f} times."
    return as_finding(text, 1 < short < long)
