"""Two tiers of a prefix cache, by a replay that reads only the prompts: requests one at a time, so that no copy overlaps with another request.

The replay is independent of the simulator's events: an offer of other blocks, or at another moment, changes what it finds.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import NamedTuple

import numpy as np
import pytest

from engine_runs import LONG_MODEL
from fragmeter.sim.config.settings import settings
from fragmeter.sim.engine.run import simulate
from fragmeter.sim.metrics.result import requests_table
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.workload.content import PromptContent
from fragmeter.sim.workload.workload import Workload

_SIZE, _REQUESTS, _USERS = 16, 120, 12
_BLOCK_BYTES = _SIZE * 40 * 2 * 5120 * 2

#: A name of a block: of a user's prefix, or of one request.
Name = tuple[str, int, int]


class Prompt(NamedTuple):
    """Tokens of a prompt, and the names of the blocks that it and the first token of its output fill."""

    tokens: int
    names: list[Name]

    @property
    def full(self) -> list[Name]:
        """Those that the prompt fills."""
        return self.names[: self.tokens // _SIZE]


class Gpu:
    """Blocks of the GPU: the first free one is taken, and freed ones queue up, those without a name in front."""

    def __init__(self, blocks: int) -> None:
        self.free = OrderedDict.fromkeys(range(blocks))
        self.name_of: dict[int, Name] = {}
        self.block_of: dict[Name, int] = {}

    def serve(self, prompt: Prompt, found: int) -> None:
        """Serve a prompt with two tokens of output, of which the first ``found`` blocks are here."""
        table = [self.block_of[name] for name in prompt.names[:found]]
        for block in table:
            del self.free[block]
        while len(table) < -(-(prompt.tokens + 1) // _SIZE):
            block, _ = self.free.popitem(last=False)
            if block in self.name_of:
                del self.block_of[self.name_of.pop(block)]
            table.append(block)
        for block, name in zip(table, prompt.names, strict=False):
            if name not in self.block_of:
                self.block_of[name], self.name_of[block] = block, name
        for block in reversed(table):
            self.free[block] = None
            if block not in self.name_of:
                self.free.move_to_end(block, last=False)


class Host:
    """Blocks on the host with their turn of eviction: (request, - place in the prompt), the smallest first."""

    def __init__(self, blocks: int) -> None:
        self.blocks, self.request, self.stored = blocks, 0, 0
        self.turns: dict[Name, tuple[int, int]] = {}

    def use(self, names: dict[Name, int]) -> None:
        """The request uses blocks that are here."""
        self.turns.update({name: (self.request, -place) for name, place in names.items() if name in self.turns})

    def finish(self, names: dict[Name, int]) -> None:
        """The request has finished."""
        self.use(names)
        self.request += 1

    def offer(self, names: dict[Name, int]) -> None:
        """Store what is not here, in place of the least recently used blocks that the offer does not name."""
        self.use(names)
        for name, place in names.items():
            if name in self.turns:
                continue
            if len(self.turns) == self.blocks:
                del self.turns[min(self.turns.keys() - names, key=self.turns.__getitem__)]
            self.turns[name] = self.request, -place
            self.stored += 1


def replay(prompts: list[Prompt], gpu: Gpu, host: Host, offers_found: bool = False) -> list[tuple[int, int]]:
    """Tokens of each prompt that are found on the GPU, and on the host.

    Args:
        offers_found: Whether a prompt offers the blocks before those that it loads, too.
    """
    hits = []
    for prompt in prompts:
        names, last = prompt.full, (prompt.tokens - 1) // _SIZE
        found = next((place for place in range(last) if names[place] not in gpu.block_of), last)
        end = next((place for place in range(found, len(names)) if names[place] not in host.turns), len(names))
        hits.append((found * _SIZE, (end - found) * _SIZE))
        loads, place_of = end > found, {name: place for place, name in enumerate(names)}
        host.use({name: place_of[name] for name in names[found:end]})
        host.offer({name: place_of[name] for name in names[end if loads and not offers_found else 0 :]})
        gpu.serve(prompt, found)
        host.finish({name: place_of[name] for name in names[found if loads and not offers_found else 0 :]})
    return hits


def _drawn(seed: int) -> tuple[list[Prompt], Workload, int, int]:
    """Prompts of users with prefixes of their own, 20 s apart, and blocks of the GPU and of the host."""
    random = np.random.default_rng(seed)
    users = random.integers(0, _USERS, _REQUESTS)
    prefix = (random.integers(1, 17, _USERS) * _SIZE)[users]
    tokens = prefix + random.integers(1, 50, _REQUESTS)
    content = PromptContent(np.arange(_REQUESTS + 1), users, prefix)
    two = np.full(_REQUESTS, 2)
    arrivals = np.arange(_REQUESTS) * 20 * 10**12
    prompts = [
        Prompt(
            length,
            [
                ("prefix", user, place) if place < shared // _SIZE else ("own", request, place)
                for place in range((length + 1) // _SIZE)
            ],
        )
        for request, (user, shared, length) in enumerate(
            zip(users.tolist(), prefix.tolist(), tokens.tolist(), strict=True)
        )
    ]
    return (
        prompts,
        Workload("serial", arrivals, tokens, two, two, content),
        *random.integers((24, 60), (60, 140)).tolist(),
    )


@pytest.mark.parametrize("seed", range(12))
def test_both_tiers_find_what_a_replay_of_the_prompts_finds(seed):
    prompts, work, gpu_blocks, host_blocks = _drawn(seed)
    host = Host(host_blocks)
    hits = replay(prompts, Gpu(gpu_blocks), host)
    chosen = settings(
        policy="vllm-v1", model=LONG_MODEL, max_model_len=512, num_gpu_blocks_override=gpu_blocks + 1, gpu="a100-80gb",
        kv_offloading_size=host_blocks * _BLOCK_BYTES / (1 << 30),
    )  # fmt: skip
    run = simulate(chosen, work)
    table = requests_table(run)
    loaded = table["offloaded_tokens"].to_numpy()
    assert [on_gpu for on_gpu, _ in hits] == table["cached_tokens"].tolist()
    assert [on_host for _, on_host in hits] == loaded.tolist()
    assert summary(run)["kv_offloading"]["stored_blocks"] == host.stored
    assert loaded.sum() > 0


@pytest.mark.slow
def test_what_a_prompt_offers_matters():
    """A replay in which prompts offer the blocks before a load, too, finds something else in most of the workloads."""
    differ = 0
    for seed in range(12):
        prompts, _, gpu_blocks, host_blocks = _drawn(seed)
        right, wrong = (replay(prompts, Gpu(gpu_blocks), Host(host_blocks), each) for each in (False, True))
        differ += right != wrong
    assert differ >= 6
