"""Drawn settings of CUDA graphs, and the graphs that fragmeter captures; needs no vLLM."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

from fragmeter.sim.spec.startup.cuda_graphs import MODES, Captures, GraphBatch, GraphSettings, Support, captures
from fragmeter.sim.types.errors import SettingError

#: The release that is recorded.
MINOR = 33
SEEDS = 240


class Drawn(NamedTuple):
    """Settings of one server."""

    settings: GraphSettings
    batch: GraphBatch


def drawn(seed: int) -> Drawn:
    """The settings of a seed. Modes and sizes of the line are drawn for half of them each."""
    chance = random.Random(f"graphs/{seed}")
    tokens = chance.choice([64, 100, 256, 500, 1024, 2048, 8192, 16384])
    seqs = min(tokens, chance.choice([1, 2, 3, 8, 17, 32, 100, 129, 256, 300, 512, 1024]))
    sizes = tuple(sorted(chance.sample(range(1, 2 * tokens), chance.randint(1, 6)))) if chance.random() < 0.25 else None
    largest = (
        chance.choice([1, 3, 8, 100, 255, 256, 300, 512, 1024]) if sizes is None and chance.random() < 0.3 else None
    )
    settings = GraphSettings(
        mode=chance.choice([None, None, None, *MODES]),
        level=chance.choice([None, None, None, 0, 1, 2, 3]),
        compiled=chance.choice([None, None, None, True, False]),
        sizes=sizes,
        largest=largest,
        interactive=chance.random() < 0.2,
        enforce_eager=chance.random() < 0.1,
    )
    batch = GraphBatch(
        max_num_seqs=seqs,
        max_num_batched_tokens=tokens,
        minor=MINOR,
        query_tokens=chance.choice([1, 1, 1, 2, 4, 6]),
        second_runner=chance.random() < 0.6,
        support=chance.choice([Support.DECODES, Support.DECODES, Support.ALL, Support.SINGLE_TOKENS]),
        data_center_blackwell=chance.random() < 0.3,
    )
    return Drawn(settings, batch)


def ours(case: Drawn) -> list[Any]:
    """Mode, sizes between attention and sizes of whole steps; an empty list where they are refused."""
    try:
        found = captures(*case)
    except SettingError:
        return []
    return written(found)


def written(found: Captures) -> list[Any]:
    """The graphs as JSON has them."""
    return [found.mode, list(found.piecewise), list(found.full)]
