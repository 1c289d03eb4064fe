"""Fig 12: normalised latency by request rate, three models on ShareGPT (a-c) and Alpaca (d-f).

Set-up, from the paper: five systems and traces of an hour (900 s for OPT-175B; FasterTransformer's trace is an hour
there too, by its script in the artifact, ft/run_175b.py). The batch of FasterTransformer is the largest that fits.
FasterTransformer is called with the number of tokens to generate and reserves no more. Only with this rule do 14 of
Alpaca's requests fit a batch of OPT-13B, which has room for seven requests of the model's maximum of 2,048 tokens.

The step time of OPT-13B has the scale of Fig 13a (``fit``), and every value of its panels is predicted. The paper
measured no step of OPT-66B and OPT-175B: their scales are fitted on vLLM's crossing on ShareGPT, and used for vLLM, the
three Orcas and all of Alpaca. FasterTransformer has a scale for each model, fitted on its crossing on ShareGPT.
Everything else is predicted. ``rate_sweep.costs`` has the step time before scaling.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from ..bench import Bench
from ..comparison import Payload
from ..fit import CONTEXT_STEP_SCALE, ON
from ..paper import FIG13A, SERIES, Source
from ..published import paper_figures
from ..rate_sweep.costs import Steps
from ..rate_sweep.panels import (
    ALPACA,
    MAX,
    ORACLE,
    ORCAS,
    SHAREGPT,
    VLLM,
    Panel,
    Scale,
    lengths_of,
    panel_document,
    published_markers,
    published_panel,
    ratio_text,
    scale_fitted,
    spare_seeds,
)
from ..rate_sweep.rate_sweep import Load, System
from ..rows import accuracy, ordered
from ..settings import paper_settings

FIGURE, FT = "fig12", "FasterTransformer"
#: The model with measured steps, and its scale.
MEASURED_MODEL = "OPT-13B"
SCALE = Scale(CONTEXT_STEP_SCALE, ON)
_HOUR_S = 3600
#: By model: GPU, number of GPUs, and the length of the traces in seconds.
SERVERS = {
    "OPT-13B": ("a100-40gb", 1, _HOUR_S),
    "OPT-66B": ("a100-40gb", 4, _HOUR_S),
    "OPT-175B": ("a100-80gb", 8, 900),
}
PANELS = {
    letter: (model, dataset)
    for letter, (dataset, model) in zip(
        "abcdef", ((dataset, model) for dataset in (SHAREGPT, ALPACA) for model in SERVERS), strict=True
    )
}
TITLES = {letter: f"{model}, {dataset}" for letter, (model, dataset) in PANELS.items()}


@dataclass(frozen=True)
class ScaleInputs:
    """The inputs of a fitted scale.

    Attributes:
        model: Its name in the paper.
        source: Source of ShareGPT's lengths.
        duration_s: Length of the trace; None takes the paper's.
    """

    model: str
    source: Source
    duration_s: float | None = None


def panel(letter: str, bench: Bench) -> Payload:
    """The panel as a document."""
    return panel_of(letter, bench.source)


def panel_of(letter: str, source: Source, duration_s: float | None = None) -> Payload:
    """As ``panel``, with shorter traces than the paper's if a length is given."""
    built = build_panel(letter, source, duration_s)
    document = panel_document(built)
    return document | _findings_and_remarks(document, letter)


def build_panel(letter: str, source: Source, duration_s: float | None = None) -> Panel:
    """The panel of ``panel_of`` before it is run; only its scales are fitted."""
    model, dataset = PANELS[letter]
    lengths = lengths_of(dataset, source)
    published = published_panel(FIGURE, panel_name(letter))
    other_seeds = spare_seeds(source.seeds)
    inputs = ScaleInputs(model, source, duration_s)
    return Panel(
        figure=f"{FIGURE}{letter}",
        published=published,
        systems={series: system(model, dataset, series) for series in published},
        scales={FT: fitted_scale(inputs, FT)} | dict.fromkeys((*ORCAS, VLLM), fitted_scale(inputs, VLLM)),
        loads={
            (series, seed): load_of(series, lengths, rate, duration_s or span_s(model, series), seed)
            for series, rate in published.items()
            for seed in (*source.seeds, *other_seeds)
        },
        seeds=source.seeds,
        other_seeds=other_seeds,
        fitted=tuple(series for series in (FT, VLLM) if dataset == SHAREGPT and is_fitted(model, series)),
        markers=published_markers(FIGURE, panel_name(letter)),
        workload=description(model, dataset, lengths, duration_s),
    )


def panel_name(letter: str) -> str:
    """The name of a panel in the facts."""
    return f"{letter} {' '.join(PANELS[letter])}"


def system(model: str, dataset: str, series: str) -> System:
    """One of the five systems."""
    card, num_gpus, _ = SERVERS[model]
    name = model.lower()
    steps = Steps(name, card, num_gpus, roofline=series == FT)
    more: dict[str, Any] = {"model": name, "gpu": card, "tensor_parallel_size": num_gpus}
    if series == FT:
        batch = paper_figures()[FIGURE]["ft_max_batch"][model][dataset]
        return System(paper_settings(policy="fastertransformer", max_num_seqs=batch, **more), steps)
    return System(paper_settings(policy=SERIES[series], **more), steps)


def span_s(model: str, series: str) -> float:
    """Span over which requests arrive, in seconds."""
    return _HOUR_S if series == FT else SERVERS[model][2]


def load(lengths: Source, rate: float, duration_s: float, seed: int) -> Load:
    """The artifact's trace at a rate."""
    # The trace uses only the rate and the span of an experiment.
    return Load(lengths.workload(replace(FIG13A, request_rate=rate, duration_s=duration_s), seed), rate)


def load_of(series: str, lengths: Source, rate: float, duration_s: float, seed: int) -> Load:
    """As ``load``, for one of the five systems: FasterTransformer knows every output's length, and reserves no more."""
    arriving = load(lengths, rate, duration_s, seed)
    if series != FT:
        return arriving
    work = arriving.workload
    return replace(arriving, workload=replace(work, max_tokens=work.output_tokens))


def is_fitted(model: str, series: str) -> bool:
    """Whether a model's steps have a scale that is fitted on this series; OPT-13B's is that of Fig 13a."""
    return series == FT or model != MEASURED_MODEL


def fitted_scale(inputs: ScaleInputs, series: str) -> Scale:
    """The scale of a model's steps: Fig 13a's, or fitted on a series' crossing on ShareGPT with the first seed."""
    if not is_fitted(inputs.model, series):
        return SCALE
    letter = next(letter for letter, named in PANELS.items() if named == (inputs.model, SHAREGPT))
    rate = published_panel(FIGURE, panel_name(letter))[series]
    duration_s = inputs.duration_s or span_s(inputs.model, series)
    return scale_fitted(
        system(inputs.model, SHAREGPT, series),
        _fitting_load(series, inputs.source, rate, duration_s),
        f"Fig 12{letter}'s {series} crossing ({rate:g} req/s)",
    )


_LOADS: dict[tuple[Any, ...], Load] = {}


def _fitting_load(series: str, source: Source, rate: float, duration_s: float) -> Load:
    """The same object for the same load, so that fits are cached."""
    key = series, source, rate, duration_s
    return _LOADS.setdefault(key, load_of(series, source, rate, duration_s, source.seeds[0]))


def description(model: str, dataset: str, lengths: Source, duration_s: float | None = None) -> str:
    """Description of the workload."""
    card, num_gpus, whole_s = SERVERS[model]
    seeds = lengths.seeds
    which = f"seed {seeds[0]}" if len(seeds) == 1 else f"mean of seeds {seeds[0]} to {seeds[-1]}"
    longer = f" ({_HOUR_S:,} s for {FT})" if not duration_s and whole_s != _HOUR_S else ""
    return f"{model} on {num_gpus} x {card}, {dataset} ({lengths.name}), {duration_s or whole_s:g} s{longer}, {which}"


def _published_text() -> str:
    """The statement of the paper's text on all six panels."""
    said = paper_figures()[FIGURE]["text"]
    (oracle_low, oracle_high), (max_low, max_high) = (said[f"{SHAREGPT}, {name}"] for name in (ORACLE, MAX))
    return (
        f"The paper's text gives {oracle_low:g} to {oracle_high:g} times the rate of {ORACLE} and {max_low:g} to"
        f" {max_high:g} times that of {MAX} on {SHAREGPT}, and up to {said[f'{FT}, up to']:g} times that of {FT}."
    )


def _findings_and_remarks(document: Payload, letter: str) -> Payload:
    """Findings, and ratios of rates."""
    rows, dataset = document["rows"], PANELS[letter][1]
    served = [row for row in rows if row["series"] != FT]
    findings = [accuracy(served, f"Fig 12{letter}: Orcas and vLLM"), ordered(rows)]
    if dataset == ALPACA:
        findings.insert(1, accuracy([row for row in rows if row["series"] == FT], f"Fig 12{letter}: {FT}"))
    ratios = (ratio_text(rows, VLLM, below) for below in (ORACLE, MAX, FT))
    remarks = [*document["remarks"], *ratios, _published_text()]
    return {"findings": findings, "remarks": remarks}
