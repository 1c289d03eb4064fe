"""Plans to replay: one in which all happens that can, and faults to plant into plans."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from fragmeter.sim import Settings, Workload
from fragmeter.sim.policy.options import FITTED_BEAM_SURVIVAL
from fragmeter.sim.recording.plans import Plan, record
from fragmeter.sim.workload.content import PromptContent


def swapping_plan(**switches) -> Plan:
    """Beams behind a pinned prefix, over a pool that they strain, under vllm-sosp23: groups that are swapped out,
    sequences that are computed again, prefixes that are there already, copies on write, block ids shuffled."""
    return record(*swapping_case(), shuffle_ids=True, **switches)[1]


def swapping_case(beams: bool = True) -> tuple[Settings, Workload]:
    """What ``swapping_plan`` records; without ``beams`` the sequences of a request are samples."""
    settings = Settings(
        policy="vllm-sosp23",
        model="toy-opt",
        block_size=4,
        num_gpu_blocks_override=18,
        max_model_len=64,
        swap_space=0.001,
        shared_prefix_tokens=5,
        watermark=0,
        use_beam_search=beams,
        beam_survival=0.8 if beams else FITTED_BEAM_SURVIVAL,
        seed=3,
    )
    n = np.array([2, 1, 3, 1, 1, 2, 1, 1])
    return settings, _workload([9, 6, 8, 7, 10, 6, 9, 7], [14, 20, 12, 16, 18, 9, 15, 22], n=n)


def caching_plan(**switches) -> Plan:
    """Prompts that begin alike over a pool that they strain, under vllm-v1: prefix hits, preemptions, chunks, ids
    shuffled."""
    return record(*caching_case(), shuffle_ids=True, **switches)[1]


def caching_case() -> tuple[Settings, Workload]:
    """What ``caching_plan`` records."""
    settings = Settings(
        policy="vllm-v1",
        model="toy-opt",
        block_size=4,
        num_gpu_blocks_override=16,
        max_model_len=64,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        cost="roofline",
        options=(("async_scheduling", False),),
    )
    pieces = [(1, 2), (1, 3), (2,), (1, 2), (1, 2), (2,), (1, 3), (1,)]
    tokens = {1: 8, 2: 6, 3: 5}
    ids = [piece for request in pieces for piece in request]
    offsets = np.cumsum([0, *map(len, pieces)])
    content = PromptContent(offsets, np.array(ids), np.array([tokens[piece] for piece in ids]))
    prompts = [sum(tokens[piece] for piece in request) + own for own, request in enumerate(pieces)]
    return settings, _workload(prompts, [12, 20, 9, 16, 14, 5, 18, 11], content=content)


def copying_plan(policy: str = "orca-oracle", **switches) -> Plan:
    """Beams in contiguous pieces, each of which copies what paged memory would share."""
    settings = Settings(
        policy=policy,
        model="toy-opt",
        block_size=4,
        num_gpu_blocks_override=64,
        max_model_len=64,
        use_beam_search=True,
        beam_survival=0.8,
    )
    work = _workload([9, 6, 8, 7, 10, 6], [14, 20, 12, 16, 18, 9], n=np.array([2, 1, 3, 1, 4, 2]))
    return record(settings, work, **switches)[1]


def _workload(prompts: list[int], outputs: list[int], **columns) -> Workload:
    # Some at once, others in the steps after.
    arrivals = np.arange(len(prompts)) // 2 * 10**9
    return Workload("plan", arrivals, np.array(prompts), np.array(outputs), **columns)


def without_move(plan: Plan, kind: str, place: int) -> Plan:
    """The plan without one of its ``swap_out``s, ``swap_in``s or ``copy``s."""
    offsets, moves = getattr(plan, f"{kind}_offsets"), "copies" if kind == "copy" else f"{kind}s"
    fewer = {f"{kind}_offsets": offsets - (offsets > place), moves: np.delete(getattr(plan, moves), place, axis=0)}
    if kind == "copy":
        fewer["copied_slots"] = np.delete(plan.copied_slots, place)
    return replace(plan, **fewer)


def with_swapped_ids(plan: Plan, row: int) -> Plan:
    """The plan with the first two blocks of a row's table the wrong way round."""
    ids, start = plan.block_ids.copy(), int(plan.table_offsets[row])
    ids[[start, start + 1]] = ids[[start + 1, start]]
    return replace(plan, block_ids=ids)


def with_stale_table(plan: Plan, row: int, before: int) -> Plan:
    """The plan with the table of a row as it stood in another row."""
    ids, starts = plan.block_ids.copy(), plan.table_offsets
    old = ids[starts[before] : starts[before + 1]]
    new = slice(int(starts[row]), int(starts[row + 1]))
    ids[new] = np.concatenate([old, ids[new][len(old) :]])[: new.stop - new.start]
    return replace(plan, block_ids=ids)
