"""The oracle's schedulers beside the engine: costs, cases, and checks of every step and slot."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import strategies as st

from engine_runs import buckets_at_rows, serve, times_of
from fragmeter.sim.metrics.gaps import Gaps
from fragmeter.sim.metrics.summary import summary
from fragmeter.sim.policy import POLICIES
from fragmeter.sim.runs.run import Run
from oracle import Outcome, Pool, simulate
from oracle.story import swap_in_ticks, swap_out_ticks
from strategies import Case, LineCost, crowded_cases, small_cases

#: Policies of the oracle that are options of one.
OPTIONS: dict[str, tuple[str, dict[str, bool]]] = {
    f"llama-cpp{'-unified' * unified}{'-caching' * caching}": (
        "llama-cpp",
        {"kv_unified": unified, "enable_prefix_caching": caching},
    )
    for unified in (False, True)
    for caching in (False, True)
}
cases = st.one_of(small_cases(), crowded_cases())


def fitted(policy: str, case: Case) -> Case:
    """The case, made one that the policy takes: vLLM V1 and Sarathi refuse a budget below
    ``max_num_seqs``, and the oracles of LightLLM and SGLang know only blocks of one."""
    limits, pool = case.limits, case.pool
    if policy in ("vllm-v1", "sarathi", "fastgen"):
        tokens = max(limits.max_num_batched_tokens, limits.max_num_seqs or POLICIES[policy].default_max_num_seqs)
        limits = replace(limits, max_num_batched_tokens=tokens)
    if policy in ("lightllm", "sglang"):
        pool = Pool(pool.slots, 1, pool.host_blocks)
    return replace(case, limits=limits, pool=pool)


def expected(policy: str, case: Case) -> Outcome:
    cost = case.cost
    return simulate(
        policy, case.requests, case.pool, case.limits, cost.step_ticks, cost.swap_out_ticks, cost.swap_in_ticks
    )


def log_of(run) -> list[tuple]:
    """When every step starts, how long it takes and where every slot stands in it."""
    rows = run.log.rows
    return [*zip(rows["start_ticks"].tolist(), rows["ticks"].tolist(), buckets_at_rows(run))]


def served(policy: str, case: Case, **switches: bool) -> Run:
    """The engine's run of a case, under the policy and its options that the oracle has by one name."""
    name, options = OPTIONS.get(policy, (policy, {}))
    return serve(name, case, **options, **switches)


def check(policy: str, case: Case) -> None:
    """Stepping gives the oracle's log; stepping and leaping give its times, gaps and tokens."""
    case = fitted(policy, case)
    outcome = expected(policy, case)
    stepped, leapt = served(policy, case, leap=False), served(policy, case, leap=True, ids=policy != "lightllm")
    assert log_of(stepped) == [(step.start_ticks, step.ticks, step.buckets) for step in outcome.steps]
    for run in (stepped, leapt):
        same_requests(run, outcome)
        assert pooled(Gaps.of(run.log)) == sorted(
            later - sooner
            for request in outcome.requests
            for sooner, later in zip(request["token_ticks"], request["token_ticks"][1:])
        )
        tokens = summary(run)["work"]["tokens"]
        assert tokens["useful"] == sum(
            request.prompt_tokens + request.output_tokens - 1
            for request, result in zip(case.requests, outcome.requests)
            if result["refused"] is None
        )
        computed = sum(len(step.decodes) + sum(tokens for _, tokens in step.prefilled) for step in outcome.steps)
        assert sum(tokens.values()) == computed


def same_requests(run, outcome: Outcome) -> None:
    assert run.refused.tolist() == [request["refused"] is not None for request in outcome.requests]
    names = ("first_scheduled_ticks", "first_token_ticks", "finish_ticks", "preemptions")
    assert {i: (*times[:3], times[3] + times[4]) for i, times in times_of(run).items()} == {
        i: tuple(request[name] for name in names)
        for i, request in enumerate(outcome.requests)
        if request["refused"] is None
    }


def pooled(gaps: Gaps) -> list[int]:
    """Every gap, written out."""
    columns = (gaps.first, gaps.slope, gaps.count, gaps.weight)
    return sorted(
        first + slope * place
        for first, slope, count, weight in zip(*(column.tolist() for column in columns))
        for place in range(count)
        for _ in range(weight)
    )


class StoryCost(LineCost):
    """What a step costs in the oracle's hand-worked stories."""

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        return 100 + 10 * decodes + prefill_tokens

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 100 + 10 * decodes, 0, None

    def swap_out_ticks(self, blocks: int) -> int:
        return swap_out_ticks(blocks)

    def swap_in_ticks(self, blocks: int) -> int:
        return swap_in_ticks(blocks)
