"""What must hold of every log of the oracle's schedulers, from the requests and the log alone."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from oracle import SCHEDULERS, Limits, Outcome, Pool, Request, Step, simulate
from oracle.story import Cost, random_case, swap_in_ticks, swap_out_ticks

PREFILLS_ALONE = ("vllm-v0", "tgi")
PREFILLS_BESIDE = ("trtllm-no-evict", "trtllm-max-util", "lightllm")
ONE_BUDGET = ("vllm-v1", "sarathi", "fastgen")
NEVER_PREEMPT = ("tgi", "trtllm-no-evict", "lightllm", "llama-cpp", "llama-cpp-unified")
#: Policies under which a preempted sequence computes all again: not so SGLang, where it may find tokens in the tree.
FORGETFUL = [policy for policy in SCHEDULERS if policy != "sglang"]


class Walk:
    """Follows a log: what each has computed, generated and may do next."""

    def __init__(self, policy: str, requests: list[Request], pool: Pool, limits: Limits) -> None:
        self.policy, self.requests, self.pool, self.limits = policy, requests, pool, limits
        self.computed = [0] * len(requests)
        self.generated = [0] * len(requests)
        self.in_prefill: set[int] = set()
        self.outcome = simulate(policy, requests, pool, limits, Cost(), swap_out_ticks, swap_in_ticks)
        self.refused = {i for i, request in enumerate(self.outcome.requests) if request["refused"]}

    def all(self) -> Outcome:
        """The whole log; time never runs back, slots add up, and every request ends with all its tokens."""
        now, blocks = 0, self.pool.num_blocks - (self.policy == "vllm-v1")
        for step in self.outcome.steps:
            assert step.start_ticks >= now
            now = step.start_ticks + step.ticks
            assert sum(step.buckets.values()) == blocks * self.pool.block_size
            self.step(step)
        for i, (request, done) in enumerate(zip(self.requests, self.outcome.requests)):
            assert len(done["token_ticks"]) == self.generated[i] == (0 if i in self.refused else request.output_tokens)
            assert (done["finish_ticks"] is None) == (i in self.refused)
        served = [i for i in self.arrival_order() if i not in self.refused]
        started = [self.outcome.requests[i]["first_scheduled_ticks"] for i in served]
        # llama-cpp computes prompts in the order of their slots.
        assert self.policy.startswith("llama-cpp") or started == sorted(started)
        return self.outcome

    def step(self, step: Step) -> None:
        """The computing sequences, their tokens, and what that yields, against the outcome's token times."""
        for i in set(step.preempted) - set(step.swapped_out):
            self.computed[i] = 0
            self.in_prefill.discard(i)
        tokens = dict(step.prefilled) | dict.fromkeys(step.decodes, 1)
        on_device = {*tokens, *step.paused}
        assert len(on_device) == len(step.prefilled) + len(step.decodes) + len(step.paused)
        assert sorted(step.running) == (sorted(on_device) if tokens else [])
        assert not on_device & set(step.preempted)
        self.in_prefill |= {i for i, _ in step.prefilled}
        assert not self.in_prefill & set(step.decodes)
        for i, n in tokens.items():
            self.computed[i] += n
        assert step.buckets["live"] == sum(self.computed[i] for i in on_device)
        self.check_rules(step, sum(tokens.values()))
        for i in tokens:
            self.yields(i, step.start_ticks + step.ticks)

    def yields(self, i: int, now: int) -> None:
        """A token, once all that is known is computed; never more than that."""
        assert self.computed[i] <= self.known(i)
        if self.computed[i] == self.known(i):
            assert self.outcome.requests[i]["token_ticks"][self.generated[i]] == now
            self.generated[i] += 1
            self.in_prefill.discard(i)

    def check_rules(self, step: Step, tokens: int) -> None:
        most = self.limits.max_num_batched_tokens
        if self.policy in PREFILLS_ALONE + PREFILLS_BESIDE:
            assert all(self.known(i) == n for i, n in step.prefilled)
        if self.policy in PREFILLS_ALONE and step.prefilled:
            assert not step.decodes and (tokens <= most or len(step.prefilled) == 1)
        if self.policy in PREFILLS_BESIDE:
            assert tokens <= most or len(step.running) == 1
        if self.policy in NEVER_PREEMPT:
            assert not step.preempted
        if self.policy in ONE_BUDGET:
            assert tokens <= most
            if tokens < most and step.running and not step.preempted:
                self.check_no_request_could_fill_the_budget(step)

    def check_no_request_could_fill_the_budget(self, step: Step) -> None:
        """No prefill could go on, and the head of the queue could not be admitted."""
        free_blocks = step.buckets["free"] // self.pool.block_size
        for i in step.running:
            if self.computed[i] < self.known(i):
                assert self.policy == "fastgen" and free_blocks == 0 and self.computed[i] % self.pool.block_size == 0
        waiting = [i for i in self.arrival_order() if i not in step.running and self.waits(i, step.start_ticks)]
        if waiting and len(step.running) < self.limits.max_num_seqs:
            keeps = self.policy in ("sarathi", "vllm-v1")
            watermark = int(self.limits.watermark_fraction * self.pool.num_blocks) if keeps else 0
            assert free_blocks - -(-self.known(waiting[0]) // self.pool.block_size) < watermark

    def known(self, i: int) -> int:
        return self.requests[i].prompt_tokens + self.generated[i]

    def arrival_order(self) -> list[int]:
        return sorted(range(len(self.requests)), key=lambda i: (self.requests[i].arrival_ticks, i))

    def waits(self, i: int, now: int) -> bool:
        ended = i in self.refused or self.generated[i] == self.requests[i].output_tokens
        return not ended and self.requests[i].arrival_ticks <= now


def fitted(policy: str, pool: Pool, limits: Limits) -> tuple[Pool, Limits]:
    """What the policy accepts: blocks of one, a budget of a token a sequence, or a cell for every token of every slot."""
    if policy == "lightllm":
        pool = replace(pool, num_blocks=pool.slots, block_size=1)
    if policy == "vllm-v1":
        limits = replace(limits, max_num_batched_tokens=max(limits.max_num_batched_tokens, limits.max_num_seqs))
    if policy == "llama-cpp-unified":
        limits = replace(limits, max_num_seqs=min(5, limits.max_num_seqs))
        pool = replace(pool, num_blocks=limits.max_num_seqs * limits.max_model_len, block_size=1)
    return pool, limits


@st.composite
def cases(draw: st.DrawFn) -> tuple[list[Request], Pool, Limits]:
    """A few short requests over a pool that little more than holds the longest."""
    now, requests = 0, []
    for _ in range(draw(st.integers(1, 7))):
        now += draw(st.sampled_from([0, 0, 0, 1, 121, 400]))
        prompt, output = draw(st.integers(1, 9)), draw(st.integers(1, 9))
        requests.append(Request(now, prompt, output, draw(st.sampled_from([None, output, output + 3]))))
    block_size = draw(st.integers(1, 4))
    slots = draw(st.integers(4, 40))
    limits = Limits(
        max_model_len=draw(st.sampled_from([18, 22])),
        max_num_batched_tokens=draw(st.sampled_from([2, 3, 5, 12, 2560])),
        max_num_seqs=draw(st.sampled_from([1, 2, 3, 64])),
        watermark_fraction=draw(st.sampled_from([0.0, 0.1, 0.4])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        max_waiting_tokens=draw(st.sampled_from([1, 3, 20])),
        waiting_served_ratio=draw(st.sampled_from([0.3, 0.6, 1.2])),
    )
    return requests, Pool(-(-slots // block_size), block_size, draw(st.integers(0, 8))), limits


@pytest.mark.parametrize("policy", FORGETFUL)
@hypothesis_settings(max_examples=60)
@given(case=cases())
def test_what_holds_of_every_run(policy, case):
    """The walk; that no slot is in two tables and none is lost, the census of every step has seen to."""
    requests, pool, limits = case
    Walk(policy, requests, *fitted(policy, pool, limits)).all()


HAPPENS = {
    "vllm-v0": {"reserved", "block_tail", "preempted", "swapped_in", "paused"},
    "vllm-v1": {"reserved", "block_tail", "preempted", "chunks", "both"},
    "sarathi": {"reserved", "block_tail", "preempted", "chunks", "both"},
    "tgi": {"reserved", "over_estimate", "block_tail", "paused"},
    "trtllm-no-evict": {"reserved", "block_tail", "both"},
    "trtllm-max-util": {"reserved", "block_tail", "preempted", "both"},
    "lightllm": {"both"},
    "llama-cpp": {"reserved", "over_estimate", "chunks", "both", "paused"},
    "llama-cpp-unified": {"cached", "chunks", "both", "paused"},
    "fastgen": {"reserved", "block_tail", "preempted", "chunks", "both", "paused"},
}


@pytest.mark.parametrize("policy", FORGETFUL)
def test_what_happens_under_strain(policy):
    """The walk over longer cases, in which everything that a policy can do happens, and nothing that it cannot."""
    happened = Counter()
    for seed in range(20):
        requests, pool, limits = random_case(seed)
        outcome = Walk(policy, requests, *fitted(policy, pool, limits)).all()
        for step in outcome.steps:
            happened.update(name for name, slots in step.buckets.items() if slots)
            names = ("preempted", "swapped_in", "paused")
            happened.update(name for name in names if getattr(step, name))
            happened.update(both=bool(step.prefilled and step.decodes))
            happened.update(chunks=sum(n < requests[i].prompt_tokens for i, n in step.prefilled))
    assert {name for name, times in happened.items() if times} == HAPPENS[policy] | {"live", "free"}
