"""Lesson 1: a request reserves room for the longest answer that it may have. How much of the memory holds tokens?

    python examples/teaching/1_reservations.py

Cell by cell in an editor with Jupyter, too. Nothing beyond ``pip install -e .`` in the checkout is needed. ``fragmeter story orca-chunks``
draws the four requests of the first cells, step by step.
"""

# %% Four requests, counted by hand. The model allows 32 tokens, so a request reserves 32 slots: one slot holds one token.
from dataclasses import replace

import fragmeter as fm
from fragmeter.experiments.story.reading import story
from fragmeter.experiments.story.story import run_story
from fragmeter.sim import settings

print("Four requests, counted by hand")
chunks = story("orca-chunks")
LONGEST, POOL = 32, 64
for request in chunks.requests:
    # The last token of an answer is never stored: nothing comes after it.
    stored = len(request.prompt) + len(request.samples[0]) - 1
    print(f"{request.name} reserves {LONGEST} slots and fills at most {stored}: {stored / LONGEST:.0%}")
print(f"a pool of {POOL} slots takes {POOL // LONGEST} of them at a time")

# %% The simulator serves them. "over_estimate" is reserved for tokens that never come, "reserved" for tokens that will.
print("\nThe same in the simulator, step by step")
orca, blocks = run_story(chunks)
for frame in orca.frames:
    waiting = [view.name for view in frame.sequences if view.state == "waiting"]
    print(f"step {frame.label}: {frame.buckets}, waiting: {' '.join(waiting) or '-'}")

# %% Better guesses. orca-pow2 guesses the next power of two of the answer, orca-oracle knows the answer.
print("\nBetter guesses of the longest answer")
policies = ("orca-max", "orca-pow2", "orca-oracle")
pool = {"model": "toy-opt", "block_size": 4, "num_gpu_blocks_override": 16, "max_model_len": 32}
guesses = replace(chunks, runs={policy: settings(policy=policy, **pool) for policy in policies})
for run in run_story(guesses):
    live = [frame.buckets["live"] for frame in run.frames[:-1]]
    print(
        f"{run.name}: {len(live)} steps, {sum(live) / len(live) / POOL:.0%} of the slots hold tokens (mean over steps)"
    )

# %% Two hundred requests with ShareGPT's lengths, OPT-13B on an A100: the same three, and batches that start together.
print("\nTwo hundred requests, OPT-13B on an A100")
runs = [fm.simulate(policy=policy, request_rate=2, num_prompts=200) for policy in ("static", *policies)]
print(fm.waste_bars(*runs))

# %% To think about: the oracle knows every answer, and yet much of its pool holds no token. Which slots are these, and when
# are they filled? Why does a request reserve them so early? Lesson 2 takes them when they are needed.
