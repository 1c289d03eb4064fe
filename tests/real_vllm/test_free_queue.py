"""Policy ``vllm-v1`` with the free queue of older releases beside the installed vLLM with that rule patched in."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tools.live.step_log import first_difference

from . import ours, server
from .workloads import KINDS, Case, number_of_workloads, with_options

#: Workloads of a kind.
_SEEDS = number_of_workloads(12)


def _differing(kind: str, release: str, asynchronous: bool = False, **chosen: bool) -> tuple[list[str], int]:
    """Workloads with a difference from vLLM's rule before 0.23, each with the first one; and the steps of all workloads.

    Args:
        chosen: Only workloads with these values.
    """
    found, steps = [], 0
    for case in map(KINDS[kind], range(_SEEDS)):
        if any(getattr(case, name) != value for name, value in chosen.items()):
            continue
        with server.older_free_queue():
            real = server.serve(_without_exports(case), asynchronous)
        if difference := first_difference(real, ours.serve(_released(case, release), asynchronous)):
            found.append(f"{case.name}: {difference}"[:400])
        steps += len(real.steps)
    return found, steps


def _without_exports(case: Case) -> Case:
    """The case with layers that export no states from within a prefill, as before 0.29."""
    return replace(case, layers=tuple(replace(layer, export_tokens=0) for layer in case.layers))


def _released(case: Case, release: str) -> Case:
    return with_options(case, {"vllm_release": release})


@pytest.mark.parametrize("asynchronous", [False, True], ids=["sync", "async"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_step_is_that_of_the_older_rule(kind: str, asynchronous: bool, record_property):
    differing, steps = _differing(kind, "0.22", asynchronous)
    record_property(f"compared/release 0.22 {'async' if asynchronous else 'sync'}", [_SEEDS, steps, len(differing)])
    assert not differing, "\n".join(differing)


@pytest.mark.parametrize("kind", ["mixed", "tight", "windows"])
def test_0_27_has_the_older_rule_without_prefix_caching(kind: str):
    assert not _differing(kind, "0.27", prefix_caching=False)[0]


@pytest.mark.parametrize("release", ["0.24", "0.33"])
def test_later_releases_are_noticed(release: str):
    assert len(_differing("tight", release)[0]) > 2


def test_a_table_that_is_freed_from_its_first_block_on_is_noticed(monkeypatch):
    """Among blocks without contents only ids tell."""
    monkeypatch.setattr(
        "fragmeter.sim.memory.prefix.LeastRecentlyUsed.free_n",
        lambda queue, blocks, unhashed: queue.append_n(blocks[::-1]),
    )
    assert len(_differing("tight", "0.22", prefix_caching=False)[0]) > 2
