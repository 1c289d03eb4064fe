"""What Orca, DeepSpeed-FastGen and Sarathi-Serve say of the rate that they serve within a limit of latency, put to
the test.

Step times are rooflines over data sheets. Rates are the highest at which the limit is met, over 300 requests, by
bisection.

    Orca      GPT-3 175B on 16 A100-40GB, prompts of 32 to 512 and outputs of 1 to 128 tokens, evenly; the limit is a
              median normalised latency of twice that of Orca without load (OSDI'22, section 6.2)
    FastGen   a 70B LLaMA on 4 A100-80GB, prompts normal around 2,600, outputs around 60; met by a request whose first
    token
              comes at 512 prompt tokens/s or faster and the others at 4 tokens/s, and by 99 % of them
    Sarathi   prompts log-normal with median 1,730 and 90th percentile 5,696, outputs 415 and 834, after ShareGPT4's;
    the limit
              is on the 99th percentile of the time between tokens: 100 ms (Mistral-7B), 200 ms (Yi-34B on two cards),
              1 s (Falcon-180B on eight, in two stages); with a median wait of 2 s at most
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from ..sim.cost import RooflineCost
from ..sim.gaps import Gaps
from ..sim.requests import request_times
from ..sim.run import Run, simulate
from ..sim.settings import settings
from ..sim.spec import Deployment, ModelSpec, gpu, model, paper_num_blocks
from ..sim.spec.families import read_config
from ..sim.ticks import PER_SECOND
from ..sim.workload import Workload
from ..traces import poisson, stream
from .claim import Judged, Part, Probe, Source, Values
from .claim_runs import Trial, highest_rate
from .claims_throughput import ROUNDED
from .systems_throughput import published

_REQUESTS = 300
_MAX_LEN = 16_384
YI_34B = {
    "model_type": "llama", "num_hidden_layers": 60, "hidden_size": 7168, "num_attention_heads": 56,
    "num_key_value_heads": 8, "intermediate_size": 20480, "vocab_size": 64000, "max_position_embeddings": _MAX_LEN,
}  # fmt: skip
FALCON_180B = {
    "model_type": "falcon", "num_hidden_layers": 80, "hidden_size": 14848, "num_attention_heads": 232,
    "num_kv_heads": 8, "new_decoder_architecture": True, "bias": False, "vocab_size": 65024,
}  # fmt: skip


def _arrivals(trial: Trial, rate: float) -> np.ndarray:
    return poisson(_REQUESTS, rate, stream(trial.seed, "systems arrivals"))


#: Policy, most sequences, and the rate to begin with.
_ORCA_RUNS = (
    ("orca", "orca", 32, 8.0),
    ("batches_of_8", "fastertransformer", 8, 0.5),
    ("one_at_a_time", "fastertransformer", 1, 0.2),
)


def _orca(trial: Trial) -> Values:
    limit = 2 * _orca_latency_s(trial, "orca", 32, 0.01)
    rates = {
        name: highest_rate(lambda rate, at=(policy, batch): _orca_latency_s(trial, *at, rate) <= limit, guess)
        for name, policy, batch, guess in _ORCA_RUNS
    }
    times = {f"over_{name}": rates["orca"] / rates[name] for name in ("batches_of_8", "one_at_a_time")}
    return times | {"orca_requests_per_s": rates["orca"], "limit_s": limit}


def _orca_latency_s(trial: Trial, policy: str, batch: int, rate: float) -> float:
    random = stream(trial.seed, "systems orca")
    prompts, outputs = random.integers(32, 513, _REQUESTS), random.integers(1, 129, _REQUESTS)
    work = Workload("orca", _arrivals(trial, rate), prompts, outputs, outputs)
    cards = {"gpu": "a100-40gb", "tensor_parallel_size": 8, "pipeline_parallel_size": 2}
    run = simulate(settings(policy=policy, model="opt-175b", max_num_seqs=batch, **cards), work)
    return float(np.median(request_times(run).normalized_latency_s))


def judge_orca(values: Mapping[str, float]) -> Judged:
    """36.9 times the rate, from 95 % on."""
    said = published()["orca_osdi22"]["vs_ft_x"]
    names = {"batches_of_8": "FasterTransformer in batches of 8", "one_at_a_time": "FasterTransformer one at a time"}
    times = {text: values[f"over_{name}"] for name, text in names.items()}
    return Judged(
        tuple(Part(text, value, said * ROUNDED) for text, value in times.items()),
        f"at {1e3 * values['limit_s']:.0f} ms/token Orca serves {values['orca_requests_per_s']:.1f} req/s: "
        + ", ".join(f"{value:.1f} times {text}" for text, value in times.items())
        + f"; said: {said:g}",
        "Static batches wait for each other, so that the tighter the limit the smaller the batch they can afford.",
    )


def _fastgen(trial: Trial) -> Values:
    policies = {"vllm": ("vllm-v0", 8192), "fastgen": ("fastgen", 2048)}
    rates = {
        name: highest_rate(lambda rate, at=(policy, budget): _fastgen_met(trial, *at, rate) >= 0.99, 2.0)
        for name, (policy, budget) in policies.items()
    }
    return rates | {"times": rates["fastgen"] / rates["vllm"]}


def _fastgen_met(trial: Trial, policy: str, budget: int, rate: float) -> float:
    """Share of the requests that meet FastGen's limits."""
    random = stream(trial.seed, "systems fastgen")
    prompts, outputs = (
        np.clip(np.rint(random.normal(mean, 0.3 * mean, _REQUESTS)).astype(np.int64), 2, 3 * mean)
        for mean in (2600, 60)
    )
    cards = {"gpu": "a100-80gb", "tensor_parallel_size": 4, "max_model_len": _MAX_LEN}
    chosen = settings(policy=policy, model="llama-3.1-70b", max_num_batched_tokens=budget, **cards)
    times = request_times(simulate(chosen, Workload("fastgen", _arrivals(trial, rate), prompts, outputs, outputs)))
    decode_s = (times.finish_ticks - times.first_token_ticks) / PER_SECOND / (outputs - 1)
    return float(((times.ttft_ms <= 1e3 * prompts / 512) & (decode_s <= 1 / 4)).mean())


def judge_fastgen(values: Mapping[str, float]) -> Judged:
    """2.3 times the rate, from 95 % on."""
    said, times = published()["fastgen"]["vs_vllm_x"], values["times"]
    return Judged(
        (Part("effective throughput", times, said * ROUNDED),),
        f"99 % of the requests are served in time at up to {values['fastgen']:.2f} req/s (FastGen) and"
        f" {values['vllm']:.2f} (vLLM of 2023): {times:.2f} times; said: {said:g}",
        "A prompt pauses all decodes for as long as it takes to compute; how much that costs hangs on the limit.",
    )


@dataclass(frozen=True)
class Served:
    """One of Sarathi-Serve's deployments: model, ranks, stages, and its limit on the time between tokens."""

    shape: ModelSpec
    tensor_parallel: int
    pipeline_parallel: int
    limit_ms: float
    guess: float


@lru_cache(1)
def deployments() -> dict[str, Served]:
    """Those that numbers are given for, in the order of the numbers."""
    yi, falcon = read_config(YI_34B, "yi-34b"), read_config(FALCON_180B, "falcon-180b")
    return {
        "Mistral-7B": Served(model("mistral-7b-v0.1"), 1, 1, 100.0, 1.5),
        "Yi-34B": Served(yi, 2, 1, 200.0, 0.6),
        "Falcon-180B": Served(falcon, 4, 2, 1000.0, 0.3),
    }


def _sarathi(trial: Trial) -> Values:
    found = {}
    for name, served in deployments().items():
        sarathi, paged = (
            highest_rate(lambda rate, at=(served, *chosen): _in_time(trial, *at, rate), served.guess)
            for chosen in (("sarathi", 512), ("vllm-v0", _MAX_LEN))
        )
        found[name] = sarathi / paged
    return found


def _in_time(trial: Trial, served: Served, policy: str, budget: int, rate: float) -> bool:
    run = _serve(served, policy, budget, _sharegpt4(trial, rate))
    times = request_times(run)
    wait_s = float(np.median(times.first_scheduled_ticks - times.arrival_ticks)) / PER_SECOND
    return Gaps.of(run.book).percentile_ms(99) <= served.limit_ms and wait_s <= 2


def _serve(served: Served, policy: str, budget: int, work: Workload) -> Run:
    card, deployment = gpu("a100-80gb"), Deployment(pipeline_parallel=served.pipeline_parallel)
    blocks = paper_num_blocks(served.shape, card, served.tensor_parallel, 16, deployment)
    cost = RooflineCost(served.shape, card, served.tensor_parallel, deployment=deployment)
    # The pool and the step time are the deployment's; of the preset there is only its length, which is enough.
    chosen = settings(
        policy=policy,
        model="llama-3.1-8b",
        max_model_len=_MAX_LEN,
        max_num_batched_tokens=budget,
        num_gpu_blocks_override=blocks,
    )
    return simulate(chosen, work, cost)


def _sharegpt4(trial: Trial, rate: float) -> Workload:
    random, deviation = stream(trial.seed, "systems sarathi"), NormalDist().inv_cdf(0.9)
    prompts, outputs = (
        np.clip(np.rint(median * (p90 / median) ** (random.standard_normal(_REQUESTS) / deviation)), 2, most).astype(
            np.int64
        )
        for median, p90, most in ((1730, 5696, 14_000), (415, 834, 2_000))
    )
    return Workload("sharegpt4", _arrivals(trial, rate), prompts, outputs, outputs)


def judge_sarathi(values: Mapping[str, float]) -> Judged:
    """2.6, 3.7 and 5.6 times the rate, from 95 % on."""
    said = dict(zip(deployments(), published()["sarathi_serve"]["vs_vllm_x"], strict=True))
    return Judged(
        tuple(Part(name, values[name], said[name] * ROUNDED) for name in said),
        ", ".join(f"{name} {values[name]:.1f} times (said: {said[name]:g})" for name in said),
        "Whole prompts between decodes break a tight limit at a low rate; bubbles of pipeline stages, which Sarathi"
        " also cures, are not modelled.",
    )


SOURCES = {
    9: Source("Orca, OSDI'22", "36.9 times FasterTransformer's throughput at the same latency", "simulate", "36.9"),
    10: Source("DeepSpeed-FastGen", "2.3 times vLLM's effective throughput", "simulate", "2.3"),
    11: Source("Sarathi-Serve, OSDI'24", "2.6, 3.7 and 5.6 times the rate of vLLM", "simulate", "2.6, 3.7, 5.6"),
}
_ROOFLINE = "simulated: roofline, 300 requests, the highest rate within the limit"
PROBES = (
    Probe(9, _ROOFLINE, "36.9, from 95 % on", _orca, judge_orca, "over_batches_of_8", stretches=False),
    Probe(10, _ROOFLINE, "2.3, from 95 % on", _fastgen, judge_fastgen, "times", stretches=False),
    Probe(11, _ROOFLINE, "each, from 95 % on", _sarathi, judge_sarathi, "Mistral-7B", stretches=False),
)
