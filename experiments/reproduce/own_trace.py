"""A trace of the user's under the paper's systems: Figs 2, 12a and 13a and the waste table, with nothing to compare.

The paper's pairs are recognised by a hash of those that OPT-13B can hold, in file order (``is_papers``); a file with
arrivals is never the paper's. For any other trace

  1. requests longer than the model are left out, and counted;
  2. requests arrive as in the trace, or as a Poisson process of a stated rate, drawn once for each seed;
  3. each system serves the same requests with the pool that the model leaves on the GPU;
  4. means leave out as large a part of the span in which requests arrive as the figure does, a third or a sixth of it;
     requests that all arrive at once are measured from the first step to the last;
  5. the step time is the paper's by context where it applies (OPT-13B's layers and width on one A100-40GB), as in the
     paper's figures, else that of ``simulate``. No number is fitted;
  6. the rate sweep scales the gaps of these arrivals until the mean normalised latency reaches 0.5 s/token.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from math import isfinite
from statistics import fmean
from typing import Any

from ...sim import Run, Settings, Workload, settings, simulate
from ...sim.cost import PaperCost, StepCost, default_cost
from ...sim.engine.run import simulate_window
from ...sim.policy import policy as policy_of
from ...sim.spec import gpu, model
from ...sim.types.errors import MissingSetting, SettingError
from ...sim.types.ticks import PER_SECOND
from ...traces import LengthPairs, Trace, mean_rate, workload
from ..paper.bench import Measured, measured
from ..paper.comparison import Payload
from ..paper.context_cost import ContextCost
from ..paper.figures.fig12 import FT
from ..paper.figures.waste import METRICS, NAMES
from ..paper.fit import CONTEXT_STEP_SCALE
from ..paper.paper import FIG2, FIG13A, MAX_MODEL_LEN, SERIES, Experiment
from ..paper.rate_sweep.costs import Steps
from ..paper.rate_sweep.panels import CROSSING, LATENCY, MAX, ORACLE, VLLM
from ..paper.rate_sweep.rate_sweep import TARGET_S, Load, Search, System, find_rate
from ..paper.rows import Row
from ..runs.crossing import Crossing, NoCrossing
from ..runs.output import track
from ..runs.parallel import in_parallel
from ..runs.points import file_hashes

#: SHA-256 of the paper's pairs of at most 2,048 tokens (``is_papers``), of the files that its artifact publishes.
SHAREGPT_SHA256 = "f5058b5db6b217130064da919351702f19839a94af6e7725236fa80621d6f99f"
ALPACA_SHA256 = "2474697478c2338b44b05d75018de0d56e032bfad1412b771f7ba2a67938a01e"
#: Tokens in a step of the paper's systems, on a model of ``MAX_MODEL_LEN`` tokens.
_BUDGET = 2560
_DECIMALS = 3


@dataclass(frozen=True)
class OwnServer:
    """The server and the arrivals of a trace of your own.

    Attributes:
        model: Model of a trace of your own: preset, org/name on the Hugging Face hub, or path of a config.json or its folder. By
            default the paper's OPT-13B.
        gpu: Its GPU: preset, or JSON file. By default the paper's A100-40GB.
        tensor_parallel_size: GPUs that share the model and the pool.
        request_rate: Poisson arrivals at this rate, in requests/s, in place of the trace's own.
    """

    model: str = "opt-13b"
    gpu: str = "a100-40gb"
    tensor_parallel_size: int = 1
    request_rate: float | None = None

    @property
    def given(self) -> dict[str, Any]:
        """The fields with another value than the default."""
        return {name: value for name, value in vars(self).items() if value != getattr(OwnServer, name)}


def is_papers(trace: Trace, pairs_sha256: str) -> bool:
    """Whether a trace is one of the paper's sets of length pairs."""
    held = trace.pairs.capped(MAX_MODEL_LEN, strict=False)
    columns = (lengths.astype("<i8").tobytes() for lengths in (held.prompt_tokens, held.output_tokens))
    return trace.arrival_ticks is None and sha256(b"".join(columns)).hexdigest() == pairs_sha256


@dataclass(frozen=True)
class OwnTrace:
    """Requests that the model can hold, and their server.

    Attributes:
        file: Name of the trace's file.
        trace: The requests.
        left_out: Number of requests of the file that are longer than the model.
        server: The server and the arrivals.
        seeds: Seeds of drawn arrivals; the trace's own need one run.
    """

    file: str
    trace: Trace
    left_out: int
    server: OwnServer
    seeds: tuple[int, ...] = (0,)

    @property
    def pairs(self) -> LengthPairs:
        """Their lengths."""
        return self.trace.pairs

    def workload(self, seed: int) -> Workload:
        """The requests with their arrivals."""
        return workload(self.trace, self.server.request_rate, seed)

    def settings(self, policy: str, window: tuple[float, float] | None = None) -> Settings:
        """The replica of a policy, with the step time of ``simulate``; where the paper's applies, see ``step_time``."""
        server = self.server
        place = {"model": server.model, "gpu": server.gpu, "tensor_parallel_size": server.tensor_parallel_size}
        if policy_of(policy).has_token_budget and self.budget > _BUDGET:
            place["max_num_batched_tokens"] = self.budget
        return settings(policy=policy, window=window, cost=self.cost, **place)

    @property
    def budget(self) -> int:
        """Tokens in a step: the paper's, or as many more as the longest prompt needs beside decodes.

        A prompt above the budget waits for an empty batch, which the paper's requests never do.
        """
        return max(_BUDGET, int(self.trace.prompt_tokens.max()) + _BUDGET - MAX_MODEL_LEN)

    @property
    def cost(self) -> str:
        """Name of the cost model."""
        chosen, card = model(self.server.model), gpu(self.server.gpu)
        fits = PaperCost.fits(chosen, card, self.server.tensor_parallel_size)
        return "paper" if fits else default_cost(chosen, card)

    @property
    def step_scale(self) -> float:
        """Factor on its step time."""
        return CONTEXT_STEP_SCALE if self.cost == "paper" else 1.0

    @property
    def step_time(self) -> StepCost | None:
        """The paper's step time by context where it applies; None takes that of the settings."""
        return ContextCost(self.step_scale) if self.cost == "paper" else None

    def identity(self) -> str:
        """Text that determines the documents, apart from the lengths; of files that the server names the content counts."""
        hashes = [self.workload(seed).sha256() for seed in self.seeds]
        return f"{self.server} {file_hashes(self.settings(SERIES[VLLM]))} {self.left_out} {hashes}"


def own_trace(file: str, trace: Trace, server: OwnServer, seeds: int | None) -> OwnTrace:
    """The requests of a trace that its server can hold.

    Raises:
        SettingError: An invalid server or rate; a trace without arrivals and no rate; seeds without anything to draw; or no
            request fits the model.
    """
    longest = model(server.model).max_model_len
    if trace.arrival_ticks is None and server.request_rate is None:
        raise MissingSetting("request_rate", f"{file} has no arrivals; give a request rate")
    if seeds is not None and server.request_rate is None:
        raise SettingError("seeds", seeds, f"{file} has its own arrivals and nothing is drawn; leave it out")
    keep = trace.prompt_tokens + trace.output_tokens <= longest
    if not keep.any():
        remedy = f"holds {longest} tokens, and every request of {file} is longer; take a longer model"
        raise SettingError("model", server.model, remedy)
    # The paper's systems keep nothing from one request for another.
    held = Trace(
        trace.name,
        trace.prompt_tokens[keep],
        trace.output_tokens[keep],
        None if trace.arrival_ticks is None else trace.arrival_ticks[keep],
        None if trace.max_tokens is None else trace.max_tokens[keep],
        n=None if trace.n is None else trace.n[keep],
    )
    own = OwnTrace(file, held, int((~keep).sum()), server, tuple(range(seeds or 1)))
    # Refuse an invalid server or rate before anything is run.
    own.settings(SERIES[VLLM])
    own.workload(seed=0)
    return own


@dataclass(frozen=True, slots=True)
class _Served:
    """Results of one run, and the number of requests that its pool can never hold."""

    measured: Measured
    refused: int


def pool_use(own: OwnTrace) -> Payload:
    """Fig 2: what the pool holds under each system."""
    runs = _runs(own, FIG2, SERIES, to_the_end=False)
    rows = [_row(name, metric, found) for name, found in runs.items() for metric in FIG2.metrics]
    return _document(own, "fig2", rows, _used_text(rows), runs, FIG2)


def mean_batch(own: OwnTrace) -> Payload:
    """Fig 13a: requests in a batch under each system."""
    runs = _runs(own, FIG13A, SERIES, to_the_end=False)
    rows = [_row(name, metric, found) for name, found in runs.items() for metric in FIG13A.metrics]
    by = {row["series"]: row["simulated"] for row in rows}
    finding = f"{VLLM} batches {by[VLLM]:.1f} requests in the mean, {MAX} {by[MAX]:.1f} and {ORACLE} {by[ORACLE]:.1f}."
    return _document(own, "fig13a", rows, finding, runs, FIG13A)


def waste_table(own: OwnTrace) -> Payload:
    """The waste table: what the pool holds under every policy of the paper, and its throughput."""
    policies = {name: policy for policy, name in NAMES.items()}
    runs = _runs(own, FIG2, policies, to_the_end=True)
    rows = [_row(name, metric, found) for name, found in runs.items() for metric in METRICS]
    return _document(own, "waste", rows, _used_text(rows), runs, FIG2)


def rate_sweep(own: OwnTrace) -> Payload:
    """Fig 12a: the request rate of each system at the paper's target latency, and its latency by rate.

    The requests have gaps (``require_gaps``).
    """
    systems = {FT: "fastertransformer"} | SERIES
    searches = [_search(own, name, policy, seed) for name, policy in systems.items() for seed in own.seeds]
    results = in_parallel(_found, [(search,) for search in searches])
    crossings = dict(track(results, "fig12a", len(searches)))
    rows, curves = [], []
    for name in systems:
        found = [crossings[name, seed] for seed in own.seeds]
        at = [crossing.at for crossing in found if crossing is not None]
        rows.append(_value(name, CROSSING, at if len(at) == len(found) else []))
        points = () if found[0] is None else found[0].points
        curves += [_value(name, LATENCY, [latency], round(rate, 4), 4) for rate, latency in points]
    document = _document(own, "fig12a", rows, " ".join((*_rates_text(rows), *_never_text(rows))))
    basis = [
        f"Rate: where the mean of (finish - arrival) / output tokens reaches {TARGET_S:g} s/token, by bisection; at each rate"
        " the same requests arrive with the same gaps, further apart or closer together.",
        *document["basis"],
    ]
    return document | {"x_is": "requests/s", "curves": curves, "basis": basis}


#: The figures of a trace of the user's, in the paper's order.
FIGURES: dict[str, Callable[[OwnTrace], Payload]] = {
    "fig2": pool_use,
    "fig12a": rate_sweep,
    "fig13a": mean_batch,
    "waste": waste_table,
}


def require_gaps(own: OwnTrace) -> None:
    """Refuse requests that all arrive at once, which have no gaps for the rate sweep.

    Raises:
        SettingError: They do.
    """
    if not _span_s(own.workload(own.seeds[0])):
        remedy = "fig12a scales gaps, and all requests arrive at once; give a finite rate"
        raise SettingError("request_rate", own.server.request_rate, remedy)


def _search(own: OwnTrace, name: str, policy: str, seed: int) -> Search:
    work = own.workload(seed)
    rate = mean_rate(work.arrival_ticks)
    if name == FT:
        # As in Fig 12: it is called with the number of tokens to generate.
        work = replace(work, max_tokens=work.output_tokens)
    # The search scales the steps.
    steps = Steps() if own.cost == "paper" else None
    return Search((name, seed), System(own.settings(policy), steps), Load(work, rate), own.step_scale)


def _found(search: Search) -> tuple[tuple[Any, ...], Crossing | None]:
    try:
        return find_rate(search)
    except NoCrossing:
        return search.key, None


def _runs(
    own: OwnTrace, experiment: Experiment, policies: dict[str, str], to_the_end: bool
) -> dict[str, list[_Served]]:
    """The runs of each series, one a seed."""
    jobs = [
        (own.settings(policy, _window_s(own.workload(seed), experiment)), own.workload(seed), to_the_end, own.step_time)
        for policy in policies.values()
        for seed in own.seeds
    ]
    found = iter(track(in_parallel(_serve, jobs), experiment.figure, len(jobs)))
    return {name: [next(found) for _ in own.seeds] for name in policies}


def _serve(chosen: Settings, work: Workload, to_the_end: bool, cost: StepCost | None) -> _Served:
    run: Run = (simulate if to_the_end or chosen.window is None else simulate_window)(chosen, work, cost)
    return _Served(measured(run, to_the_end), int(run.refused.sum()))


def _span_s(work: Workload) -> float:
    """Seconds from the first arrival to the last."""
    return float(work.arrival_ticks[-1] - work.arrival_ticks[0]) / PER_SECOND


def _window_s(work: Workload, experiment: Experiment) -> tuple[float, float] | None:
    """The measured window: the part of the span in which requests arrive that the paper measures; None without a span."""
    first_s, span_s = float(work.arrival_ticks[0]) / PER_SECOND, _span_s(work)
    start, end = (first_s + span_s * edge / experiment.duration_s for edge in experiment.window_s)
    return (start, end) if end > start else None


def _row(series: str, metric: str, found: Sequence[_Served]) -> Row:
    return _value(series, metric, [served.measured.values[metric] for served in found])


def _value(series: str, metric: str, values: Sequence[float], x: float | None = None, decimals: int = _DECIMALS) -> Row:
    """A row without a published value; ``values`` has one a seed, or none."""
    simulated = round(fmean(values), decimals) if values else None
    cells = {"series": series, "metric": metric, "x": x, "simulated": simulated, "kind": "predicted"}
    if len(values) > 1:
        cells |= {"minimum": round(min(values), decimals), "maximum": round(max(values), decimals)}
    return cells


def _document(
    own: OwnTrace,
    figure: str,
    rows: list[Row],
    finding: str,
    runs: dict[str, list[_Served]] | None = None,
    experiment: Experiment = FIG2,
) -> Payload:
    """A document: the rows, one sentence, and the basis.

    Args:
        runs: Runs by series with vLLM among them, for the pool; None for a figure over several pools or loads.
        experiment: The figure that gives the measured part of the span.
    """
    server = own.server
    return {
        "figure": figure,
        "trace": own.file,
        "workload": _description(own),
        "rows": rows,
        "finding": finding,
        **vars(server),
        "requests": len(own.trace),
        "left_out": own.left_out,
        "arrivals": "the trace's" if server.request_rate is None else "poisson",
        "seeds": list(own.seeds),
        "cost": own.cost,
        "step_scale": own.step_scale,
        "max_num_batched_tokens": own.budget,
        "basis": [*(_pool_lines(own, runs, experiment) if runs else ()), *_step_lines(own)],
        "remarks": [*_left_out_lines(own), *(_refused_lines(runs) if runs else ())],
    }


def _description(own: OwnTrace) -> str:
    server, work = own.server, own.workload(own.seeds[0])
    span_s = _span_s(work)
    if server.request_rate is None:
        rate = f", {mean_rate(work.arrival_ticks):,.3f} req/s over {span_s:,.1f} s" if span_s else ""
        arrivals = f"its own arrivals{rate}"
    elif isfinite(server.request_rate):
        arrivals = f"Poisson arrivals at {server.request_rate:g} req/s over {span_s:,.0f} s"
    else:
        arrivals = "all at once"
    place = f"{server.model} on {server.tensor_parallel_size} x {gpu(server.gpu).name}"
    which = "" if len(own.seeds) == 1 else f", mean of seeds {own.seeds[0]} to {own.seeds[-1]}"
    return f"{own.file}, {requests_text(len(work))}, {arrivals}{which}; {place}"


def requests_text(count: int) -> str:
    """A number of requests as text."""
    return f"{count:,} request{'' if count == 1 else 's'}"


def _pool_lines(own: OwnTrace, runs: dict[str, list[_Served]], experiment: Experiment) -> Iterator[str]:
    one, work = runs[VLLM][0].measured, own.workload(own.seeds[0])
    slots = one.num_blocks * one.block_size
    yield f"Pool: {one.num_blocks:,} blocks of {one.block_size} slots, {slots:,} in all."
    window = _window_s(work, experiment)
    if window is None:
        yield "Means are over the whole run, as all requests arrive at once."
    else:
        yield (
            f"Means are over the iterations from {window[0]:,.0f} to {window[1]:,.0f} s, the last"
            f" {1 - experiment.window_s[0] / experiment.duration_s:.0%} of the span in which requests arrive, as in the paper."
        )


_COSTS = {
    "paper": "the paper's measurements, by context, at the scale s = {scale:g} that was fitted on its Fig 13a; as in the"
    " figures on the paper's own pairs",
    "fitted": "the profile of the GPU (--cost fitted), unscaled, as in simulate; the paper measured no step of this model"
    " and GPU",
    "roofline": "the roofline (--cost roofline), unscaled, as in simulate; the paper measured no step of this model and GPU",
}


def _step_lines(own: OwnTrace) -> Iterator[str]:
    yield f"Step time: {_COSTS[own.cost].format(scale=own.step_scale)}. No number is fitted on this trace."
    if own.budget > _BUDGET:
        yield (
            f"Tokens in a step: at most {own.budget:,}, so that the longest prompt fits beside decodes; the paper's"
            f" {_BUDGET:,} are for requests of {MAX_MODEL_LEN:,}."
        )


def _left_out_lines(own: OwnTrace) -> Iterator[str]:
    if own.left_out:
        longest = model(own.server.model).max_model_len
        total = own.left_out + len(own.trace)
        yield f"Left out: {own.left_out:,} of {total:,} requests, longer than the {longest:,} tokens of {own.server.model}."


def _refused_lines(runs: dict[str, list[_Served]]) -> Iterator[str]:
    for name, found in runs.items():
        if found[0].refused:
            yield f"Not served under {name}: {requests_text(found[0].refused)}, which would need more slots than its pool has."


def _used_text(rows: Sequence[Row]) -> str:
    used = {row["series"]: row["simulated"] for row in rows if row["metric"] == "token_states_pct"}
    least = min(used, key=lambda name: used[name])
    lowest = f"the lowest share is {used[least]:.1f} %, under {least}"
    return f"Token states fill {used[VLLM]:.1f} % of the pool under {VLLM}; {lowest}."


def _rates_text(rows: Sequence[Row]) -> Iterator[str]:
    at = {row["series"]: row["simulated"] for row in rows if row["simulated"] is not None}
    if VLLM not in at:
        return
    ratios = [f"{at[VLLM] / at[name]:.2f} times the rate of {name}" for name in (ORACLE, MAX, FT) if name in at]
    text = f"{VLLM} serves {at[VLLM]:.3g} req/s at {TARGET_S:g} s/token"
    yield f"{text}: {', '.join(ratios)}." if ratios else f"{text}."


def _never_text(rows: Sequence[Row]) -> Iterator[str]:
    names = [row["series"] for row in rows if row["simulated"] is None]
    if names:
        yield (
            f"No request rate gives {' or '.join(names)} a mean latency of {TARGET_S:g} s/token: at every rate it stays on one"
            " side. A trace with more requests, or with longer outputs, has such a rate."
        )
