"""A server that is not there: the oracle under vllm-v1, written out as ``vllm bench serve`` and /metrics would.

The keys and units are those of vllm/benchmarks/serve.py and vllm/v1/metrics/loggers.py.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.experiments.cli.app import status
from fragmeter.experiments.measured import knobs as measured_knobs
from fragmeter.experiments.measured import replay as measured_replay
from fragmeter.experiments.measured.start import benchmark
from fragmeter.sim import settings
from fragmeter.sim.cost import PaperCost
from fragmeter.sim.engine.replica import FITTED_STEP_SCALE
from fragmeter.sim.types.ticks import PER_SECOND, PER_US
from oracle import Limits, Outcome, Pool, Request, simulate

BLOCK_SIZE, BLOCKS = 4, 61
LIMITS = Limits(max_model_len=2048, max_num_seqs=16, max_num_batched_tokens=64)
#: The replica's settings for that server.
FLAGS = (
    *("--model", "opt-13b", "--gpu", "a100-40gb", "--block-size", BLOCK_SIZE, "--num-gpu-blocks-override", BLOCKS),
    *("--max-num-seqs", LIMITS.max_num_seqs, "--max-num-batched-tokens", LIMITS.max_num_batched_tokens),
    # The oracle decides a step after the one before it, keeps no prefixes, and is nothing but an engine.
    *("--cost", "paper", "--enforce-eager", "--no-async-scheduling", "--no-enable-prefix-caching", "--outside-ms", 0),
)
EPOCH_S = 353_399.725848632


def requests(count: int = 80, rate: float = 3.0, seed: int = 3) -> list[Request]:
    """Poisson arrivals in whole microseconds, the first at 0."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / rate, count))
    arrivals = np.rint((arrivals - arrivals[0]) * 1e6).astype(np.int64) * PER_US
    prompts, outputs = rng.integers(4, 60, count), rng.integers(1, 40, count)
    outputs[1] = 1
    return [Request(*row) for row in zip(arrivals.tolist(), prompts.tolist(), outputs.tolist(), strict=True)]


@dataclass(frozen=True)
class Server:
    """What serves, and what it leaves.

    Attributes:
        scale: Factor on the steps that are simulated by default.
        blocks: Of its pool.
        offset_s: What passes before a request reaches the engine.
    """

    scale: float = 1.0
    blocks: int = BLOCKS
    offset_s: float = 0.0

    def serve(self, requests: Sequence[Request]) -> Outcome:
        """The oracle's run; an offset moves all alike, so that it changes no decision."""
        return _served(self.scale, self.blocks, tuple(requests))

    def bench(self, requests: Sequence[Request], outcome: Outcome, **more: Any) -> dict[str, Any]:
        """What the client writes."""
        tokens = [[tick / PER_SECOND for tick in one["token_ticks"]] for one in outcome.requests]
        starts = [one.arrival_ticks / PER_SECOND for one in requests]
        ends = max(times[-1] for times in tokens) + self.offset_s
        return {
            "date": "20260122-101010",
            "backend": "vllm",
            "model_id": "facebook/opt-13b",
            "num_prompts": len(requests),
            "request_rate": 3.0,
            "burstiness": 1.0,
            "max_concurrency": None,
            "duration": ends,
            "completed": len(requests),
            "failed": 0,
            "input_lens": [one.prompt_tokens for one in requests],
            "output_lens": [one.output_tokens for one in requests],
            "ttfts": [times[0] - start + self.offset_s for times, start in zip(tokens, starts, strict=True)],
            "itls": [np.diff(times).tolist() for times in tokens],
            "start_times": [EPOCH_S + start for start in starts],
            "generated_texts": ["x"] * len(requests),
            "errors": [""] * len(requests),
        } | more

    def metrics(self, requests: Sequence[Request], outcome: Outcome, every_s: float = 0.05) -> str:
        """Scrapes at even times from before the first request to after the last, and when each was."""
        end = outcome.steps[-1].start_ticks + outcome.steps[-1].ticks
        times = range(0, end + 2 * int(every_s * PER_SECOND), int(every_s * PER_SECOND))
        scrapes = (self._scrape(requests, outcome, at) for at in times)
        return "".join(f"{1_763_790_000 + place}\n{text}" for place, text in enumerate(scrapes))

    def _scrape(self, requests: Sequence[Request], outcome: Outcome, at: int) -> str:
        step = next((step for step in outcome.steps if step.start_ticks <= at < step.start_ticks + step.ticks), None)
        labels = 'engine="0",model_name="facebook/opt-13b"'
        slots = (self.blocks - 1) * BLOCK_SIZE
        usage = 0.0 if step is None else 1 - step.buckets.get("free", 0) / slots
        preempted = sum(len(step.preempted) for step in outcome.steps if step.start_ticks <= at)
        ttfts = [
            (one["first_token_ticks"] - request.arrival_ticks) / PER_SECOND
            for request, one in zip(requests, outcome.requests, strict=True)
            if one["first_token_ticks"] <= at
        ]
        config = f'block_size="{BLOCK_SIZE}",cache_dtype="auto",num_gpu_blocks="{self.blocks}"'
        return (
            "# HELP vllm:num_requests_running Number of requests in model execution batches.\n"
            "# TYPE vllm:num_requests_running gauge\n"
            f"vllm:num_requests_running{{{labels}}} {0 if step is None else len(step.running):.1f}\n"
            f"vllm:kv_cache_usage_perc{{{labels}}} {usage}\n"
            f"vllm:num_preemptions_total{{{labels}}} {preempted:.1f}\n"
            f"vllm:time_to_first_token_seconds_sum{{{labels}}} {sum(ttfts)}\n"
            f"vllm:time_to_first_token_seconds_count{{{labels}}} {len(ttfts):.1f}\n"
            f'vllm:cache_config_info{{{config},engine="0"}} 1.0\n'
            "process_open_fds 41.0\n"
        )


@cache
def _served(scale: float, blocks: int, requests: tuple[Request, ...]) -> Outcome:
    cost = PaperCost(FITTED_STEP_SCALE * scale).step_ticks
    return simulate("vllm-v1", list(requests), Pool(blocks, BLOCK_SIZE), LIMITS, cost)


@cache
def _metrics(server: Server, requests: tuple[Request, ...]) -> str:
    return server.metrics(requests, server.serve(requests))


def written(folder: Path, server: Server, requests: Sequence[Request], **more: Any) -> tuple[Path, Path]:
    """The two files of a benchmark of that server."""
    (folder / "bench.json").write_text(json.dumps(server.bench(requests, server.serve(requests), **more)))
    (folder / "metrics.txt").write_text(_metrics(server, tuple(requests)))
    return folder / "bench.json", folder / "metrics.txt"


def with_one_that_failed(document: dict[str, Any]) -> dict[str, Any]:
    """The same, and a request that the server refused at once."""
    added = {
        "input_lens": 30, "output_lens": 0, "ttfts": 0.0, "itls": [], "generated_texts": "", "errors": "503",
        "start_times": EPOCH_S + 1.5,
    }  # fmt: skip
    return document | {name: [*document[name], value] for name, value in added.items()} | {"failed": 1}


__all__ = ["BLOCKS", "FLAGS", "LIMITS", "Server", "requests", "with_one_that_failed", "written"]


#: What the tests ask of the server.
SENT = requests()
#: A replica with the settings of the server.
CHOSEN = settings(
    policy="vllm-v1", model="opt-13b", gpu="a100-40gb", block_size=4, num_gpu_blocks_override=BLOCKS,
    max_num_seqs=LIMITS.max_num_seqs, max_num_batched_tokens=LIMITS.max_num_batched_tokens,
    async_scheduling=False, enable_prefix_caching=False, enforce_eager=True, cost="paper", outside_ms=0,
)  # fmt: skip


def held(folder, server: Server, chosen=CHOSEN, **more):
    """The benchmark of a server, its replay, and the knobs."""
    bench = benchmark(*written(folder, server, SENT, **more), chosen)
    base = measured_replay.replay(bench, chosen)
    return bench, base, list(measured_knobs.vary_knobs(bench, chosen, base))


def validate(*tokens: object) -> int:
    """The exit status of ``fragmeter validate`` with these flags."""
    return status(["validate", *map(str, tokens)])
