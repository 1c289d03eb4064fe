"""The engine against formulas: a lone request, lockstep batches, a queue with a known mean wait, the paper's Fig 3."""

from __future__ import annotations

from math import ceil, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine_runs import buckets_at_rows, serve, times_of
from fragmeter.sim.memory import BUCKETS
from oracle import POLICIES, Limits, Pool, Request
from ramp_cost import RampCost
from strategies import Case, LineCost

PAGED = "vllm-sosp23"
CHUNKED = ("orca-max", "orca-pow2", "orca-oracle")


def requested_tokens(policy: str, prompt: int, output: int, declared: int, model: int) -> int:
    """R of a lone request."""
    expected = {"orca-max": model, "orca-pow2": 1 << (output - 1).bit_length(), "orca-oracle": output}
    return min(prompt + expected.get(policy, declared), model)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("leap", [True, False])
@settings(max_examples=25)
@given(prompt=st.integers(1, 60), output=st.integers(1, 60), spare=st.integers(0, 9), size=st.integers(1, 20))
def test_a_lone_request_takes_what_the_formulas_say(policy, leap, prompt, output, spare, size):
    """Arrives at tick 500; f ticks of prefill, then d ticks for each of its other tokens."""
    model, declared = 128, output + spare
    pool = Pool(ceil(256 / size), size)
    cost = LineCost()
    case = Case([Request(500, prompt, output, declared)], pool, Limits(model, max_num_seqs=4), cost)
    run = serve(policy, case, leap=leap)
    f, d, more = cost.step_ticks(0, 0, prompt, 0), cost.step_ticks(1, 0, 0, 0), output - 1
    busy = f + more * d
    assert times_of(run) == {0: (500, 500 + f, 500 + busy, 0, 0)}
    assert run.log.end_ticks == 500 + busy
    slots = dict.fromkeys(BUCKETS, 0)
    slots["live"] = prompt * busy + d * (more * (more + 1) // 2)
    final, requested = prompt + output, requested_tokens(policy, prompt, output, declared, model)
    if policy == PAGED:
        # The last block is entered with token `entry`, in step `entry - prompt`, or with the prompt.
        entry = (final - 1) // size * size + 1
        since = max(entry - prompt, 0)
        tail = -final % size * ((output - since) * d + (0 if since else f - d)) if since < output else 0
        held = sum(size * ceil((prompt + k) / size) * (f if k == 0 else d) for k in range(output))
        slots["block_tail"], slots["reserved"] = tail, held - tail - slots["live"]
    else:
        held = requested
        if policy in CHUNKED:
            held = size * (1 << (ceil(requested / size) - 1).bit_length())
        slots["reserved"] = final * busy - slots["live"]
        slots["over_estimate"] = (requested - final) * busy
        slots["round_up"] = (held - requested) * busy
    slots["free"] = pool.slots * (500 + busy) - sum(slots.values())
    assert run.accounts.window().slot_ticks == slots


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["static", "fastertransformer"])
@settings(max_examples=40)
@given(n=st.integers(1, 12), batch=st.integers(1, 5), prompt=st.integers(1, 30), output=st.integers(1, 30))
def test_equal_lengths_waste_nothing_in_static_batches(policy, n, batch, prompt, output):
    """Without padding and without waits for another's end: every slot asked for is filled at last."""
    requests = [Request(0, prompt, output, output)] * n
    pool = Pool(batch * (prompt + output), 1)
    cost = LineCost()
    run = serve(policy, Case(requests, pool, Limits(64, max_num_seqs=batch), cost))
    window = run.accounts.window()
    for bucket in ("finished_hold", "over_estimate", "round_up", "block_tail", "stranded"):
        assert window.slot_ticks[bucket] == 0
    # Batch after batch, the last one perhaps smaller.
    sizes = [batch] * (n // batch) + [n % batch] * (n % batch > 0)
    ends, now = [], 0
    for size in sizes:
        now += cost.step_ticks(0, 0, size * prompt, 0) + (output - 1) * cost.step_ticks(size, 0, 0, 0)
        ends += [now] * size
    assert [finish for _, _, finish, *_ in times_of(run).values()] == ends
    assert window.slot_steps["live"] == n * (output * prompt + output * (output - 1) // 2)


def test_unequal_lengths_do_waste_in_static_batches():
    """Two tokens and ten: the shorter one holds its twelve slots for eight steps more, and its padding before."""
    requests = [Request(0, 2, 2, 2), Request(0, 2, 10, 10)]
    run = serve("static", Case(requests, Pool(24, 1), Limits(64, max_num_seqs=2), LineCost()))
    assert run.accounts.window().slot_steps["finished_hold"] == 8 * 12


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["orca", "vllm-sosp23"])
def test_one_server_with_equal_services_is_the_queue_m_d_1(policy):
    """Lindley's recursion request by request, and the mean wait rho / (2 * (1 - rho)) services of Pollaczek and
    Khinchine."""
    n, service, load = 20_000, 100_000, 0.6
    gaps = np.random.default_rng(1).exponential(service / load, size=n)
    arrivals = np.round(np.cumsum(gaps)).astype(int).tolist()
    requests = [Request(arrival, 5, 1, 1) for arrival in arrivals]
    run = serve(policy, Case(requests, Pool(20, 4), Limits(10, max_num_seqs=1), RampCost(base_ticks=service)))
    starts = [start for start, *_ in times_of(run).values()]
    expected, free_at = [], 0
    for arrival in arrivals:
        expected.append(max(arrival, free_at))
        free_at = expected[-1] + service
    assert starts == expected
    waits = (np.array(starts) - arrivals) / service
    mean = load / (2 * (1 - load))
    # Means of blocks of 500 are nearly independent; six of their standard errors.
    blocks = waits.reshape(-1, 500).mean(axis=1)
    bound = 6 * blocks.std(ddof=1) / sqrt(len(blocks))
    assert abs(waits.mean() - mean) < bound < 0.25 * mean
    assert run.accounts.window().slot_ticks["live"] == n * 5 * service


@pytest.mark.parametrize("policy", ["orca", "orca-max"])
@pytest.mark.parametrize(
    ("prompt", "output", "reserved_for", "expected"),
    [(7, 3, 2048, (8, 2, 2038)), (3, 2, 512, (4, 1, 507))],
)
def test_the_papers_worked_example(policy, prompt, output, reserved_for, expected):
    """SOSP'23, Fig 3: in the step that computes token c, with F in all and R reserved: c live, F - c reserved for what
    comes, R - F for what never does. c, F, R = 8, 10, 2048 and 4, 5, 512."""
    declared = reserved_for - prompt if policy == "orca" else None
    limits = Limits(2048 if policy == "orca" else reserved_for)
    case = Case([Request(0, prompt, output, declared)], Pool(reserved_for // 16, 16), limits, LineCost())
    second = buckets_at_rows(serve(policy, case, leap=False))[1]
    assert (second["live"], second["reserved"], second["over_estimate"]) == expected
    assert sum(expected) == sum(second.values())


def test_the_papers_worked_example_in_one_pool():
    """Both requests of Fig 3 side by side fill 2048 + 512 slots."""
    requests = [Request(0, 7, 3, 2041), Request(0, 3, 2, 509)]
    run = serve("orca", Case(requests, Pool(160, 16), Limits(2048), LineCost()), leap=False)
    second = buckets_at_rows(run)[1]
    assert {name: slots for name, slots in second.items() if slots} == {
        "live": 12, "reserved": 3, "over_estimate": 2545,
    }  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(
    ("requests", "output", "context_ticks"),
    [
        (100, 1_000, 500_000),
        (100, 8_000, 500_000),
        (1, 120_000, 50_000),
        (8, 120_000, 500_000),
        (1, 1_000_000, 100_000),
    ],
)
def test_integrals_of_long_leaps_are_exact(requests, output, context_ticks):
    """Equal sequences in lockstep, in as few leaps as can be: the sums far beyond 64 bits have closed forms.

    With T(k) the ticks of step k and s its slots, base B and slope m: sums of s(k) * T(k) over k.
    """
    prompt, size, base = 16, 16, 10_000_000_000
    cost = RampCost(context_ticks=context_ticks, base_ticks=base)
    pool = Pool(requests * ceil((prompt + output) / size) + requests, size)
    limits = Limits(1 << 22, max_num_batched_tokens=1 << 22, watermark_fraction=0.0)
    run = serve(PAGED, Case([Request(0, prompt, output)] * requests, pool, limits, cost))
    assert len(run.log.rows["steps"]) == ceil(output / 65_536)
    steps = np.arange(1, output, dtype=object)
    ticks = base + context_ticks * requests * (prompt + steps)
    live = requests * prompt * base + sum(requests * (prompt + steps) * ticks)
    held = requests * prompt * base + sum(requests * size * -(-(prompt + steps) // size) * ticks)
    slots = run.accounts.window().slot_ticks
    assert run.log.end_ticks == base + sum(ticks)
    assert slots["live"] == live
    assert slots["live"] + slots["reserved"] + slots["block_tail"] == held
    assert slots["free"] == pool.slots * run.log.end_ticks - held
