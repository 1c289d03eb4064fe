"""CPU seconds of a whole process beside those of the mocker of NVIDIA Dynamo, a simulator in Rust, in turns.

    python benchmarks/peer_speed.py --python DYNAMO/bin/python          60,000 requests, three turns
    python benchmarks/peer_speed.py --python DYNAMO/bin/python --count 400000 --turns 1

DYNAMO is an environment with ``ai-dynamo-runtime==1.2.1``, which has the mocker's offline replay as a function; AISimulate
is that replay with tables of step times. Both simulate vLLM's scheduler with prefix caching, asynchronous scheduling aside,
over one replica of 8,000 blocks of 16 tokens, 256 sequences and 8,192 tokens a step; no two prompts share a block. Each reads
the requests from the file that it reads faster. Step times differ, so the two need not take the same number of steps.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median

import numpy as np

BLOCKS, SEQUENCES, STEP_TOKENS = 8000, 256, 8192
#: Requests a second; prompts of 370 and outputs of 215 tokens in the mean.
RATE = 8.0
#: Tokens of a block in Dynamo's trace.
TRACE_BLOCK = 512
PEER = """
import json, sys
from dynamo._core import MockEngineArgs, run_mocker_trace_replay

path, arguments, block = sys.argv[1:]
found = run_mocker_trace_replay(path, extra_engine_args=MockEngineArgs.from_json(arguments), trace_block_size=int(block))
assert found["completed_requests"] == found["num_requests"]
"""


def write_requests(folder: Path, count: int) -> tuple[Path, Path]:
    """The same requests as a CSV file, and as Dynamo's trace."""
    draw = np.random.default_rng(0)
    arrivals_ms = (np.cumsum(draw.exponential(1 / RATE, count)) * 1000).astype(int)
    prompts = np.clip(draw.lognormal(5.5, 1.0, count), 4, 1500).astype(int)
    outputs = np.clip(draw.lognormal(5.0, 0.9, count), 4, 1000).astype(int)
    blocks = -(-prompts // TRACE_BLOCK)
    csv, trace = folder / "requests.csv", folder / "requests.jsonl"
    rows = list(zip(arrivals_ms.tolist(), prompts.tolist(), outputs.tolist(), strict=True))
    lines = [f"{arrival / 1000},{prompt},{output}\n" for arrival, prompt, output in rows]
    csv.write_text("arrived_at,num_prefill_tokens,num_decode_tokens\n" + "".join(lines))
    with trace.open("w") as file:
        for (arrival, prompt, output), stop, number in zip(
            rows, np.cumsum(blocks).tolist(), blocks.tolist(), strict=True
        ):
            row = {"timestamp": arrival, "input_length": prompt, "output_length": output}
            file.write(json.dumps(row | {"hash_ids": list(range(stop - number, stop))}) + "\n")
    return csv, trace


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a process, and of those that it waited for."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime


def main() -> None:
    """The program."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--python", required=True, help="the Python of an environment with ai-dynamo-runtime 1.2.1")
    parser.add_argument("--count", type=int, default=60_000)
    parser.add_argument("--turns", type=int, default=3)
    options = parser.parse_args()
    engine = {"num_gpu_blocks": BLOCKS, "block_size": 16, "max_num_seqs": SEQUENCES}
    arguments = json.dumps(engine | {"max_num_batched_tokens": STEP_TOKENS, "enable_prefix_caching": True})
    with tempfile.TemporaryDirectory() as folder:
        csv, trace = write_requests(Path(folder), options.count)
        # fmt: off
        ours = [
            sys.executable, "-m", "fragmeter", "simulate", "--trace", str(csv), "--policy", "vllm-v1", "--model", "llama-3.1-8b",
            "--gpu", "h100-80gb", "--num-gpu-blocks-override", str(BLOCKS), "--max-num-seqs", str(SEQUENCES),
            "--max-num-batched-tokens", str(STEP_TOKENS), "--json", f"{folder}/found.json",
        ]
        # fmt: on
        theirs = [options.python, "-c", PEER, str(trace), arguments, str(TRACE_BLOCK)]
        sides = {"dynamo": theirs, "fragmeter": ours, "fragmeter --no-core": [*ours, "--no-core"]}
        turns = [{name: cpu_seconds(command) for name, command in sides.items()} for _ in range(options.turns)]
    for name in sides:
        ratios = [turn["dynamo"] / turn[name] for turn in turns]
        seconds = median(turn[name] for turn in turns)
        print(f"{name:<20}{seconds:8.2f} s {median(ratios):6.1f} times ({min(ratios):.1f} to {max(ratios):.1f})")


if __name__ == "__main__":
    main()
