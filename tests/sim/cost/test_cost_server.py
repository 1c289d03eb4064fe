"""Constants of a server, and attention of mixed steps: closed forms."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from calibrations import calibration
from fragmeter.sim import Workload, settings, simulate
from fragmeter.sim.cluster import Cluster, cluster_summary, simulate_cluster
from fragmeter.sim.cost import CalibratedCost, ServedCost, Server, ServerConstants, cost, read_server
from fragmeter.sim.cost.backends import PACKED_K
from fragmeter.sim.engine import core
from fragmeter.sim.engine.replica import build
from fragmeter.sim.metrics.requests import request_times
from fragmeter.sim.policy.registry import POLICIES
from fragmeter.sim.spec import gpu, model
from fragmeter.sim.types.errors import SettingError, UserError
from fragmeter.sim.types.ticks import PER_MS, PER_US
from fragmeter.sim.workload.users import Users

LLAMA, H100 = model("llama-3.1-8b"), gpu("h100-80gb")
INNER = CalibratedCost(calibration(), LLAMA, H100)
#: 300 us of every step, which the constants replace.
ASSUMED_US = 300


def served(asynchronous: bool, **constants: float) -> ServedCost:
    return ServedCost(INNER, Server(1, "server", "made up", {"cost": "x"}, ServerConstants(**constants)), asynchronous)


def us(step_cost, *step: int) -> float:
    return step_cost.step_ticks(*step) / PER_US


DECODES, PREFILL = (8, 8000, 0, 0), (0, 0, 500, 500 * 501 // 2)


class TestStep:
    @pytest.mark.parametrize("step", [DECODES, PREFILL])
    def test_adds_to_the_operations(self, step):
        operations = us(INNER, *step) - ASSUMED_US
        assert us(served(True, step_us=70), *step) == pytest.approx(operations + 70)
        assert us(served(False, step_us=70, host_us=900), *step) == pytest.approx(operations + 70 + 900)

    def test_hides_the_host_behind_the_gpu_and_the_gpu_behind_the_host(self):
        operations = us(INNER, *DECODES) - ASSUMED_US
        assert us(served(True, host_us=operations - 1), *DECODES) == pytest.approx(operations)
        assert us(served(True, host_us=operations + 1), *DECODES) == pytest.approx(operations + 1)

    def test_takes_the_assumed_host_work_where_it_is_not_known_and_not_hidden(self):
        assert us(served(False), *DECODES) == us(INNER, *DECODES)

    @pytest.mark.slow
    @given(st.integers(0, 64), st.integers(0, 100_000), st.integers(0, 40_000))
    def test_is_its_line_to_the_tick(self, batch, context, host_us):
        found = served(True, step_us=10, host_us=host_us)
        base, slope, until = found.decode_line(batch, context)
        assert until is None or until > context
        for reached in {context, context + 1, (until or context + 999) - 1}:
            if until is None or reached < until:
                assert base + slope * reached == found.step_ticks(batch, reached, 0, 0)


class TestMixedAttention:
    STEP = (8, 8000, 500, 500 * 501 // 2)

    def parts(self, found: CalibratedCost) -> tuple[int, int]:
        decodes, context, tokens, pairs = self.STEP
        return found._attention.decode(decodes)(context), found._attention.prefill(tokens, pairs)

    def test_is_two_calls_where_a_device_was_calibrated_without_it(self):
        assert INNER._attention.mixed(*self.STEP) == sum(self.parts(INNER))

    def test_is_the_prefill_and_k_decodes_where_kernels_pack_heads(self):
        found = cost("fitted", LLAMA, H100)
        decode, prefill = self.parts(found)
        assert found._attention.mixed(*self.STEP) == pytest.approx(prefill + PACKED_K * decode, rel=1e-4)

    @pytest.mark.parametrize("card", ["h100-80gb", "l40s"])
    def test_has_no_factor_where_no_heads_share_keys(self, card):
        found = cost("fitted", model("llama-2-7b"), gpu(card))._attention
        assert found.mixed_decode(8)(8000) == found.decode(8)(8000)

    def test_is_the_table_at_its_knots_and_between(self):
        """Of decodes times heads: 2 up to 256, 8 from 1,024 on; 4 halfway, in logarithms."""
        table = {"axes": ["lanes"], "knots": [[256, 1024]], "log_ratios": [0.0, float(np.log(4))]}
        entry = {"coefficients": {"each_us": 2.0}, "residuals": table}
        found = CalibratedCost(calibration(mixed_attention=entry), LLAMA, H100)
        for decodes, factor in ((1, 2), (8, 2), (16, 4), (32, 8), (64, 8)):
            step = decodes, 1000 * decodes, *self.STEP[2:]
            apart = found._attention.decode(decodes)(1000 * decodes) + found._attention.prefill(*self.STEP[2:])
            assert found._attention.mixed(*step) / apart == pytest.approx(factor, rel=1e-5)

    def test_is_never_shorter_than_the_longer_of_the_two(self):
        found = CalibratedCost(calibration(mixed_attention={"coefficients": {"each_us": 0.2}}), LLAMA, H100)
        assert found._attention.mixed(*self.STEP) == max(self.parts(found))

    def test_has_one_coefficient(self):
        with pytest.raises(SettingError, match="one coefficient, each_us"):
            calibration(mixed_attention={"coefficients": {"each_us": 1, "t0_us": 3}})


OWN = {
    "gpu": "h100-80gb",
    "model": "llama-3.1-8b",
    "tensor_parallel_size": 1,
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "enable_expert_parallel": False,
    "quantization": None,
    "kv_cache_dtype": "auto",
    "enforce_eager": False,
    "async_scheduling": True,
    "vllm_release": "0.19",
    "cost": "fitted",
}


def file(tmp_path, name="server.json", **server) -> str:
    own = OWN | server
    document = {"schema_version": 1, "kind": "server", "source": "made up", "server": own}
    path = tmp_path / name
    path.write_text(json.dumps(document | {"constants": {"outside_ms": 7.5, "step_us": 200.0}}))
    return str(path)


REPLICA = {"policy": "vllm-v1", "model": "llama-3.1-8b", "gpu": "h100-80gb", "vllm_release": "0.19"}
WORK = Workload("made up", np.arange(20) * 40 * PER_MS, np.full(20, 300), np.full(20, 30))


class TestFile:
    def test_shifts_ttft_and_e2e_and_leaves_tpot(self, tmp_path):
        """In an open loop of one server to the tick; nothing else of the run changes."""
        path = file(tmp_path)
        within = json.loads((tmp_path / "server.json").read_text()) | {"constants": {"step_us": 200.0}}
        (tmp_path / "none.json").write_text(json.dumps(within))
        times = [
            request_times(simulate(settings(**REPLICA, server=each), WORK))
            for each in (path, str(tmp_path / "none.json"))
        ]
        assert np.ptp(times[0].ttft_ms - times[1].ttft_ms) < 1e-9
        assert (times[0].ttft_ms - times[1].ttft_ms)[0] == pytest.approx(7.5)
        assert (times[0].e2el_ms - times[1].e2el_ms)[0] == pytest.approx(7.5)
        assert times[0].tpot_ms.tolist() == times[1].tpot_ms.tolist()

    def test_lengthens_every_round_of_a_closed_loop(self, tmp_path):
        users = Users(1, np.zeros(20, dtype=np.int64))
        work = replace(WORK, arrival_ticks=np.zeros(20, dtype=np.int64), users=users)
        run = simulate(settings(**REPLICA, server=file(tmp_path)), work)
        times = request_times(run)
        sent = times.arrival_ticks
        assert (sent[1:] == times.finish_ticks[:-1]).all() and sent[0] == 0
        assert (times.first_scheduled_ticks - sent >= round(7.5 * PER_MS)).all()

    def test_holds_for_a_cluster(self, tmp_path):
        one = cluster_summary(
            simulate_cluster(settings(**REPLICA, server=file(tmp_path)), WORK, Cluster(num_replicas=2))
        )
        alone = cluster_summary(
            simulate_cluster(settings(**REPLICA, cost="fitted", outside_ms=0), WORK, Cluster(num_replicas=2))
        )
        # 7.5 ms and 200 us a step more: the host's work is hidden in both.
        assert one["mean_ttft_ms"] - alone["mean_ttft_ms"] == pytest.approx(8, abs=1)
        assert one["mean_tpot_ms"] == pytest.approx(alone["mean_tpot_ms"] + 0.2, abs=0.02)

    @pytest.mark.parametrize(
        ("other", "message"),
        [
            ({"gpu": "h200"}, "gpu = 'h200': server.json was fitted with gpu = 'h100-80gb'; give --gpu h100-80gb"),
            ({"model": "llama-2-7b"}, "model = 'llama-2-7b': server.json was fitted with"),
            ({"tensor_parallel_size": 2}, "tensor_parallel_size = 2: server.json was fitted with"),
            ({"vllm_release": "0.20"}, "vllm_release = '0.20': .* give --vllm-release 0.19"),
            ({"cost": "roofline"}, "cost = 'roofline': .* give --cost fitted"),
            ({"enforce_eager": True}, "enforce_eager = True: .* = False; give --no-enforce-eager, or"),
            ({"async_scheduling": False}, "async_scheduling = False: .* = True; give --async-scheduling, or"),
            (
                {"quantization": "fp8"},
                "quantization = 'fp8': .* = None; leave --quantization out, or leave --server out",
            ),
        ],
    )
    def test_is_refused_for_another_server(self, other, message, tmp_path):
        with pytest.raises(SettingError, match=message):
            simulate(settings(**REPLICA | other, server=file(tmp_path)), WORK)

    @pytest.mark.parametrize("field", OWN)
    def test_lacks_no_setting(self, field, tmp_path):
        path = file(tmp_path)
        document = json.loads((tmp_path / "server.json").read_text())
        del document["server"][field]
        (tmp_path / "server.json").write_text(json.dumps(document))
        with pytest.raises(SettingError, match=f"^server.json: server.{field} = None: is missing; write the file anew"):
            simulate(settings(**REPLICA, server=path), WORK)

    @pytest.mark.parametrize("damage", ["{", '{"kind": "calibration"}', '{"schema_version": 2}'])
    def test_damaged_ones_are_one_line(self, damage, tmp_path):
        (tmp_path / "bad.json").write_text(damage)
        with pytest.raises(UserError) as error:
            read_server(str(tmp_path / "bad.json"))
        assert "\n" not in str(error.value) and "bad.json" in str(error.value)


class TestByDefault:
    """The API server of ``vllm serve``, without constants of it."""

    @pytest.mark.parametrize("policy", POLICIES)
    def test_policies_of_vllm_serve_alone_have_it(self, policy):
        if policy == "vllm-real":
            pytest.importorskip("vllm")
        found = build(settings(policy=policy, model="opt-13b")).outside_ticks
        assert found == (7 * PER_MS if policy in ("vllm-v1", "vllm-real") else 0)

    def test_is_all_of_the_difference_in_an_open_loop(self):
        default, none = (request_times(simulate(settings(**REPLICA, **more), WORK)) for more in ({}, {"outside_ms": 0}))
        for name, more in (("ttft_ms", 7.0), ("e2el_ms", 7.0), ("tpot_ms", 0.0)):
            assert getattr(default, name) - getattr(none, name) == pytest.approx(more, abs=1e-9)

    def test_the_compiled_core_serves_it(self):
        """It is a delay of the arrivals alone."""
        for more in ({}, {"outside_ms": 0}, {"outside_ms": 53.0}):
            chosen = settings(**REPLICA, **more)
            assert core.compiled()[0] is None or core.serves(chosen, build(chosen))

    def test_constants_of_a_server_replace_it(self, tmp_path):
        assert build(settings(**REPLICA, server=file(tmp_path))).outside_ticks == round(7.5 * PER_MS)
        with pytest.raises(SettingError, match="outside_ms = 9.0: the server's constants have 7.5 ms"):
            build(settings(**REPLICA, server=file(tmp_path), outside_ms=9))

    def test_is_refused_under_a_policy_without_it_but_for_none(self):
        assert build(settings(policy="orca-max", outside_ms=0)).outside_ticks == 0
        with pytest.raises(SettingError, match="outside_ms"):
            simulate(settings(policy="orca-max", outside_ms=9), WORK)
