"""Lesson 2: memory in blocks, taken when tokens need them, and a table that says where they are.

    python examples/teaching/2_blocks.py

Lesson 1 ended with slots that are reserved long before a token comes. ``fragmeter story two-requests`` draws the first cells.
"""

# %% Two requests in one pool. A request knows its logical blocks 0, 1, 2; the table says which physical blocks they are.
from dataclasses import replace

import fragmeter as fm
from fragmeter.experiments.story.reading import story
from fragmeter.experiments.story.story import run_story

print("Block tables, step by step")
two = story("two-requests")
(run,) = run_story(two)
for frame in run.frames:
    print(
        f"step {frame.label}: {', '.join(f'{view.name} {list(view.table)}' for view in frame.sequences) or 'no tables'}"
    )

# %% From a position to a slot: what an attention kernel computes for every token that it reads.
print("\nTokens read through the tables")
SIZE = 4


def slot(table: tuple[int, ...], position: int) -> int:
    """Where the token at a position of a sequence is."""
    return table[position // SIZE] * SIZE + position % SIZE


frame = run.frames[4]
memory = [cell.word for block in frame.blocks for cell in block.cells]
for view in frame.sequences:
    read = [memory[slot(view.table, position)] for position in range(view.stored)]
    print(f"{view.name} through its table: {' '.join(read)}")
    assert read == list(view.words[: view.stored])

# %% What is lost now: only slots of the last block, so fewer than a block a request, and nothing between requests.
print("\nEmpty slots by block size")
for size, blocks in ((1, 28), (2, 14), (4, 7), (8, 4)):
    sized = {
        name: replace(chosen, block_size=size, num_gpu_blocks_override=blocks) for name, chosen in two.runs.items()
    }
    (run,) = run_story(replace(two, runs=sized))
    most = max(len(view.cells) - view.stored for frame in run.frames for view in frame.sequences if view.cells)
    print(f"blocks of {size}: at most {most} empty slots a request, {len(run.frames) - 1} steps")

# %% The load of lesson 1. vllm-sosp23 takes blocks on demand; the oracle of lesson 1 is the best that reservations can do.
print("\nThe load of lesson 1")
runs = {"reserved, answers known": fm.simulate(policy="orca-oracle", request_rate=2, num_prompts=200)}
for size in (16, 128, 512):
    runs[f"blocks of {size}"] = fm.simulate(policy="vllm-sosp23", block_size=size, request_rate=2, num_prompts=200)
print(fm.waste_bars(*runs.values(), labels=list(runs)))

# %% More requests fit, so more run together, and the answers come sooner.
print("\nBatches and waiting times")
for name, run in runs.items():
    print(f"{name}: {run.summary['mean_batch']:.1f} requests in a step, p99 TTFT {run.summary['p99_ttft_ms']:,.0f} ms")

# %% To think about: blocks of one slot lose nothing. What do they cost? (How long is a table, how does a kernel read memory?)
# And two requests with the same prompt: must both have blocks of their own? Lesson 3 lets tables name the same block.
