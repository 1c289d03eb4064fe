"""What DeepSpeed-FastGen says of its effective throughput, put to the test as its benchmark measures it.

Published (github.com/microsoft/DeepSpeed, blogs/deepspeed-fastgen, section 4; scripts: microsoft/DeepSpeedExamples,
benchmarks/inference/mii): LLaMA-2 70B on four A100-80GB, prompts normal around 2,600 tokens (4,000 at most), outputs
around 60, both with a deviation of 30 %. 1 to 32 clients, each with one request under way, send 512 requests. One is
successful if

    its first token comes at 512 prompt tokens/s or faster, and
    the exponential moving average (span 16) of the gaps between its tokens stays below 1/4 s to the last one.

Effective throughput is that of the successful ones, at the number of clients where it is highest. FastGen's steps have
768 tokens. The model here is LLaMA-3.1 70B, which differs by its vocabulary.

Step times are rooflines, times one factor, the same for both: it is fitted on the effective throughput that FastGen
was published with, and vLLM's is predicted. So only the schedules are compared; a difference in
software overhead between the two systems is not modelled.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.runs.crossing import crossing
from fragmeter.sim import Run, Workload, simulate
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.output import frames as pd
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.users import Users
from fragmeter.traces import stream

from .claim import Code, Judged, Part, Values
from .runs import Trial
from .systems_throughput import published
from .throughput import ROUNDED

_REQUESTS, _CLIENTS = 512, (1, 2, 4, 6, 8, 12, 16, 20, 24, 28, 32)
_PROMPT_TOKENS, _OUTPUT_TOKENS, _DEVIATION, _LONGEST_PROMPT = 2600, 60, 0.3, 4000
_PROMPT_TOKENS_PER_S, _TOKENS_PER_S, _SPAN = 512, 4, 16
#: Where the search for the slowness begins.
_SLOWNESS_START = 1.5
#: Policy and tokens of a step: FastGen's benchmark's, and vLLM's where none is asked for, the model's length.
_SYSTEMS = {"vllm": ("vllm-v0", 4096), "fastgen": ("fastgen", 768)}
_CARDS = {"model": "llama-3.1-70b", "gpu": "a100-80gb", "tensor_parallel_size": 4, "max_model_len": 8192}


def _requests(trial: Trial, clients: int) -> Workload:
    random, no_wait = stream(trial.seed, "systems fastgen"), np.zeros(_REQUESTS, dtype=np.int64)
    prompts, outputs = (
        np.clip(np.rint(random.normal(mean, _DEVIATION * mean, _REQUESTS)).astype(np.int64), 2, most)
        for mean, most in ((_PROMPT_TOKENS, _LONGEST_PROMPT), (_OUTPUT_TOKENS, 4 * _OUTPUT_TOKENS))
    )
    return Workload("fastgen", no_wait, prompts, outputs, outputs, users=Users(clients, no_wait))


def gap_seconds(run: Run) -> pd.DataFrame:
    """Every gap between two tokens of a request, in their order.

    Returns:
        Columns ``index`` (the request) and ``gap_s``. Of runs with one sequence a request.
    """
    run_log = run.log
    residencies = (
        run_log.residencies["index"],
        run_log.residencies["start_step"],
        run_log.residency_end,
        run_log.first_token_ticks,
    )
    ticks: dict[str, list[np.ndarray]] = {"index": [], "ticks": []}
    for index, start, end, first in zip(*(column.tolist() for column in residencies), strict=True):
        later = run_log.end_of(np.arange(start + 2, end + 1))
        ticks["index"].append(np.full(1 + len(later), index))
        ticks["ticks"].append(np.append(first, later))
    table = pd.DataFrame({name: np.concatenate(columns) for name, columns in ticks.items()})
    table = table.sort_values(["index", "ticks"], ignore_index=True)
    table["gap_s"] = table.groupby("index")["ticks"].diff() / PER_SECOND
    return table.dropna()[["index", "gap_s"]]


@dataclass(frozen=True)
class Served:
    """How some number of clients was served.

    Attributes:
        clients: The number.
        lateness: Of each request the larger of its two times over their limits, float64 [requests].
        per_s: Requests/s, successful or not.
    """

    clients: int
    lateness: np.ndarray
    per_s: float

    def share(self, stretch: float = 1.0) -> float:
        """Share of successful requests where all steps take ``stretch`` times as long.

        All times grow by the same factor, as no request has an arrival time of its own.
        """
        return float((self.lateness * stretch < 1).mean())

    def effective(self, stretch: float = 1.0) -> float:
        """Successful requests/s."""
        return self.share(stretch) * self.per_s / stretch


def lateness(run: Run) -> np.ndarray:
    """The larger of each request's two times over their limits, float64 [requests]."""
    averages = gap_seconds(run).groupby("index")["gap_s"].ewm(span=_SPAN).mean()
    slowest = averages.groupby("index").max().reindex(np.arange(len(run.workload)), fill_value=0).to_numpy()
    first_token = request_times(run).ttft_ms / 1e3 / (run.workload.prompt_tokens / _PROMPT_TOKENS_PER_S)
    return np.maximum(first_token, slowest * _TOKENS_PER_S)


def served(trial: Trial, policy: str, step_tokens: int, clients: int) -> Served:
    """All requests, sent by so many clients."""
    chosen = paper_settings(policy=policy, max_num_batched_tokens=step_tokens, **_CARDS)
    run = simulate(chosen, _requests(trial, clients))
    return Served(clients, lateness(run), _REQUESTS * PER_SECOND / run.log.end_ticks)


def best(numbers: Sequence[Served], stretch: float = 1.0) -> Served:
    """At the number of clients at which it is highest."""
    return max(numbers, key=lambda one: one.effective(stretch))


def slowness(numbers: Sequence[Served], per_s: float) -> float:
    """How much longer all steps must take for the effective throughput to be ``per_s`` requests/s."""
    return crossing(lambda stretch: 1 / best(numbers, stretch).effective(stretch), 1 / per_s, _SLOWNESS_START).at


def _fastgen(trial: Trial) -> Values:
    runs = {name: [served(trial, *chosen, clients) for clients in _CLIENTS] for name, chosen in _SYSTEMS.items()}
    fitted = slowness(runs["fastgen"], published()["fastgen"]["fastgen_requests_per_s"])
    found: Values = {"slowness": fitted}
    for step, stretch in (("roofline", 1.0), ("fitted", fitted)):
        rates = {name: best(numbers, stretch).effective(stretch) for name, numbers in runs.items()}
        found |= {f"{name}_per_s_{step}": rate for name, rate in rates.items()}
        found[f"times_{step}"] = rates["fastgen"] / rates["vllm"]
    return found | {"vllm_failed_pct": 100 * (1 - best(runs["vllm"], fitted).share(fitted))}


def judge_fastgen(values: Mapping[str, float]) -> Judged:
    """2.3 times the effective throughput, from 95 % on; less leaves the rest to the software."""
    said, times = published()["fastgen"], values["times_fitted"]
    return Judged(
        (Part("effective throughput", times, said["vs_vllm_x"] * ROUNDED, up_to=inf),),
        f"with steps {values['slowness']:.2f} times the roofline's, fitted on FastGen's published"
        f" {said['fastgen_requests_per_s']:g} req/s, vLLM serves {values['vllm_per_s_fitted']:.2f} successfully"
        f" ({values['vllm_failed_pct']:.0f} % fail; published: {said['vllm_requests_per_s']:g},"
        f" {said['vllm_failed_pct']:g} %): {times:.2f} times; said: {said['vs_vllm_x']:g}. With the roofline's steps"
        f" {values['fastgen_per_s_roofline']:.2f} over {values['vllm_per_s_roofline']:.2f}:"
        f" {values['times_roofline']:.2f} times",
        "A prefill pauses all decodes for its duration, so the cost grows with the step time. Only"
        " the schedules differ here; the difference of vLLM's and FastGen's software remains, a factor of"
        f" {said['vs_vllm_x'] / times:.2f}.",
    )


PROBES: Code = {
    10: (_fastgen, judge_fastgen),
}
