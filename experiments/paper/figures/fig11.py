"""Fig 11: mean lengths of prompts and outputs, ShareGPT and Alpaca.

The means are over pairs that OPT-13B can hold: prompt and output together have at most 2,048 tokens. With ``--trace``
ShareGPT's pairs are read from the file. Otherwise, and for Alpaca always, they are drawn from the embedded summaries,
as many as the data set has. Nothing is fitted: the summaries were made of the data sets, not of these means.
"""

from __future__ import annotations

from collections.abc import Iterator

from ..bench import Bench
from ..comparison import Payload
from ..paper import MAX_MODEL_LEN, Source
from ..published import paper_figures
from ..rows import Row, accuracy, value_row

FIGURE = "fig11"
_METRICS = {"mean_prompt_tokens": "input", "mean_output_tokens": "output"}


def fig11(bench: Bench) -> Payload:
    """The figure as a document."""
    source = bench.source
    sources = {"ShareGPT": source, "Alpaca": source.alpaca}
    rows = [row for name, lengths in sources.items() for row in _rows(name, lengths)]
    return {
        "figure": FIGURE,
        "workload": ", ".join(lengths.name for lengths in sources.values()),
        "rows": rows,
        "seeds": list(source.seeds),
        "findings": [accuracy(rows, "Mean lengths")],
        "basis": [f"Pairs of at most {MAX_MODEL_LEN:,} tokens, prompt and output together."],
    }


def _rows(name: str, lengths: Source) -> Iterator[Row]:
    published = paper_figures()[FIGURE]["mean_tokens"][name]
    # A file gives the same pairs for every seed.
    seeds = lengths.seeds if lengths.exact is None else lengths.seeds[:1]
    held = [lengths.pairs(seed).capped(MAX_MODEL_LEN, strict=False) for seed in seeds]
    means = {
        "mean_prompt_tokens": [float(pairs.prompt_tokens.mean()) for pairs in held],
        "mean_output_tokens": [float(pairs.output_tokens.mean()) for pairs in held],
    }
    for metric, column in _METRICS.items():
        yield value_row(name, metric, published[column], means[metric])
