"""Does ``fragmeter diagnose`` name the cause that was planted? A confusion matrix over random servers and loads.

    python benchmarks/diagnose_causes.py                    ten servers of each kind, seeds 0 to 9
    python benchmarks/diagnose_causes.py --first 1000       other loads
    python benchmarks/diagnose_causes.py --kind healthy     one kind
    python benchmarks/diagnose_causes.py --metrics-alone    what an operator has: the line and /metrics, every 5 s

Each server is random: a model on a GPU, lengths, a rate, and prompts that share prefixes. A healthy one has no preemptions and
keeps up. A cause is planted by one flag that makes the latency index of a healthy server at least a tenth worse; loads in which
it does not are drawn again. The server is a simulation with steps that take up to 15 % more or less time, which the diagnosis
does not know. It leaves what a real server does: its /metrics, scraped every 15 s from 0 to the end, and a trace of its requests, or for
every other server a benchmark without contents and with the time of every token. Its load lasts for five scrapes or more.
``fragmeter diagnose`` reads these files and the command line, and the cause that it names first is counted. Of the change that it
advises the effect on the server's own requests is simulated, too, with the server's step times: it is to be within the interval.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from math import exp, expm1
from pathlib import Path

import numpy as np

from fragmeter.experiments.cli.app import DONE, status
from fragmeter.experiments.diagnose.run import Observation, observation, step_cost
from fragmeter.experiments.diagnose.server import Change, Server, server_of
from fragmeter.experiments.runs.pool_use import pool_use
from fragmeter.experiments.runs.slo_check import saturated_rate
from fragmeter.experiments.sglang_server.start import parse_line
from fragmeter.sim import simulate
from fragmeter.sim.config.unread import only_read
from fragmeter.sim.metrics.openmetrics import openmetrics
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.runs.run import Run
from fragmeter.sim.types.errors import FragmeterError
from fragmeter.sim.types.optional import not_none
from fragmeter.sim.types.ticks import PER_SECOND
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.users import Users
from fragmeter.traces import Trace, workload, write

#: Requests of a server: at least and at most; seconds that they arrive for, in between; and seconds between two scrapes.
REQUESTS, MOST_REQUESTS, LASTS_S, SCRAPES_S = 400, 2500, 75.0, 15.0
#: Least increase of the latency index that makes a flag a cause, and the range of the error of the step times.
HURTS, STEPS = 0.1, (0.87, 1.15)
ROOMY = (("llama-3.1-8b", "h100-80gb"), ("llama-3.1-8b", "a100-80gb"), ("qwen2.5-7b", "l40s"), ("qwen3-8b", "h200"))
TIGHT = (("llama-3.1-8b", "rtx-4090"), ("qwen2.5-14b", "l40s"), ("qwen2.5-14b", "a100-40gb"), ("phi-4", "a100-40gb"))
LONG = (("llama-3.1-8b", "rtx-4090"), ("llama-3.1-8b", "l40s"), ("qwen2.5-14b", "a100-40gb"), ("qwen3-8b", "l40s"))
#: Models of which SGLang has states, or windows, in a pool of their own; GPUs, and how many.
STATES = (
    ("kimi-linear-48b-a3b", "h200", 1), ("qwen3-next-80b-a3b", "h200", 2), ("granite-4.0-h-small", "h200", 1),
    ("nemotron-3-nano-30b-a3b", "h200", 1), ("qwen3.5-35b-a3b", "h200", 1),
)  # fmt: skip
WINDOWS = (
    ("gpt-oss-20b", "h100-80gb", 1), ("gpt-oss-120b", "h200", 1), ("gemma-4-26b-a4b", "h100-80gb", 1),
    ("gemma-4-31b", "h200", 1), ("gpt-oss-120b", "h100-80gb", 2),
)  # fmt: skip
ANSWERS = {
    "pool too small": "small pool",
    "max-num-seqs too high": "max-num-seqs too high",
    "chunk too large": "chunk too large",
    "caching off": "caching off",
    "KV dtype": "KV dtype",
    "healthy": "healthy",
    "pool of states": "pool of states",
    "pool of windows": "pool of windows",
    "healthy, SGLang": "healthy",
}


@dataclass(frozen=True)
class Load:
    """Requests and how they are sent: at a rate, or by users of a closed loop."""

    trace: Trace
    users: int | None = None

    def at(self, rate: float, rng: np.random.Generator) -> Load:
        """As many of the requests as last for some scrapes, with Poisson arrivals."""
        trace = self.trace.first(min(len(self.trace), max(REQUESTS, round(rate * LASTS_S))))
        gaps = np.rint(rng.exponential(1e9 / rate, len(trace))).astype(np.int64) * 1000
        return replace(self, trace=replace(trace, arrival_ticks=np.cumsum(gaps)))


@dataclass(frozen=True)
class Planted:
    """A server and its load."""

    line: str
    gpu: str
    load: Load
    scale: float


def requests(
    rng: np.random.Generator,
    prompts: float,
    outputs: float,
    shared: tuple[float, float],
    number: int = MOST_REQUESTS,
    prefixes: int = 9,
) -> Trace:
    """Lognormal lengths with these means; prompts begin with one of fewer than so many prefixes, of these shares of the mean prompt."""
    lengths = [np.maximum(8, np.rint(rng.lognormal(np.log(mean) - 0.32, 0.8, number))) for mean in (prompts, outputs)]
    prompt_tokens, output_tokens = (
        np.minimum(each, 7 * mean).astype(np.int64) for each, mean in zip(lengths, (prompts, outputs))
    )
    count = int(rng.integers(1, prefixes))
    prefix = np.maximum(16, np.rint(rng.uniform(*shared, count) * prompts)).astype(np.int64)
    ids = rng.integers(count, size=number)
    tokens = np.minimum(prefix[ids], prompt_tokens)
    content = PromptContent(np.arange(number + 1), ids, tokens)
    return Trace("requests", prompt_tokens, output_tokens, content=content)


def run_of(server: Server, load: Load) -> Run:
    """The server's own run."""
    users = None if load.users is None else Users(load.users, np.zeros(len(load.trace), dtype=np.int64))
    trace = (
        load.trace if users is None else replace(load.trace, arrival_ticks=np.zeros(len(load.trace), dtype=np.int64))
    )
    work = workload(trace, users=users)
    return simulate(only_read(server.settings(), work), work, step_cost(server.settings()))


def served(line: str, gpu: str, load: Load, scale: float) -> Observation:
    """What a server shows."""
    return observation(run_of(replace(server_of(parse_line(line), gpu, None, None), step_scale=scale), load), None)


def fit(line: str, gpu: str, load: Load) -> float:
    """Sequences of mean final length that its KV cache holds."""
    pool = server_of(parse_line(line), gpu, None, None).pool
    return pool.num_tokens / float((load.trace.prompt_tokens + load.trace.output_tokens).mean())


def is_healthy(seen: Observation) -> bool:
    return seen.preemptions < 0.2 and seen.wait_memory < 0.01 and seen.behind < 0.03


def paced(line: str, gpu: str, load: Load, scale: float, rng: np.random.Generator, share: float) -> Load | None:
    """The load at a share of the saturated rate, or the highest lower one at which the server is healthy."""
    server = replace(server_of(parse_line(line), gpu, None, None), step_scale=scale)
    # As many requests as saturate 1,024 sequences.
    rows = np.tile(np.arange(REQUESTS), 8)
    lengths = load.trace.prompt_tokens[rows], load.trace.output_tokens[rows]
    work = workload(Trace("at once", *lengths, np.zeros(len(rows), dtype=np.int64)))
    most = saturated_rate(only_read(server.settings()), work, step_cost(server.settings()))
    state = rng.bit_generator.state
    while most is not None and share > 0.1:
        rng.bit_generator.state = state
        at_rate = load.at(share * most, rng)
        if is_healthy(served(line, gpu, at_rate, scale)):
            return at_rate
        share -= 0.1
    return None


def healthy(rng: np.random.Generator, scale: float) -> Planted | None:
    model, gpu = ROOMY[rng.integers(len(ROOMY))]
    line = f"vllm serve {model} --max-model-len 16384"
    load = Load(requests(rng, rng.uniform(200, 1500), rng.uniform(100, 400), (0.0, 0.6)))
    found = paced(line, gpu, load, scale, rng, rng.uniform(0.4, 0.7))
    return None if found is None else Planted(line, gpu, found, scale)


def small_pool(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    """A low utilization; or where the server then still has room, or does not start, a small number of blocks."""
    base = healthy(rng, scale)
    if base is None:
        return
    for share in (0.5, 0.4, 0.3, 0.25):
        yield replace(base, line=f"{base.line} --gpu-memory-utilization {share:.2f}")
    server = server_of(parse_line(base.line), base.gpu, None, None)
    most = pool_use(run_of(server, base.load)).max_usage * server.pool.num_blocks
    longest = int((base.load.trace.prompt_tokens + base.load.trace.output_tokens).max()) // 16 + 2
    for share in (0.5, 0.35, 0.25):
        yield replace(base, line=f"{base.line} --num-gpu-blocks-override {max(longest, round(share * most))}")


def kv_dtype(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    model, gpu = TIGHT[rng.integers(len(TIGHT))]
    line = f"vllm serve {model} --max-model-len 12288 --gpu-memory-utilization 0.95"
    load = Load(requests(rng, rng.uniform(300, 900), rng.uniform(150, 400), (0.0, 0.3)))
    found = paced(f"{line} --kv-cache-dtype fp8", gpu, load, scale, rng, 0.9)
    if found is not None:
        yield Planted(line, gpu, found, scale)


def many_seqs(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    model, gpu = LONG[rng.integers(len(LONG))]
    line = f"vllm serve {model} --max-model-len 16384 --gpu-memory-utilization 0.95 --kv-cache-dtype fp8"
    load = Load(requests(rng, rng.uniform(200, 1000), rng.uniform(1500, 2200), (0.0, 0.3), REQUESTS))
    users = round(rng.uniform(1.5, 2.5) * fit(line, gpu, load))
    yield Planted(f"{line} --max-num-seqs 1024 --max-num-batched-tokens 2048", gpu, replace(load, users=users), scale)


def large_chunk(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    model, gpu = ROOMY[rng.integers(len(ROOMY))]
    line = f"vllm serve {model} --max-model-len 32768 --max-num-batched-tokens"
    load = Load(requests(rng, rng.uniform(3000, 4500), rng.uniform(100, 300), (0.0, 0.3)))
    found = paced(f"{line} 2048", gpu, load, scale, rng, rng.uniform(0.6, 0.9))
    for chunk in (32_768, 65_536) if found else ():
        yield Planted(f"{line} {chunk}", gpu, found, scale)


def no_caching(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    model, gpu = ROOMY[rng.integers(len(ROOMY))]
    line = f"vllm serve {model} --max-model-len 32768"
    load = Load(requests(rng, rng.uniform(800, 2500), rng.uniform(100, 300), (0.4, 0.9)))
    found = paced(line, gpu, load, scale, rng, rng.uniform(0.7, 0.9))
    if found is not None:
        yield Planted(f"{line} --no-enable-prefix-caching", gpu, found, scale)


def sglang(rng: np.random.Generator, scale: float, kinds: tuple[tuple[str, str, int], ...]) -> Planted | None:
    """A healthy server of SGLang; of every second one prompts begin with many prefixes."""
    model, gpu, ranks = kinds[rng.integers(len(kinds))]
    line = f"python3 -m sglang.launch_server --model-path {model} --tp-size {ranks} --context-length 16384"
    lengths, prefixes = (rng.uniform(200, 1500), rng.uniform(100, 400)), (9, 200)[rng.integers(2)]
    load = Load(requests(rng, *lengths, (0.0, 0.6), prefixes=prefixes))
    found = paced(line, gpu, load, scale, rng, rng.uniform(0.4, 0.7))
    return None if found is None else Planted(line, gpu, found, scale)


def few_states(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    """A number of states, or a share of the memory."""
    base = sglang(rng, scale, STATES)
    if base is None:
        return
    by_number = rng.integers(2)
    running = pool_use(run_of(server_of(parse_line(base.line), base.gpu, None, None), base.load)).mean_running
    for factor in (4, 3, 2, 1):
        if by_number:
            yield replace(base, line=f"{base.line} --max-mamba-cache-size {max(5, round(factor * running))}")
    for ratio in (0.1, 0.05, 0.02, 0.01, 0.005, 0.002):
        yield replace(base, line=f"{base.line} --mamba-full-memory-ratio {ratio}")


def few_windows(rng: np.random.Generator, scale: float) -> Iterator[Planted]:
    """A low ratio."""
    base = sglang(rng, scale, WINDOWS)
    for ratio in (0.1, 0.05, 0.02, 0.01, 0.005, 0.002, 0.001) if base else ():
        yield replace(base, line=f"{base.line} --swa-full-tokens-ratio {ratio}")


def healthy_sglang(rng: np.random.Generator, scale: float) -> Planted | None:
    return sglang(rng, scale, (STATES, WINDOWS)[rng.integers(2)])


#: What undoes a planted flag, by kind, to measure how much it hurts.
KINDS: dict[str, tuple[Callable[..., Iterator[Planted]], Callable[[Planted], str]]] = {
    "pool too small": (small_pool, lambda each: each.line[: each.line.index(" 16384") + len(" 16384")]),
    "max-num-seqs too high": (many_seqs, lambda each: _with_seqs(each)),
    "chunk too large": (large_chunk, lambda each: f"{each.line.rpartition(' ')[0]} 2048"),
    "caching off": (no_caching, lambda each: each.line.removesuffix(" --no-enable-prefix-caching")),
    "KV dtype": (kv_dtype, lambda each: f"{each.line} --kv-cache-dtype fp8"),
    "pool of states": (few_states, lambda each: _without_last(each)),
    "pool of windows": (few_windows, lambda each: _without_last(each)),
}


def _with_seqs(planted: Planted) -> str:
    return planted.line.replace("1024", str(round(0.9 * fit(planted.line, planted.gpu, planted.load))))


def _without_last(planted: Planted) -> str:
    return planted.line.rsplit(" ", 2)[0]


#: Servers without a planted flag.
HEALTHY = {"healthy": healthy, "healthy, SGLang": healthy_sglang}


def planted(kind: str, seed: int) -> tuple[Planted, float]:
    """A server of a kind, and by how much the planted flag raises its latency index."""
    for attempt in range(50):
        rng = np.random.default_rng([seed, attempt, list(ANSWERS).index(kind)])
        scale = float(rng.uniform(*STEPS))
        if kind in HEALTHY:
            if (found := HEALTHY[kind](rng, scale)) is not None:
                return found, 0.0
            continue
        make, undone = KINDS[kind]
        for found in make(rng, scale):
            try:
                worse = served(found.line, found.gpu, found.load, scale).cost
            except FragmeterError:
                # It does not start, or never admits a request, as SGLang with few windows.
                continue
            hurts = exp(worse - served(undone(found), found.gpu, found.load, scale).cost) - 1
            if hurts >= HURTS:
                return found, hurts
    raise SystemExit(f"{kind}, seed {seed}: no load is hurt by it")


def token_times(run: Run) -> list[np.ndarray]:
    """When each token of every request is out, in seconds; a preempted request goes on after its last one."""
    log, found = run.log, [[] for _ in run.workload.prompt_tokens]
    first = log.first_token_ticks
    for place, index in enumerate(log.residencies["index"].tolist()):
        steps = np.arange(log.residencies["start_step"][place] + 2, log.residency_end[place] + 1)
        found[index] += [first[place : place + 1], log.end_of(steps)]
    return [np.concatenate(parts) / PER_SECOND for parts in found]


def bench(run: Run, load: Load) -> dict[str, object]:
    """The run as ``vllm bench serve`` writes it."""
    times, tokens = request_times(run), token_times(run)
    return {
        "model_id": run.settings.model,
        "duration": run.log.end_ticks / PER_SECOND,
        "request_rate": "inf" if load.users else 1.0,
        "max_concurrency": load.users,
        "input_lens": run.workload.prompt_tokens[times.index].tolist(),
        "output_lens": times.output_tokens.tolist(),
        "start_times": (times.arrival_ticks / PER_SECOND).tolist(),
        "ttfts": (times.ttft_ms / 1e3).tolist(),
        "itls": [np.diff(tokens[index]).tolist() for index in times.index.tolist()],
    }


def diagnosed(found: Planted, seed: int, folder: Path, metrics_alone: bool) -> dict[str, object]:
    """What ``fragmeter diagnose`` says of a server, from the files that it leaves."""
    run = run_of(replace(server_of(parse_line(found.line), found.gpu, None, None), step_scale=found.scale), found.load)
    every_s = 5.0 if metrics_alone else SCRAPES_S
    arguments = ["--serve", found.line, "--gpu", found.gpu, "--json", folder / "d.json"]
    is_vllm = run.settings.policy != "sglang"
    if is_vllm:
        # They have vLLM's names.
        (folder / "metrics.txt").write_text("".join(openmetrics([run], run.settings.model, every_s)))
        arguments += ["--metrics", folder / "metrics.txt"]
    if seed % 2 and is_vllm and "no-enable-prefix" not in found.line and not metrics_alone:
        (folder / "bench.json").write_text(json.dumps(bench(run, found.load)))
        arguments += ["--bench", folder / "bench.json"]
    elif not metrics_alone:
        write(replace(found.load.trace, arrival_ticks=run.workload.arrival_ticks), folder / "trace.parquet")
        arguments += ["--trace", folder / "trace.parquet"]
        arguments += ["--max-concurrency", found.load.users] if found.load.users else []
    arguments += ["--jobs", 1]
    if status(["diagnose", *map(str, arguments)]) != DONE:
        raise SystemExit(f"diagnose refuses {found.line}")
    return json.loads((folder / "d.json").read_text())


def effect(found: Planted, change: Change) -> float:
    """The decrease of the server's latency index by a change of its flags, on its own requests."""
    server = replace(server_of(parse_line(found.line), found.gpu, None, None), step_scale=found.scale)
    costs = [observation(run_of(each, found.load), None).cost for each in (server, not_none(server.changed(change)))]
    return -expm1(costs[1] - costs[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--first", type=int, default=0, help="first seed")
    parser.add_argument("--servers", type=int, default=10, help="servers of each kind")
    parser.add_argument("--kind", choices=ANSWERS, help="one kind only")
    parser.add_argument("--metrics-alone", action="store_true", help="no trace and no benchmark of the requests")
    flags = parser.parse_args()
    counts: dict[str, Counter[str]] = {}
    within: list[bool] = []
    for kind in [flags.kind] if flags.kind else ANSWERS:
        for seed in range(flags.first, flags.first + flags.servers):
            found, hurts = planted(kind, seed)
            with tempfile.TemporaryDirectory() as name:
                said = diagnosed(found, seed, Path(name), flags.metrics_alone)
            first = said["causes"][0] if said["causes"] else said["state"]
            counts.setdefault(kind, Counter())[first] += 1
            promised = ""
            if said["advised"]:
                (low, high), real = said["changes"][0]["prediction_interval"], effect(found, said["advised"])
                within.append(low <= real <= high)
                promised = f" promised {-high:+.0%} to {-low:+.0%}, is {-real:+.0%};"
            print(
                f"{kind}, seed {seed}: {first}; {said['advised']};{promised} planted +{hurts:.0%}: {found.line} on {found.gpu}",
                flush=True,
            )
    named = list(dict.fromkeys([*ANSWERS.values(), *(name for each in counts.values() for name in each)]))
    print("\n| planted | " + " | ".join(named) + " |\n|---" + "|---" * len(named) + "|")
    for kind, each in counts.items():
        print(f"| {kind} | " + " | ".join(str(each[name] or "") for name in named) + " |")
    right = sum(each[ANSWERS[kind]] for kind, each in counts.items() if kind not in HEALTHY)
    of = sum(sum(each.values()) for kind, each in counts.items() if kind not in HEALTHY)
    print(f"\nCause first: {right} of {of}." if of else "")
    print(f"Effect of the advised change within its interval: {sum(within)} of {len(within)}.")


if __name__ == "__main__":
    main()
