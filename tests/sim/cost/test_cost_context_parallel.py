"""Step times of ranks that divide the tokens of a sequence, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from fragmeter.sim.cost import CalibratedCost, RooflineCost, cost, profile
from fragmeter.sim.cost.attention_curves import AttentionCurves
from fragmeter.sim.cost.gemms import layer_gemms
from fragmeter.sim.cost.latent import LatentCurves, latent_operations, module_layers
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.cost.shares import ALL_REDUCE_LATENCY_US, LINK_SHARE, NETWORK_BYTES_PER_S, NETWORK_LATENCY_US
from fragmeter.sim.spec import Deployment, gpu, model
from fragmeter.sim.types.ticks import PER_SECOND, PER_US

H200 = gpu("h200")
#: By hand: layers, query heads on a rank, elements of a query and an output, bytes that a token keeps in a layer on a rank.
SHAPES = {
    ("deepseek-v3", 8): (61, 16, 576 + 512, 1152),
    ("qwen3-235b-a22b", 8): (94, 8, 128 + 128, 512),
}
CASES = [("deepseek-v3", 8, 2), ("deepseek-v3", 8, 8), ("qwen3-235b-a22b", 8, 2)]
#: A token's part of a term, some 2,000 ticks, is rounded to one.
ROUNDED = 1e-3


def deployed(name: str, ranks: int, tensor_parallel: int = 8) -> RooflineCost:
    deployment = Deployment(decode_context_parallel=ranks)
    return RooflineCost(model(name), H200, tensor_parallel, deployment=deployment)


def fitted(name: str, ranks: int) -> CalibratedCost:
    found = cost("fitted", model(name), H200, 8, deployment=Deployment(decode_context_parallel=ranks))
    assert isinstance(found, CalibratedCost)
    return found


@pytest.mark.parametrize(("name", "tensor_parallel", "ranks"), CASES)
def test_a_rank_reads_its_part_of_the_context_with_the_heads_of_all(name, tensor_parallel, ranks):
    layers, heads, elements, slot_bytes = SHAPES[name, tensor_parallel]
    decodes, context = 64, 64 * 50_000
    read = layers * (context / ranks * slot_bytes + decodes * ranks * heads * elements * 2)
    reading = read / (4.8e12 * 0.79)
    # As many flops on a rank: more heads over less context.
    computing = 2 * layers * context * heads * elements / (989e12 * 0.775)
    found = deployed(name, ranks, tensor_parallel).decode_attention_ticks(decodes, context)
    assert found / PER_SECOND == pytest.approx(max(reading, computing), rel=ROUNDED)
    if ranks == 2:
        assert reading > computing


@pytest.mark.parametrize(("name", "tensor_parallel", "ranks"), CASES)
def test_queries_are_gathered_and_outputs_added_up(name, tensor_parallel, ranks):
    layers, heads, elements, _ = SHAPES[name, tensor_parallel]
    # Queries and outputs in 16 bits, and logarithms of softmax sums of all heads of the group.
    sent = layers * (ranks - 1) * (heads * elements * 2 + ranks * heads * 4)
    step_cost = deployed(name, ranks, tensor_parallel)
    for decodes in (1, 256):
        expected = 3 * layers * ALL_REDUCE_LATENCY_US / 1e6 + decodes * sent / (450e9 * LINK_SHARE)
        assert step_cost.context_ticks(decodes) / PER_SECOND == pytest.approx(expected, rel=ROUNDED)
    assert step_cost.context_ticks(0) == 0


def test_ranks_of_several_nodes_send_over_the_network():
    per_call, per_s = NETWORK_LATENCY_US, NETWORK_BYTES_PER_S * LINK_SHARE
    found = deployed("kimi-k2", 16, 16).context_ticks(100)
    assert model("kimi-k2").heads_per_rank(16) == 4
    sent = 61 * 15 * (4 * 1088 * 2 + 16 * 4 * 4)
    assert found / PER_SECOND == pytest.approx(3 * 61 * per_call / 1e6 + 100 * sent / per_s, rel=ROUNDED)
    # Eight ranks of sixteen are in one node.
    near = deployed("kimi-k2", 8, 16).context_ticks(1)
    assert near / PER_SECOND == pytest.approx(3 * 61 * ALL_REDUCE_LATENCY_US / 1e6, rel=1e-2)


@pytest.mark.parametrize("name", ["roofline", "fitted"])
def test_a_step_is_the_sum(name):
    """Without prompts the rest of a step does not depend on the ranks, but for the tokens that a rank writes."""
    for ranks in (2, 8):
        plain, divided = (
            cost(name, model("deepseek-v3"), H200, 8, deployment=Deployment(decode_context_parallel=each))
            for each in (1, ranks)
        )
        roofline = deployed("deepseek-v3", ranks)
        for decodes, context in ((1, 1), (8, 80_000), (100, 3_000_000)):
            saved = plain.step_ticks(decodes, context, 0, 0) - divided.step_ticks(decodes, context, 0, 0)
            if name == "roofline":
                attention = deployed("deepseek-v3", 1).decode_attention_ticks(decodes, context)
                attention -= roofline.decode_attention_ticks(decodes, context)
                written = deployed("deepseek-v3", 1).kv_write_ticks(decodes) - roofline.kv_write_ticks(decodes)
                assert saved == attention + written - roofline.context_ticks(decodes)
            elif decodes == 100:
                assert saved > 0
            elif decodes == 1:
                # Nothing to divide: what is left is communication.
                assert -saved == pytest.approx(roofline.context_ticks(decodes), rel=0.05)


def test_prompts_attend_as_without():
    """Each rank attends with its own heads to the whole prompt."""
    plain, divided = deployed("deepseek-v3", 1), deployed("deepseek-v3", 8)
    assert divided.prefill_attention_ticks(4096, 8_390_656) == plain.prefill_attention_ticks(4096, 8_390_656)
    saved = plain.step_ticks(0, 0, 4096, 8_390_656) - divided.step_ticks(0, 0, 4096, 8_390_656)
    assert saved == plain.kv_write_ticks(4096) - divided.kv_write_ticks(4096) > 0


def test_latent_attention_of_tables_is_a_call_of_all_heads_over_a_part_of_the_context():
    operations = latent_operations(profile("h200"), model("deepseek-v3"), "fp8")
    (name, curve), *_ = operations.items()
    batch, context = 16, np.array([16 << power for power in range(4, 16)])

    def us(tokens: np.ndarray, heads: int) -> np.ndarray:
        return 61 * curve.us(OPERATIONS[name](batch, tokens, heads))

    shape, empty = model("deepseek-v3"), np.array([batch])
    found = np.array([LatentCurves(operations, shape, 8, 8).decode(batch)(int(each)) for each in context])
    projections = us(empty, 16) - us(empty, 128)
    expected = us(context / 8, 128) + projections
    long = context >= batch * 8
    assert found[long] / PER_US == pytest.approx(expected[long], rel=0.01)
    whole = np.array([LatentCurves(operations, shape, 8).decode(batch)(int(each)) for each in context])
    assert (found <= whole * 1.001).all() and found[-1] - found[0] < (whole[-1] - whole[0]) / 3


@pytest.mark.parametrize("name", ["deepseek-v3", "qwen3-235b-a22b"])
def test_long_contexts_are_faster_and_short_ones_slower(name):
    """What is saved by reading less pays for three calls a layer only with a long context."""
    for make in (deployed, fitted):
        plain, divided = make(name, 1), make(name, 2)
        assert divided.step_ticks(64, 64 * 50_000, 0, 0) < plain.step_ticks(64, 64 * 50_000, 0, 0)
        assert divided.step_ticks(4, 4 * 100, 0, 0) > plain.step_ticks(4, 4 * 100, 0, 0)


def test_the_description_names_the_calls():
    assert "context" not in deployed("deepseek-v3", 1).describe()
    found = deployed("deepseek-v3", 8).describe()
    assert found["decode_context_parallel"] == 8
    assert found["context"]["value"] == 3 * 61 * ALL_REDUCE_LATENCY_US * PER_US
    assert found["context_per_token"]["value"] > 0


def test_layers_with_a_module_of_their_own_leave_the_others_to_plain_attention():
    """MiniMax M3 has three layers without an indexer, and no projections of the others among its GEMMs."""
    spec, card = model("minimax-m3"), profile("h200")
    operations, layers = latent_operations(card, spec, None), module_layers(spec)
    assert layers == set(range(3, 60)) and list(operations) == ["msa_decode", "msa_prefill"]
    modules = LatentCurves(operations, spec, 8)
    whole = AttentionCurves(card, spec, gpu("h200"), 8, 128, modules=modules)
    for batch, context in ((1, 1024), (64, 262_144)):
        dense = 3 * card.ops["decode_attention"].us(OPERATIONS["decode_attention"](batch, context, 8, 1, 128, 128))
        alone = float(dense) * PER_US + modules.decode(batch)(context)
        assert whole.decode(batch)(context) == pytest.approx(alone, rel=0.01)
        together = whole.decode(batch)(context) + whole.prefill(2048, 2_098_176)
        assert whole.mixed(batch, context, 2048, 2_098_176) <= together
    # Q, K and V, output, and queries and key of the indexer.
    assert layer_gemms(spec, 3, 8, None)[4:] == layer_gemms(spec, 3, 8, None, in_module=True)
    assert CalibratedCost.refusal(spec, card) is None and CalibratedCost.refusal(spec, profile("a100-80gb")) is not None
