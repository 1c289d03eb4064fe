"""Predicts the runs of a real server from their loads, with step times that were calibrated on another run.

Each run is simulated with the client's send times and lengths, and with the contents that requests share; its step times
come from ``CALIBRATION`` alone. Null models are simulated beside, fitted to the same steps of the same run in the same way, with fewer
terms: one time, a line in the tokens of a step, and a plane in sequences, context and prompt tokens. The measured side is the mean of several
repetitions of the run, each on a new server; the noise is the range of the repetitions over their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.experiments.measured.replay import BenchmarkOfRequests, Replayed, compared
from fragmeter.experiments.measured.start import benchmark
from fragmeter.experiments.measured.step_fit import fitted, least_relative, step_table
from fragmeter.sim import Settings, settings, simulate
from fragmeter.sim.cost import StepCost
from fragmeter.sim.cost.steps import FittedSteps, StepCoefficients, read_steps
from fragmeter.sim.output.files import as_json
from fragmeter.sim.recording.probe import STATE_SPECS, ProbedRequest, ProbedRun, ProbedStep
from fragmeter.sim.types.errors import UserError

from .loads import Session

#: What is judged.
METRICS = (
    "output_throughput",
    *(f"{which}_{name}_ms" for name in ("ttft", "tpot", "e2el") for which in ("mean", "median", "p99")),
    "mean_kv_cache_usage",
    "mean_num_requests_running",
    "mean_num_requests_waiting",
    "num_preemptions",
    "prefix_cache_hit_rate",
)

#: Null models, and how many of these terms each has: one, tokens, sequences that decode, their context tokens.
NULL_MODELS = {"constant": 1, "tokens": 2, "contexts": 4}


@dataclass(frozen=True, eq=False)
class RecordedLoad:
    """A load that a server has served.

    Attributes:
        name: Name of the load.
        settings: Replica that stands for the server.
        benchmark: The client's side, with the contents that its requests share.
        requests: The probe's side of the same requests, in the same order.
        steps: The steps that computed them, and one more.
        header: The probe's description of the server.
    """

    name: str
    settings: Settings
    benchmark: BenchmarkOfRequests
    requests: list[ProbedRequest]
    steps: list[ProbedStep]
    header: Mapping[str, Any]


def recorded(session: Session, folder: Path, model: Path, probe: ProbedRun) -> dict[str, RecordedLoad]:
    """The loads of a session in a folder of ``record``, by name.

    Args:
        probe: The probe's file in that folder.
        model: ``config.json`` of the model.

    Raises:
        UserError: The server has served other requests than those of the loads, one load after the other.
    """
    chosen, found, first = settings_of(probe.header, model), {}, 0
    for load in session.loads:
        seen = benchmark(folder / f"{load.name}.json", folder / f"{load.name}.metrics.txt", chosen)
        if not isinstance(seen, BenchmarkOfRequests):
            raise UserError(f"{folder / load.name}.json: has no list of requests; record the loads again")
        numbers = _matched(seen, probe, range(first, first + len(seen.trace)), folder / f"{load.name}.json")
        first += len(numbers)
        content = replace(seen.trace, content=probe.content(numbers))
        requests = [probe.requests[number] for number in numbers]
        found[load.name] = RecordedLoad(
            load.name, chosen, replace(seen, trace=content), requests, _steps(probe, set(numbers)), probe.header
        )
    return found


def _matched(seen: BenchmarkOfRequests, probe: ProbedRun, numbers: range, path: Path) -> list[int]:
    """The number in the probe of each of the client's requests: the first one in order that has its lengths."""
    waiting: dict[tuple[int, int | None], list[int]] = {}
    for number in reversed(numbers):
        request = probe.requests[number] if number < len(probe.requests) else None
        if request is not None:
            waiting.setdefault((request.prompt_tokens, request.output_tokens), []).append(number)
    found = []
    for lengths in zip(seen.trace.prompt_tokens.tolist(), seen.trace.output_tokens.tolist(), strict=True):
        if not waiting.get(lengths):
            remedy = "is not in the probe's file; send the loads alone, one after the other"
            raise UserError(f"{path}: a request of {lengths[0]} + {lengths[1]} tokens {remedy}")
        found.append(waiting[lengths].pop())
    return found


def _steps(probe: ProbedRun, numbers: set[int]) -> list[ProbedStep]:
    own = [place for place, step in enumerate(probe.steps) if any(request in numbers for request, _ in step.tokens)]
    return probe.steps[own[0] : own[-1] + 2]


def settings_of(header: Mapping[str, Any], model: Path) -> Settings:
    """The replica that stands for the server of a probe.

    Args:
        model: ``config.json`` of the model.

    Raises:
        UserError: The simulator does not serve such a model, or does not know the release.
    """
    same = ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "async_scheduling")
    return settings(
        policy="vllm-v1",
        model=str(model),
        vllm_release=".".join(header["vllm"].split(".")[:2]),
        num_gpu_blocks_override=header["num_gpu_blocks"],
        block_size=next(size for spec, size in header["groups"] if spec not in STATE_SPECS),
        enable_prefix_caching=header["prefix_caching"],
        **{name: header[name] for name in same},
    )


def calibrate(load: RecordedLoad, source: str) -> dict[str, Any]:
    """The content of a cost file, fitted to one run.

    The time outside of the engine is what the client measured of the time to first token beyond the simulated one, in
    the median. A request that arrives during a step waits for its end: the simulation has that time, so the constant
    has not.
    """
    found = fitted(load.header, load.steps, source)
    inside = predict(load, read_steps(as_json(found).encode(), source))
    late_s = float(np.median(load.benchmark.measured.ttft_s - inside.ttft_s))
    return found | {"outside_ms": round(max(0.0, late_s) * 1e3, 3)}


def null_models(load: RecordedLoad, outside_ms: float) -> dict[str, FittedSteps]:
    """What one would fit to a run without a simulator: :data:`NULL_MODELS`.

    Args:
        load: That on which step times are calibrated.
        outside_ms: Time of a request outside of the engine.
    """
    table = step_table(load.steps)
    us, tokens = table["ns"] / 1e3, table["decodes"] + table["prefill_tokens"]
    columns = np.stack([np.ones(len(us)), tokens, table["decodes"], table["decode_context"]], axis=1).astype(float)
    found = {}
    for name, terms in NULL_MODELS.items():
        base_us, token_us, row_us, context_us = (*least_relative(columns[:, :terms], us).tolist(), 0.0, 0.0, 0.0)[:4]
        steps = StepCoefficients(max(base_us, 1e-3), (token_us,), row_us, context_us)
        found[name] = FittedSteps(steps, outside_ms=outside_ms)
    return found


def predict(load: RecordedLoad, cost: StepCost) -> Replayed:
    """The load, simulated."""
    return Replayed(simulate(load.settings, load.benchmark.workload(0), cost))


def judged(repetitions: Sequence[RecordedLoad], replayed: Mapping[str, Replayed]) -> dict[str, dict[str, float | None]]:
    """Of each metric the measured mean, the noise, and the relative error of each simulation.

    Args:
        repetitions: The same load on several servers; simulated is the first.
        replayed: Simulations by name.
    """
    first = repetitions[0].benchmark
    simulated = {
        name: {row["metric"]: row["simulated"] for row in compared(first, each)} for name, each in replayed.items()
    }
    measured = [
        {row["metric"]: row["measured"] for row in compared(each.benchmark, next(iter(replayed.values())))}
        for each in repetitions
    ]
    found: dict[str, dict[str, float | None]] = {}
    for metric in METRICS:
        if metric not in measured[0]:
            continue
        values = [one[metric] for one in measured]
        mean = float(np.mean(values))
        row: dict[str, float | None] = {"measured": mean, "noise": float(np.ptp(values)) / mean if mean else None}
        for name, metrics in simulated.items():
            row[name] = metrics[metric]
            row[f"{name}_error"] = metrics[metric] / mean - 1 if mean else None
        found[metric] = row
    return found
