"""Lesson 3: several tables name one block. Reference counts say when it is free, copy on write keeps answers apart.

    python examples/teaching/3_sharing.py

Lesson 2 gave every sequence a block table. ``fragmeter story samples`` and ``fragmeter story beams`` draw the first cells.
"""

# %% Two samples of one prompt. Frame 2a is before the copy, 2b after it: which block was copied, and why only one?
import fragmeter as fm
from fragmeter.experiments.story.reading import story
from fragmeter.experiments.story.story import run_story

print("Two samples: block tables and reference counts")
(samples,) = run_story(story("samples"))
for frame in samples.frames:
    tables = ", ".join(f"{view.name} {list(view.table)}" for view in frame.sequences)
    references = {block.number: block.references for block in frame.blocks if block.references}
    print(f"step {frame.label}: {tables or 'no tables'}; references {references}")

# %% The reference count of a block is the number of table entries that name it: an invariant that can be checked anywhere.
print("\nTable entries and blocks in use")
for frame in samples.frames:
    named = [block for view in frame.sequences for block in view.table]
    assert all(named.count(block.number) == block.references for block in frame.blocks)
    # What sharing saves is what is named more than once.
    if named:
        print(f"step {frame.label}: {len(named)} table entries, {len(set(named))} blocks in use")

# %% Beams. A beam that dies releases its table and gets a copy of another: references change, and few tokens are copied.
print("\nBeams that die, and copies")
(beams,) = run_story(story("beams"))
for frame in beams.frames:
    for event in frame.events:
        if "dies" in event or "Copy" in event:
            print(f"step {frame.label}: {event}")

# %% At scale: 20 requests with ShareGPT's lengths, and samples or beams of each.
print("\nTwenty requests, samples and beams")
for n in (2, 6):
    load = {"policy": "vllm-sosp23", "request_rate": 0.3, "num_prompts": 20, "n": n}
    for kind, beam in (("samples", {}), ("beams", {"use_beam_search": True})):
        run = fm.simulate(**load, **beam)
        saved, copied = run.summary["sharing.saved_pct"], run.summary["copied_slots"]
        print(f"{n} {kind}: sharing saves {saved:.1f} % of the blocks, copies {copied:,} slots")

# %% To think about: why do beams share more than samples? Which prompts of a chat server begin alike, and could their blocks
# be kept when a request is done? (`fragmeter story prefix-cache`) And what if the pool is full? Lesson 4.
