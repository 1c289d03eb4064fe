"""The paper's published values that are rerun here (``facts/paper_figures.json``)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

#: Values by (series, metric) or (series, sequences per request), in the paper's order; None if the paper prints no number.
Published = dict[tuple[str, str | int], float | None]


@cache
def paper_figures() -> Mapping[str, Any]:
    """The whole file: tables and figures by name, each with the origin of its numbers under ``how``."""
    return json.loads(resources.files(__package__).joinpath("facts/paper_figures.json").read_text("utf-8"))


def published_fig2() -> Published:
    """SOSP'23 Fig 2, in percent of the KV pool."""
    figure = paper_figures()["fig2"]
    series = [name for name in figure if name not in ("how", "what", "columns")]
    metrics = [f"{column}_pct" for column in figure["columns"]]
    return {(name, metric): value for name in series for metric, value in zip(metrics, figure[name], strict=True)}


def published_fig13a() -> Published:
    """SOSP'23 Fig 13a: mean number of batched requests at 2 requests/s of ShareGPT."""
    return _published_fig13("ShareGPT 2 req/s")


def published_fig13b() -> Published:
    """SOSP'23 Fig 13b: mean number of batched requests at 30 requests/s of Alpaca."""
    return _published_fig13("Alpaca 30 req/s")


def _published_fig13(load: str) -> Published:
    figure = paper_figures()["fig13"]
    return {(name, "batched_requests"): value for name, value in zip(figure["columns"], figure[load], strict=True)}


def published_fig15() -> Published:
    """SOSP'23 Fig 15: memory saved by sharing, in percent, on Alpaca; and the values of the text for ShareGPT."""
    figure = paper_figures()["fig15"]
    labels = {name: figure[name] for name in ("parallel sampling, Alpaca", "beam search, Alpaca")}
    ranges = {name: values for name, values in figure["text"].items() if name != "what"}
    series = (labels | ranges).items()
    return {(name, n): value for name, values in series for n, value in zip(figure["sequences"], values, strict=True)}


def published_mean_tokens(dataset: str = "ShareGPT") -> tuple[float, float]:
    """SOSP'23 Fig 11: mean prompt and mean output of ShareGPT or Alpaca, in tokens."""
    means = paper_figures()["fig11"]["mean_tokens"][dataset]
    return means["input"], means["output"]


def usual_length() -> int:
    """Tokens of a sequence half way through ShareGPT's mean request."""
    prompt, output = published_mean_tokens()
    return round(prompt + output / 2)


def published_slots() -> float:
    """SOSP'23 Table 1: slots of the KV pool of OPT-13B on an A100-40GB, printed in thousands."""
    table = paper_figures()["table1"]
    return 1000 * dict(zip(table["columns"], table["OPT-13B"], strict=True))["kv_slots_k"]
