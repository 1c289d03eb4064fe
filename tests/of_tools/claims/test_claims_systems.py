"""What probes of other systems measure: Hugging Face's batches, Anyscale's ratios, Orca's rates."""

from __future__ import annotations

import pytest

from fragmeter.experiments.paper.paper import SYNTHETIC_SET
from fragmeter.experiments.paper.settings import paper_settings
from fragmeter.experiments.runs.slo_check import compiled_cost
from fragmeter.sim import simulate
from tools.claims import anyscale
from tools.claims.claims import claims, systems
from tools.claims.runs import Trial, at_once
from tools.claims.static_batches import generate_ticks

#: LLaMA-13B leaves room on an A100-40GB for so many sequences of 2,048 tokens.
SEQUENCES = 7


def values(number: int) -> dict[str, float]:
    return systems().probes[number - 1].measure(Trial())


@pytest.mark.slow
@pytest.mark.parametrize(("number", "n"), [(3, 1), (5, 3)])
def test_hugging_face_s_batches_hold_as_many_of_the_longest_sequences_as_fit(number, n):
    chosen = paper_settings(policy="vllm-sosp23", model="llama-13b")
    work = at_once(SYNTHETIC_SET, 400, 0, n)
    vllm = simulate(chosen, work)
    pool_tokens = vllm.log.capacity_slots
    assert SEQUENCES * 2048 <= pool_tokens < (SEQUENCES + 1) * 2048
    ticks = generate_ticks(compiled_cost(chosen), work.prompt_tokens, work.output_tokens, SEQUENCES // n, n)
    assert values(number)["hf"] == pytest.approx(ticks / vllm.log.end_ticks, rel=1e-12)


@pytest.mark.slow
def test_anyscale_s_slowness_of_the_same_library_is_the_one_that_it_asks_for():
    rates = anyscale.tokens_per_s(1536, 0)
    # FasterTransformer's published 4 over what its batches gain at naive static's own step time.
    expected = 4 / (rates[anyscale.FASTERTRANSFORMER] / rates[anyscale.NAIVE])
    assert values(3)["anyscale_slowness"] == pytest.approx(expected, rel=1e-9)


def test_of_anyscale_s_ratios_the_one_nearest_its_bound_has_its_range_where_fastertransformer_has_its_4():
    rates, found = anyscale.tokens_per_s(1536, 0), values(8)
    expected = 4 * rates[anyscale.RESERVES_CAP] / rates[anyscale.FASTERTRANSFORMER]
    decides = systems().probes[7].decides
    assert found[decides] == pytest.approx(expected, rel=1e-9)
    # Of one draw it is what the rule is put to.
    cap, length, vllm = systems().probes[7].judge(found).parts
    assert cap.value == pytest.approx(found[decides] / 8, rel=1e-9)
    assert cap.value - cap.least < min(vllm.value - vllm.least, vllm.most - vllm.value, length.value - length.most)


def test_claim_4_tells_the_range_of_the_ratio_nearest_its_bound():
    probe = claims().probes[3]
    found = probe.measure(Trial())
    nearest = min(probe.judge(found).parts, key=lambda part: abs(part.value / part.least - 1))
    assert nearest.value == found[probe.decides]


@pytest.mark.slow
def test_orca_is_compared_with_fastertransformer_at_its_better_batch():
    found = values(9)
    assert found["over_the_better"] == min(found["over_batches_of_8"], found["over_one_at_a_time"])
    # Long prompts of a batch go in a token a step: batches of 8 serve less than single requests.
    assert found["over_batches_of_8"] > found["over_one_at_a_time"]
    # An average request of 64.5 outputs, alone, takes half the limit a token: no more than one in so long is served.
    alone_s = 64.5 * found["limit_s"] / 2
    assert found["orca_requests_per_s"] / found["over_one_at_a_time"] < 1 / alone_s
