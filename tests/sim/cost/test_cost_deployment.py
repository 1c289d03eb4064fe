"""The roofline of windows, latent vectors, experts, number formats, pipeline stages and CUDA graphs."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fragmeter.sim.cost import RooflineCost, ScaledCost, ServedCost, Server, ServerConstants
from fragmeter.sim.cost.base import among
from fragmeter.sim.cost.envelope import stretches
from fragmeter.sim.cost.gemms import layer_gemms
from fragmeter.sim.cost.links import Links
from fragmeter.sim.cost.shares import EIGHT_BIT_SHARES, speedup
from fragmeter.sim.spec import Deployment, gpu, model, padded_batch, stage_bytes
from fragmeter.sim.spec.matrix import matrix_bytes
from fragmeter.sim.spec.shape import ModelSpec
from fragmeter.sim.spec.weights import head_bytes, layer_matrices, num_params
from fragmeter.sim.types.ticks import PER_SECOND, PER_US

A100 = gpu("a100-80gb")
READ_PER_S, FLOPS_PER_S = 2039e9 * 0.695, 312e12 * 0.88
ATTEND_PER_S = 2039e9 * 0.70
WINDOWED = [
    RooflineCost(model("mistral-7b-v0.1"), A100),
    RooflineCost(model("gemma-3-27b"), A100, 2),
    RooflineCost(model("gpt-oss-120b"), gpu("h200"), deployment=Deployment(kv_dtype="fp8", cuda_graphs=True)),
    RooflineCost(model("llama-4-scout"), gpu("h200"), 4),
]


def seconds(ticks: int) -> float:
    return ticks / PER_SECOND


def deployed(name: str, ranks: int = 1, **changes) -> RooflineCost:
    return RooflineCost(model(name), A100, ranks, deployment=Deployment(**changes))


class TestWindows:
    def test_by_hand(self):
        """Gemma 3 on one GPU: of 20 sequences of 10,000 each reads 1,024 tokens in 52 layers and all in 10.

        A token's time, some 50,000 ticks, is rounded to one.
        """
        step_cost = deployed("gemma-3-27b")
        context = 20 * (52 * 1024 + 10 * 10_000) * 8192
        queries = 20 * 2 * 62 * 32 * 128 * 2
        expected = (context + queries) / ATTEND_PER_S
        assert seconds(step_cost.decode_attention_ticks(20, 200_000)) == pytest.approx(expected, rel=2e-5)

    def test_a_prompt_attends_to_its_window(self):
        """Mistral, 20,000 tokens: no query sees more than 4,096 keys."""
        step_cost, tokens = deployed("mistral-7b-v0.1"), 20_000
        pairs = tokens * (tokens + 1) // 2
        assert step_cost.prefill_attention_ticks(tokens, pairs) == step_cost.prefill_attention_ticks(
            tokens, tokens * 4096
        )
        assert step_cost.prefill_attention_ticks(100, 5050) < step_cost.prefill_attention_ticks(100, 5051)

    def test_full_windows_cost_no_more(self):
        step_cost = deployed("mistral-7b-v0.1")
        full = step_cost.decode_attention_ticks(8, 8 * 4096)
        assert step_cost.decode_attention_ticks(8, 8 * 4095) < full
        assert step_cost.decode_attention_ticks(8, 8 * 30_000) == full
        assert step_cost.decode_line(8, 8 * 4096)[1:] == (0, None)

    @pytest.mark.slow
    @settings(deadline=None)
    @given(st.sampled_from(WINDOWED), st.lists(st.integers(1, 30_000), min_size=1, max_size=40))
    def test_it_is_the_most_that_sequences_of_any_length_read(self, step_cost, lengths):
        spec, dtype = step_cost.model, step_cost.deployment.kv_dtype
        read = sum(
            min(length, group.span.tokens or length) * spec.group_slot_bytes(group, dtype, step_cost.tensor_parallel)
            for group in spec.kv_groups()
            for length in lengths
        )
        share = {"a100": 0.70, "h200": 0.79}[step_cost.gpu.architecture]
        least = read / (step_cost.gpu.memory_bytes_per_s * share)
        assert seconds(step_cost.decode_attention_ticks(len(lengths), sum(lengths))) >= least * (1 - 2e-4)

    @settings(deadline=None)
    @given(st.sampled_from(WINDOWED), st.integers(1, 600))
    def test_lines_meet_at_their_knots(self, step_cost, batch):
        """Where a window is full a line ends, and no tick is lost or won there; so at each further knot."""
        context, knots = 0, []
        while (line := step_cost.decode_line(batch, context))[2] is not None:
            base, slope, until = line
            for reached in {context, (context + until) // 2, until - 1}:
                assert base + slope * reached == step_cost.step_ticks(batch, reached, 0, 0)
            knots.append(until)
            context = until
            after = step_cost.decode_line(batch, until)
            assert after[0] + after[1] * until == step_cost.step_ticks(batch, until, 0, 0)
        windows = [group.span.tokens for group in step_cost.model.kv_groups() if group.span.tokens]
        assert {batch * window for window in windows} <= set(knots)
        assert len(knots) <= 5

    @pytest.mark.slow
    @given(
        st.lists(
            st.tuples(st.integers(1, 30), st.lists(st.tuples(st.integers(-50, 50), st.integers(-5, 5)), min_size=1)),
            min_size=1,
            max_size=4,
        )
    )
    def test_stretches_are_the_largest_line_of_each(self, widths):
        starts, at = [], 0
        for width, lines in widths:
            starts.append((at, lines))
            at += width
        segments = stretches(starts)
        ends = [until for *_, until in segments[:-1]]
        assert ends == sorted(set(ends)) and segments[-1][2] is None
        for x in range(at + 20):
            lines = next(lines for start, lines in reversed(starts) if start <= x)
            base, slope, _ = next(segment for segment in segments if segment[2] is None or x < segment[2])
            assert base + slope * x == max(b + s * x for b, s in lines)


@pytest.mark.slow
def test_latent_attention_by_hand():
    """DeepSeek-V3 on 8 ranks: 576 elements a layer from memory, 16 heads * 2 * (2 * 512 + 64) flops a layer."""
    step_cost = RooflineCost(model("deepseek-v3"), A100, 8)
    read = (61 * 576 * 2 * 640_000 + 64 * 61 * 16 * (2 * 512 + 64) * 2) / ATTEND_PER_S
    compute = 61 * 2 * 16 * (2 * 512 + 64) * 640_000 / FLOPS_PER_S
    assert read > compute
    assert seconds(step_cost.decode_attention_ticks(64, 640_000)) == pytest.approx(read, rel=2e-5)
    alone = RooflineCost(model("deepseek-v3"), A100)
    assert seconds(alone.decode_attention_ticks(64, 640_000)) == pytest.approx(8 * compute, rel=2e-5)


def touched(total: int, used: int, count: int, tokens: int) -> int:
    """Part of ``total``, spread over ``count`` experts, that ``tokens`` tokens read if each goes to ``used`` experts.

    The mean over routings in which tokens draw their experts uniformly and independently:
    ``total * (1 - (1 - used / count) ** tokens)``. Computed in integers, so that all machines give the same value.
    """
    left = total
    for _ in range(tokens):
        if not left:
            break
        left = left * (count - used) // count
    return total - left


def streamed_bytes(model: ModelSpec, tokens: int = 1, tensor_parallel: int = 1, quantization: str | None = None) -> int:
    """Bytes of weights that a step over ``tokens`` tokens reads on each rank, over all pipeline stages.

    Every matrix and the output head are read once; of the experts, only those that compute a token.
    """
    matrices = [matrix for layer in range(model.num_layers) for matrix in layer_matrices(model, layer, tensor_parallel)]
    always = sum(matrix_bytes(matrix, quantization) for matrix in matrices if matrix.part != "expert")
    routed = sum(matrix_bytes(matrix, quantization) for matrix in matrices if matrix.part == "expert")
    if model.experts:
        routed = touched(routed, model.experts.used, model.experts.count, tokens)
    return always + routed + head_bytes(model, tensor_parallel, quantization)


class TestExperts:
    @pytest.mark.parametrize("tokens", [0, 1, 2, 7, 40, 1000])
    def test_a_step_reads_what_it_streams(self, tokens):
        """Those of Mixtral that the tokens reach; activations of the tokens come on top."""
        step_cost, spec = deployed("mixtral-8x7b", quantization="awq"), model("mixtral-8x7b")
        weights = streamed_bytes(spec, tokens, 1, "awq") - 2 * 32_000 * 4096
        mlp, attention = 2 * 3 * 14_336, 2 * (32 + 8) * 128
        activations = 2 * tokens * 32 * (4 * 4096 + attention + mlp)
        flops = 2 * (num_params(spec, used=True) - 2 * 32_000 * 4096 - 65 * 4096) * tokens / FLOPS_PER_S
        expected = max((weights + activations) / READ_PER_S, flops)
        assert seconds(step_cost.gemm_ticks(tokens)) == pytest.approx(expected, rel=1e-5)

    def test_the_order_of_asking_changes_nothing(self):
        up, down = deployed("qwen3-30b-a3b"), deployed("qwen3-30b-a3b")
        assert [up.gemm_ticks(n) for n in range(300)] == [down.gemm_ticks(n) for n in reversed(range(300))][::-1]


class TestNumberFormats:
    def test_quantised_weights_are_read_in_their_bytes(self):
        spec = model("llama-2-7b")
        # An A100 multiplies these in 16 bits: it has no units for fp8.
        for name in ("awq", "gptq", "fp8"):
            sixteen, narrow = (deployed("llama-2-7b", quantization=kind) for kind in (None, name))
            saved = spec.weight_bytes() - stage_bytes(spec, quantization=name)[0]
            assert seconds(sixteen.gemm_ticks(1) - narrow.gemm_ticks(1)) == pytest.approx(saved / READ_PER_S, rel=1e-6)
            assert narrow.gemm_ticks(4096) == sixteen.gemm_ticks(4096)
            assert narrow.head_ticks(3) == sixteen.head_ticks(3)

    @pytest.mark.parametrize(("card", "form", "faster"), [("a100-40gb", "int8", 2), ("h100-80gb", "fp8", 1979 / 989)])
    def test_weights_of_8_bits_are_multiplied_at_their_own_rate(self, card, form, faster):
        sixteen, eight = (
            RooflineCost(model("llama-2-7b"), gpu(card), deployment=Deployment(quantization=kind))
            for kind in (None, form)
        )
        share = EIGHT_BIT_SHARES.get(gpu(card).architecture, median(EIGHT_BIT_SHARES.values()))
        assert sixteen.gemm_ticks(4096) == pytest.approx(share * faster * eight.gemm_ticks(4096), rel=1e-6)
        assert eight.head_ticks(4096) == sixteen.head_ticks(4096)

    def test_only_the_quantised_matrices_are_faster(self):
        """Of Mixtral the routers stay in 16 bits: the layers are a little slower than at fp8's rate throughout."""
        sixteen, eight = (
            RooflineCost(model("mixtral-8x7b"), gpu("h200"), 2, deployment=Deployment(quantization=kind))
            for kind in (None, "fp8")
        )
        matrices = [matrix for layer in range(32) for matrix in layer_matrices(model("mixtral-8x7b"), layer, 2)]
        routers, params = (
            sum(matrix.used_params for matrix in matrices if matrix.part in parts)
            for parts in (("router",), ("router", "mixer", "mlp", "expert"))
        )
        share = (routers + (params - routers) / speedup(gpu("h200"), "fp8")) / params
        assert eight.gemm_ticks(8192) == pytest.approx(share * sixteen.gemm_ticks(8192), rel=1e-6)

    @pytest.mark.parametrize(("dtype", "shrinks"), [("fp8", 2), ("int8", 2), ("int4", 4)])
    def test_narrow_kv_is_read_written_and_swapped_in_its_bytes(self, dtype, shrinks):
        wide, narrow = deployed("llama-3.1-8b"), deployed("llama-3.1-8b", kv_dtype=dtype)
        assert wide.kv_write_ticks(100) == pytest.approx(shrinks * narrow.kv_write_ticks(100), rel=1e-4)
        assert narrow.decode_line(64, 10**6)[1] == pytest.approx(wide.decode_line(64, 10**6)[1] / shrinks, rel=1e-4)
        copies = 2 * 32 * 1.92 * PER_US
        assert wide.swap_out_ticks(1) - copies == pytest.approx(shrinks * (narrow.swap_out_ticks(1) - copies), rel=1e-4)


class TestGraphs:
    @pytest.mark.slow
    @settings(deadline=None)
    @given(st.integers(0, 600), st.integers(0, 600), st.integers(0, 10**6))
    def test_only_gemms_and_all_reduces_run_over_the_padding(self, decodes, prompt, context):
        eager, graphs = deployed("opt-66b", 4), deployed("opt-66b", 4, cuda_graphs=True)
        tokens = decodes + prompt
        padded = padded_batch(tokens)
        more = graphs.step_ticks(decodes, context, prompt, prompt) - eager.step_ticks(decodes, context, prompt, prompt)
        gemms = eager.gemm_ticks(padded) - eager.gemm_ticks(tokens)
        assert more == (gemms + eager.all_reduce_ticks(padded) - eager.all_reduce_ticks(tokens) if tokens else 0)
        assert (more > 0) == (padded > tokens)


class TestPipeline:
    def test_stages_one_after_the_other_add_their_hops(self):
        """Three hops of 10 us, and two tensors of 9,216 elements a token at 0.8 of 300 GB/s."""
        one, four = deployed("opt-66b"), deployed("opt-66b", pipeline_parallel=4)
        more = four.step_ticks(20, 9000, 500, 125_250) - one.step_ticks(20, 9000, 500, 125_250)
        sent = 3 * 520 * 2 * 9216 * 2 / (0.8 * 300e9) * PER_SECOND
        assert more == pytest.approx(3 * 10 * PER_US + sent, rel=1e-6)
        assert four.step_ticks(0, 0, 0, 0) == one.step_ticks(0, 0, 0, 0)

    def test_stages_swap_side_by_side(self):
        one, four = deployed("opt-66b"), deployed("opt-66b", pipeline_parallel=4)
        assert one.swap_in_ticks(1) == pytest.approx(4 * four.swap_in_ticks(1), rel=1e-4)


def test_what_differs_is_described():
    plain, changed = deployed("mixtral-8x7b"), deployed("gemma-3-27b", pipeline_parallel=2, kv_dtype="fp8")
    assert {"expert_read", "attention_read_per_context"} <= set(plain.describe())
    assert "kv_dtype" not in plain.describe()
    described = changed.describe()
    assert (described["pipeline_parallel"], described["kv_dtype"], described["quantization"]) == (2, "fp8", None)
    assert {"hop", "attention_read_per_context_window_1024", "attention_read_per_context"} <= set(described)


class TestNodes:
    """Eight GPUs a node; 40 GB/s and 20 us between nodes."""

    H200 = gpu("h200")

    def links(self, ranks: int, stages: int, engines: int = 1) -> Links:
        return Links(model("qwen3-30b-a3b"), self.H200, ranks, stages, engines)

    def test_a_ring_through_two_nodes_is_as_fast_as_the_network(self):
        sent = 96 * 2 * 7 / 8 * 2048 * 2, 96 * 2 * 15 / 16 * 2048 * 2
        one, two = self.links(8, 1), self.links(16, 1)
        assert one.all_reduce_ticks(100) == pytest.approx(
            96 * 10 * PER_US + 100 * sent[0] / 360e9 * PER_SECOND, rel=1e-6
        )
        assert two.all_reduce_ticks(100) == pytest.approx(
            96 * 20 * PER_US + 100 * sent[1] / 40e9 * PER_SECOND, rel=1e-6
        )

    def test_hops_that_leave_a_node_take_the_network(self):
        """Four stages of four GPUs: two nodes, so that one of three hops is between them."""
        state = 2 * 2048 * 2
        hops = self.links(4, 4).hop_ticks(100)
        near, far = 10 * PER_US + 100 * state / 360e9 * PER_SECOND, 20 * PER_US + 100 * state / 40e9 * PER_SECOND
        assert hops == pytest.approx(2 * near + far, rel=1e-5)
        assert self.links(4, 2).hop_ticks(100) == pytest.approx(near, rel=1e-5)

    def test_engines_on_two_nodes_exchange_tokens_over_the_network(self):
        eight, sixteen = (self.links(1, 1, engines).exchange_ticks(50 * (engines - 1)) for engines in (8, 16))
        calls, state = 2 * 48, 2048 * 2
        assert eight == pytest.approx(calls * (10 * PER_US + 50 * 7 * state / 360e9 * PER_SECOND), rel=1e-6)
        assert sixteen == pytest.approx(calls * (20 * PER_US + 50 * 15 * state / 40e9 * PER_SECOND), rel=1e-6)
        assert "between nodes" in self.links(1, 1, 16).describe()["exchange_per_token"]["source"]
        assert not self.links(1, 1).any and self.links(1, 1, 2).any


class TestSharedExperts:
    """Data parallelism: engines that share experts, each with as many tokens in a step."""

    @pytest.mark.parametrize("whole", [False, True])
    def test_a_step_by_hand(self, whole):
        """Mixtral on four engines: 3 tokens of each, 12 in all; each of the 8 experts is missed by all 12 with probability
        (6/8)^12. A GPU holds a quarter of the experts, and exchanges 2 x 3 hidden states a token, 4,096 values wide, in
        each of 32 layers, twice 10 us."""
        alone, shared = deployed("mixtral-8x7b"), deployed("mixtral-8x7b", data_parallel=4, expert_parallel=whole)
        experts = 32 * 8 * 3 * 4096 * 14_336 * 2
        reached = experts / 4 * (1 - 0.75**12) - experts * (1 - 0.75**3)
        less = seconds(shared.gemm_ticks(3) - alone.gemm_ticks(3))
        assert less == pytest.approx(reached / READ_PER_S, rel=1e-5)
        sent = 32 * 2 * (10e-6 + 3 * 3 * 4096 * 2 / (A100.nvlink_bytes_per_s * 0.8))
        exchange = seconds(shared.step_ticks(3, 300, 0, 0) - alone.step_ticks(3, 300, 0, 0)) - less
        assert exchange == pytest.approx(sent, rel=1e-5)

    def test_a_prefill_beside_decodes_by_hand(self):
        """Four engines with 6,000, 3, 3 and 1 tokens: experts multiply 6,007 rows and not 24,000, and an engine receives 6,006. A
        quarter of the experts' flops is each GPU's."""
        shared = deployed("mixtral-8x7b", data_parallel=4)
        apart = shared.among([6000, 3, 3, 1])
        expert_flops = 32 * 2 * 2 * 3 * 4096 * 14_336
        fewer = seconds(shared.gemm_ticks(6000) - shared.gemm_ticks(6000, 6007))
        assert fewer == pytest.approx(expert_flops * (6000 - 6007 / 4) / FLOPS_PER_S, rel=1e-5)
        sent = 32 * 2 * (18_000 - 6006) * 4096 * 2 / (A100.nvlink_bytes_per_s * 0.8)
        less = seconds(shared.step_ticks(0, 0, 6000, 18_003_000) - apart.step_ticks(0, 0, 6000, 18_003_000))
        assert less == pytest.approx(fewer + sent, rel=1e-5)

    def test_a_factor_and_a_server_change_steps_among_others(self):
        """Twice as long, or without the assumed overhead, beside any other engine."""
        shared = deployed("mixtral-8x7b", data_parallel=2)
        server = Server(1, "server", "test", {}, ServerConstants())
        for tokens in ([3, 3], [3, 600]):
            own = shared.among(tokens).step_ticks(3, 300, 0, 0)
            twice, served = (among(cost, tokens) for cost in (ScaledCost(shared, 2), ServedCost(shared, server, True)))
            assert twice.step_ticks(3, 300, 0, 0) == 2 * own
            assert served.step_ticks(3, 300, 0, 0) == own - shared.overhead_ticks()

    @pytest.mark.parametrize("eager", [False, True])
    def test_decodes_are_padded_to_the_engine_with_most(self, eager):
        """Three sequences beside 40 compute 40 rows in a graph, and 3 without; beside 600 there is no graph."""
        shared = deployed("mixtral-8x7b", data_parallel=2, cuda_graphs=not eager)
        beside = [shared.among([3, other]).step_ticks(3, 300, 0, 0) for other in (3, 40, 600)]
        alike = [shared.step_ticks(tokens, 300, 0, 0) for tokens in (3, 40)]
        assert beside[0] == alike[0]
        heads = shared.head_ticks(40) - shared.head_ticks(3)
        writes = shared.kv_write_ticks(40 - 3)
        attention = shared.decode_attention_ticks(40, 300) - shared.decode_attention_ticks(3, 300)
        assert (beside[1] == alike[1] - heads - writes - attention) is not eager
        assert beside[1] < beside[2]

    def test_without_experts_nothing_changes(self):
        step = (7, 7000, 100, 5050)
        assert deployed("llama-3.1-8b", data_parallel=4).step_ticks(*step) == deployed("llama-3.1-8b").step_ticks(*step)

    def test_gpus_together_do_the_same_work(self):
        """Of the profile: a GPU of eight engines multiplies as many rows as alone, and together they read every expert that
        their tokens reach once."""
        spec, tokens = model("qwen3-30b-a3b"), np.array([1, 5, 300])
        plain = layer_gemms(spec, 0, 1, None)[3].work(8 * tokens)
        for whole in (False, True):
            ranks = Deployment(data_parallel=8, expert_parallel=whole).expert_ranks()
            gemm = layer_gemms(spec, 0, 1, None, ranks)[3]
            work, io = gemm.work(tokens), (gemm.n + gemm.k) * 2
            assert np.allclose(8 * work.flops, plain.flops)
            rows = 8 * tokens * 8 / ranks.holders
            weights = 8 * (work.bytes - rows * io)
            assert np.allclose(weights, plain.bytes - 8 * tokens * 8 * (2 * 768 + 2048) * 2)
            assert np.array_equal(work.at["m"], plain.at["m"])
