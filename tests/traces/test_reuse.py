"""Shared prefixes of a load: drawn requests hit what those of the trace hit, in an infinite cache and in smaller ones."""

from __future__ import annotations

import os
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from fragmeter.sim.memory.prefix import HashChain
from fragmeter.sim.types.errors import TraceError
from fragmeter.sim.workload.content import PromptContent
from fragmeter.traces import Trace, draw, fit, read_load, read_with_content, stats, stream, write, write_load
from tools.prefix_cache import INFINITE, PrefixTrace, hit_tokens

#: Largest error of a hit rate, in points of the prompts' tokens, and of the median distance of two uses of a block.
POINTS, DISTANCE = 1.0, 0.1
REAL = {"mooncake_conversation.jsonl.gz": 512, "ragpulse.jsonl.gz": 512}
POOLS = (300, 1000, 3000, 7721, 15686, 50000)


def block_paths(trace: Trace, block: int) -> PrefixTrace:
    """The full blocks of the prompts, by their tokens: those of the pieces, and after them each its own."""
    chain, content, paths = HashChain(), trace.content, []
    ids, tokens, offsets = content.ids.tolist(), content.tokens.tolist(), content.offsets.tolist()
    for request, (first, end) in enumerate(zip(offsets, offsets[1:])):
        runs = [(ids[at], tokens[at]) for at in range(first, end)]
        runs.append(("own", request))
        names, name, left = [], [], block
        for stream_, length in runs[:-1]:
            start = 0
            while start < length:
                part = min(left, length - start)
                name.append((stream_, start, part))
                start, left = start + part, left - part
                if not left:
                    names.append(tuple(name))
                    name, left = [], block
        full = int(trace.prompt_tokens[request]) // block
        names += [(request, place) for place in range(len(names), full)]
        paths.append(chain.extend(names[:full]))
    return PrefixTrace(paths, chain.parents, [[block] * len(path) for path in paths])


def measured(trace: Trace, block: int, pools=POOLS) -> dict[object, float]:
    """Hits in percent of the prompts' tokens, by blocks of an LRU cache, and the median requests between two uses of a block."""
    blocks, total, last, distances = block_paths(trace, block), int(trace.prompt_tokens.sum()), {}, []
    for request, path in enumerate(blocks.paths):
        distances += [request - last[prefix] for prefix in path if prefix in last]
        last.update(dict.fromkeys(path, request))
    found = {pool: 100 * sum(hit_tokens(blocks, "lru", pool)) / total for pool in pools}
    found[INFINITE] = 100 * sum(hit_tokens(blocks, INFINITE)) / total
    return found | {"distance": float(np.median(distances))}


def is_alike(found: dict[object, float], wanted: dict[object, float], most: float = POINTS) -> bool:
    points = max(abs(found[key] - wanted[key]) for key in wanted if key != "distance")
    # One request more or less is no error.
    return points <= most and abs(found["distance"] - wanted["distance"]) <= max(1, DISTANCE * wanted["distance"])


def in_order(trace: Trace, order: np.ndarray) -> Trace:
    """The requests of a trace in another order."""
    spans = [slice(*trace.content.offsets[row : row + 2]) for row in order]
    columns = (np.concatenate([column[span] for span in spans]) for column in (trace.content.ids, trace.content.tokens))
    offsets = np.cumsum([0, *(span.stop - span.start for span in spans)])
    lengths = trace.prompt_tokens[order], trace.output_tokens[order]
    return Trace(trace.name, *lengths, trace.arrival_ticks, content=PromptContent(offsets, *columns))


def sessions(count: int = 150, turns: int = 4, system: int = 100) -> Trace:
    """Sessions of some turns, a few requests apart, after one system prompt; each turn adds 20 to 60 tokens."""
    rng = stream(0, "test")
    starts = rng.permutation(count * 3)[:count]
    rows = sorted(
        (3 * start + 40 * turn, session, turn) for session, start in enumerate(starts) for turn in range(turns)
    )
    pieces = rng.integers(20, 61, (count, turns))
    offsets = np.cumsum([0, *(turn + 2 for _, _, turn in rows)])
    ids = [
        piece for _, session, turn in rows for piece in (0, *(1 + session * turns + part for part in range(turn + 1)))
    ]
    tokens = [length for _, session, turn in rows for length in (system, *pieces[session, : turn + 1])]
    prompts = np.add.reduceat(tokens, offsets[:-1])
    return Trace("sessions", prompts, np.full(len(rows), 5), content=PromptContent(offsets, ids, tokens))


@cache
def real(name: str) -> Trace:
    return read_with_content(Path(os.environ["FRAGMETER_TRACES"]) / name)


@pytest.mark.slow
def test_made_sessions_are_alike_and_wrong_trees_are_not():
    # In a pool of 150 blocks lies the step from no session to all of them: a request more or less there is a point.
    trace, pools, points = sessions(400), (20, 60, 150, 400), 2.0
    wanted, load = measured(trace, 16, pools), fit(trace)
    for seed in range(3):
        assert is_alike(measured(draw(load, seed=seed), 16, pools), wanted, points)
    lag = replace(load.reuse.session_distance, quantiles=(500.0,) * 68, stratum_means=(500.0,) * 67)
    far = replace(load, reuse=replace(load.reuse, session_distance=lag))
    assert not is_alike(measured(draw(far), 16, pools), wanted, points)


@pytest.mark.slow
@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
@pytest.mark.parametrize("name", REAL)
def test_real_traces(name):
    trace = real(name)
    wanted, load = measured(trace, REAL[name]), fit(trace)
    for seed in range(3):
        drawn = draw(load, seed=seed)
        assert is_alike(measured(drawn, REAL[name]), wanted)
        assert stats(drawn)["reuse"]["share"] == pytest.approx(stats(trace)["reuse"]["share"], abs=POINTS / 100)


@pytest.mark.slow
@pytest.mark.skipif("FRAGMETER_TRACES" not in os.environ, reason="FRAGMETER_TRACES names no folder")
def test_a_constant_or_shuffled_tree_is_not_mooncakes():
    trace = real("mooncake_conversation.jsonl.gz")
    wanted, drawn = measured(trace, 512), draw(fit(trace))
    assert not is_alike(measured(in_order(trace, stream(0, "test").permutation(len(trace))), 512), wanted)
    assert not is_alike(measured(in_order(drawn, stream(0, "test").permutation(len(drawn))), 512), wanted)
    ones = np.ones(len(trace), dtype=np.int64)
    constant = PromptContent(np.arange(len(trace) + 1), ones, np.minimum(512, trace.prompt_tokens))
    assert not is_alike(measured(replace(trace, content=constant), 512), wanted)


def test_a_short_draw_begins_cold():
    """As the first requests of the trace: later ones continue what is before them."""
    trace = sessions()
    short = draw(fit(trace), 60)
    assert stats(short)["reuse"]["share"] < stats(draw(fit(trace)))["reuse"]["share"] - 0.05
    assert stats(short)["reuse"]["share"] == pytest.approx(stats(trace.first(60))["reuse"]["share"], abs=0.1)


def test_a_session_belongs_together():
    """A request that continues another begins with its pieces, and has its session."""
    drawn = draw(fit(sessions()))
    sessions_, offsets, ids = drawn.content.session_id, drawn.content.offsets, drawn.content.ids
    assert 100 < len(set(sessions_.tolist())) < 300
    longer = 0
    for session in set(sessions_.tolist()):
        first, *rest = np.flatnonzero(sessions_ == session).tolist()
        for row in rest:
            mine = set(ids[offsets[row] : offsets[row + 1]].tolist())
            longer += len(mine & set(ids[offsets[first] : offsets[first + 1]].tolist())) > 1
    assert longer > 200


def test_answers_are_continued_where_the_trace_has_sessions(tmp_path):
    """Sessions by their ids begin with all prompts and answers before; so do the drawn ones, also from a file."""
    turns = np.array([[80, 30], [200, 30], [350, 30]])
    rows = [(session + 7 * turn, session, *turns[turn]) for session in range(500) for turn in range(3)]
    _, ids, prompts, outputs = map(np.array, zip(*sorted(rows), strict=True))
    trace = Trace("chats", prompts, outputs, content=PromptContent.of_sessions(ids))
    drawn = draw(fit(trace))
    assert not len(drawn.content.ids)
    assert stats(drawn)["reuse"]["share"] == pytest.approx(stats(trace)["reuse"]["share"], abs=0.05)
    write(drawn, tmp_path / "drawn.jsonl")
    assert (
        stats(read_with_content(tmp_path / "drawn.jsonl"))["reuse"]["prompt_tokens"]
        == stats(drawn)["reuse"]["prompt_tokens"]
    )


def test_unknown_contents_stay_unknown(tmp_path):
    trace = sessions()
    assert fit(replace(trace, content=None)).reuse is None
    assert draw(fit(replace(trace, content=None))).content is None
    alone = PromptContent.unknown(len(trace))
    assert fit(replace(trace, content=alone)).reuse is None


def test_the_same_seed_draws_the_same_tree(tmp_path):
    load = fit(sessions())
    write_load(load, tmp_path / "load.json")
    assert read_load(tmp_path / "load.json") == load
    assert (tmp_path / "load.json").stat().st_size < 12_000
    one, two, other = (draw(load, 50, seed).content for seed in (0, 0, 1))
    assert [getattr(one, field).tolist() for field in one.columns()] == [
        getattr(two, field).tolist() for field in two.columns()
    ]
    assert one.tokens.tolist() != other.tokens.tolist()


def test_a_grid_that_cannot_be(tmp_path):
    path = tmp_path / "load.json"
    write_load(fit(sessions()), path)
    path.write_text(path.read_text().replace('"grid": [[', '"grid": [[1, '))
    with pytest.raises(TraceError, match="load.json: reuse.* = .*fit the load again"):
        read_load(path)
