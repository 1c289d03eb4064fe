"""Workloads, pools and costs for the property tests: small for the oracle to follow, longer for leaps."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st

from fragmeter.sim.workload.content import PromptContent
from oracle import Limits, Pool, Request


@dataclass(frozen=True)
class LineCost:
    """A step time of primes, so that no two of its arguments can stand in for each other.

    ``context_ticks`` is charged for every token that a decode attends to, ``pair_ticks`` for every pair of a prompt.
    """

    name: str = "flat"
    context_ticks: int = 0
    pair_ticks: int = 0

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        context = self.context_ticks * decode_context + self.pair_ticks * prefill_pairs
        return 101 + 13 * decodes + 7 * prefill_tokens + context

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        return 101 + 13 * decodes, self.context_ticks, None

    def swap_out_ticks(self, blocks: int) -> int:
        return 17 * blocks

    def swap_in_ticks(self, blocks: int) -> int:
        return 11 * blocks

    def describe(self) -> dict[str, object]:
        return {"name": self.name}


@dataclass(frozen=True)
class KneeCost(LineCost):
    """Context is charged more dearly by the stretch: stretches as long as ``knee_tokens``, a jump between them."""

    name: str = "knee"
    knee_tokens: int = 50

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        base, slope, _ = self.decode_line(decodes, decode_context)
        return base + slope * decode_context + 7 * prefill_tokens + 3 * prefill_pairs

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        stretch = context // self.knee_tokens
        # The slope of every third stretch is nought.
        return 101 + 13 * decodes + 29 * stretch, stretch % 3, (stretch + 1) * self.knee_tokens


COSTS = {cost.name: cost for cost in (LineCost(), LineCost("sloped", 2, 3), KneeCost())}
small_costs = st.sampled_from([*COSTS.values(), KneeCost(knee_tokens=7)])
long_costs = st.sampled_from([*COSTS.values(), KneeCost(knee_tokens=2000)])


@dataclass(frozen=True)
class Case:
    """What is to be simulated, whatever the policy."""

    requests: list[Request]
    pool: Pool
    limits: Limits
    cost: LineCost
    content: PromptContent | None = None


@st.composite
def requests(
    draw: st.DrawFn, most: int, max_prompt: int, max_output: int, gaps: list[int], max_model_len: int
) -> list[Request]:
    """Up to ``most`` requests in arrival order, often nearly as many; each fits the model, padded ones may not."""
    now, drawn = 0, []
    for _ in range(draw(st.sampled_from([most, most - 1, most // 2, 2, 1]))):
        now += draw(st.sampled_from(gaps))
        prompt = draw(st.integers(1, max_prompt))
        output = draw(st.integers(1, min(max_output, max_model_len - prompt)))
        declared = draw(st.sampled_from([None, output, output + 5]))
        drawn.append(Request(now, prompt, output, declared))
    return drawn


@st.composite
def limits(draw: st.DrawFn, lengths: list[int], tokens: list[int], seqs: list[int]) -> Limits:
    return Limits(
        max_model_len=draw(st.sampled_from(lengths)),
        max_num_batched_tokens=draw(st.sampled_from(tokens)),
        max_num_seqs=draw(st.sampled_from(seqs)),
        watermark_fraction=draw(st.sampled_from([0.0, 0.1, 0.4])),
        preemption_mode=draw(st.sampled_from(["recompute", "swap"])),
        ft_max_tokens=draw(st.sampled_from([20, 2040])),
    )


@st.composite
def small_cases(draw: st.DrawFn) -> Case:
    """A few short requests over a pool that they strain: cheap for the oracle, and easy to read when one fails."""
    pool = Pool(draw(st.integers(1, 24)), draw(st.sampled_from([1, 2, 3, 4, 8])), draw(st.integers(0, 12)))
    bounds = draw(limits([24, 32, 40], [8, 30, 2560], [1, 3, 64]))
    drawn = draw(requests(8, 20, 12, [0, 0, 1, 100, 121, 700], bounds.max_model_len))
    return Case(drawn, pool, bounds, draw(small_costs))


@st.composite
def crowded_cases(draw: st.DrawFn) -> Case:
    """Short prompts with longer outputs, all at about the same time, over a pool that little more than holds the
    prompts and a host with little room: several victims a step, some swapped out and some recomputed."""
    now, drawn = 0, []
    for _ in range(draw(st.integers(3, 9))):
        now += draw(st.sampled_from([0, 0, 0, 150]))
        drawn.append(Request(now, draw(st.integers(1, 6)), draw(st.integers(2, 16))))
    slots = int(sum(request.prompt_tokens for request in drawn) * draw(st.sampled_from([1.0, 1.2, 1.6])))
    block_size = draw(st.integers(1, 3))
    pool = Pool(-(-max(slots, 22) // block_size), block_size, draw(st.integers(0, 20)))
    modes = st.sampled_from(["swap", "swap", "recompute"])
    bounds = Limits(24, watermark_fraction=draw(st.sampled_from([0.0, 0.1, 0.3])), preemption_mode=draw(modes))
    return Case(drawn, pool, bounds, draw(small_costs))


@st.composite
def medium_cases(draw: st.DrawFn) -> Case:
    """Outputs some times the block size: for walks that look at every slot of every step."""
    bounds = draw(limits([60, 96], [50, 2560], [3, 64]))
    drawn = draw(requests(6, 40, 50, [0, 0, 121, 3000], bounds.max_model_len))
    return Case(drawn, draw(pools(drawn, 20, [0, 5, 100])), bounds, draw(long_costs))


@st.composite
def long_cases(draw: st.DrawFn) -> Case:
    """Outputs many times the block size, so that leaps are long; pools from too small to ample."""
    bounds = draw(limits([500, 1024], [400, 2560], [4, 64]))
    drawn = draw(requests(12, 300, 400, [0, 0, 1, 121, 3000, 20_000, 200_000], bounds.max_model_len))
    return Case(drawn, draw(pools(drawn, 64, [0, 20, 1000])), bounds, draw(long_costs))


@st.composite
def pools(draw: st.DrawFn, served: list[Request], most: int, host_blocks: list[int]) -> Pool:
    """A pool for one to all of the requests, in blocks of up to ``most`` slots; sometimes too small for the longest."""
    lengths = [request.prompt_tokens + request.output_tokens for request in served]
    slots = int(draw(st.sampled_from([0.9, 1.05, 1.5, 2, 3, 100])) * max(lengths))
    block_size = draw(st.integers(1, most))
    return Pool(-(-min(slots, 2 * sum(lengths)) // block_size), block_size, draw(st.sampled_from(host_blocks)))
