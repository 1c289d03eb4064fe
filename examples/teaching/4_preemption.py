"""Lesson 4: the pool is full. A policy decides which request gives way, and how it comes back.

    python examples/teaching/4_preemption.py

Lessons 2 and 3 took blocks on demand: nothing ensures that there will be one. ``fragmeter story swap`` draws a swap.
"""

# %% The two requests of lesson 2 in a pool of six blocks, not seven: both are admitted, and then both want to grow.
from dataclasses import replace

import pandas as pd

import fragmeter as fm
from fragmeter.experiments.story.reading import story
from fragmeter.experiments.story.story import run_story
from fragmeter.sim import settings

print("Two requests in a pool of six blocks")
two = story("two-requests")
pool = {"model": "toy-opt", "block_size": 4, "num_gpu_blocks_override": 6, "max_model_len": 32}
ways = {
    "recompute": settings(policy="vllm-sosp23", **pool),
    "swap": settings(policy="vllm-sosp23", preemption_mode="swap", **pool),
    "never preempt": settings(policy="trtllm-no-evict", **pool),
}
for run in run_story(replace(two, runs=ways)):
    computed = sum(cell.is_new for frame in run.frames for block in frame.blocks for cell in block.cells)
    print(f"{run.name}: {len(run.frames) - 1} steps, {computed} tokens computed")
    for frame in run.frames:
        for event in frame.events:
            if "preempted" in event or "swapped" in event or "waits" in event or "again" in event:
                print(f"  step {frame.label}: {event}")

# %% The same choice under load: 150 requests on 300 blocks, OPT-13B on an A100. Their clients declare no longest answer, so
# a scheduler that never preempts has to expect the longest that the model allows.
print("\n150 requests on 300 blocks")
load = {"num_gpu_blocks_override": 300, "request_rate": 1, "num_prompts": 150}
runs = {
    "recompute": fm.simulate(policy="vllm-sosp23", **load),
    "swap": fm.simulate(policy="vllm-sosp23", preemption_mode="swap", **load),
    "never preempt": fm.simulate(policy="trtllm-no-evict", **load),
    "reserve the longest": fm.simulate(policy="orca-max", **load),
}
columns = {
    "preemptions.recompute": "recomputed",
    "preemptions.swap": "swapped",
    "work.tokens.recomputed": "tokens computed again",
    "mean_batch": "batch",
    "p99_ttft_ms": "p99 TTFT, ms",
    "p99_itl_ms": "p99 ITL, ms",
    "output_throughput": "output tokens/s",
}
table = pd.DataFrame([run.summary.reindex(columns) for run in runs.values()], index=list(runs)).rename(columns=columns)
print(table.astype(float).round(1).T.to_string())

# %% What the pool was used for.
print("\nContents of the pool")
print(fm.waste_bars(*runs.values(), labels=list(runs)))

# %% To think about: a preemption costs work, and a reservation costs room. Which of the two does each row pay, and for which
# requests? When is a swap cheaper than to compute again? Then write the allocator yourself: examples/teaching/exercise.
