"""What step times rest on: the line for each cost model, and the measured runs that are most like a simulation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from fragmeter.experiments.measured.evidence import evidence, evidence_lines, recorded_text
from fragmeter.experiments.measured.servers_like import Served, stored_rows
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import cost, default_cost, profile
from fragmeter.sim.cost.kernels import UNPACKING_TABLE
from fragmeter.sim.spec import Deployment, gpu, model
from tools.servers.servers import facts

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "results" / "servers.md"
ROWS = stored_rows()


def of(served=Served(), **fields):
    return evidence(settings(policy="vllm-v1", **fields), served)


def open_loop(load="light", **values):
    return Served(load, "open loop", values)


def test_the_errors_are_those_of_the_page():
    """Without constants of a server; the page is made from today's simulations."""
    cells = [
        line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| .* \| nothing \|", line)
    ]
    page = {cell[0].strip(): [cell.strip() for cell in cell[3:9]] for cell in cells}
    assert len(page) == len(ROWS) == len(facts()["runs"])
    for row in ROWS:
        throughput, ttft, median_ttft, _, tpot, median_tpot = page[row["run"]]
        shown = {"throughput": throughput, "ttft": ttft or median_ttft, "tpot": tpot or median_tpot}
        percent = {name: float(cell.rstrip("%")) for name, cell in shown.items() if cell}
        assert percent == pytest.approx(
            {name: 100 * row["errors"][name] for name in shown if name in row["errors"]}, abs=0.06
        )
        assert row["source"]


@pytest.mark.parametrize(
    ("fields", "served", "server_class", "runs", "servers"),
    [
        ({"gpu": "h100-80gb", "model": "llama-3.1-8b"}, open_loop(), "h100-80gb FA3 dense, open loop", 22, 6),
        ({"gpu": "h100-80gb", "model": "llama-3.1-8b"}, Served(), "h100-80gb FA3 dense", 22, 6),
        ({"gpu": "h100-80gb", "model": "qwen3-14b"}, Served("light", "closed loop"), "h100-80gb FA3 dense", 22, 6),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b"}, open_loop(), "h100-80gb FA3 MoE, open loop", 11, 3),
        ({"gpu": "a100-80gb", "model": "qwen3-14b"}, open_loop(), "a100-80gb FA2 dense", 7, 3),
        (
            {"gpu": "h200", "model": "minimax-m2.5", "tensor_parallel_size": 4},
            Served("light", "closed loop"),
            "h200 FA3 MoE quantised, closed loop",
            11,
            3,
        ),
    ],
)
def test_the_class_of_a_simulation(fields, served, server_class, runs, servers):
    """With its load where five runs have it, and without it elsewhere; fitted runs do not count."""
    tpot = of(served, **fields).like.predicted[0]
    assert (tpot.metric, tpot.server_class, tpot.runs, tpot.servers) == ("tpot", server_class, runs, servers)
    low, high = tpot.factors
    assert 0.5 < low < high < 1.6


def test_a_simulated_value_has_its_interval():
    found = of(open_loop(tpot=12.5, ttft=250.0), gpu="h100-80gb", model="qwen3-14b")
    tpot, ttft = found.like.predicted
    assert (tpot.low, tpot.high) == pytest.approx([12.5 * factor for factor in tpot.factors])
    assert found.headline() == (
        f"TPOT 12.5 ms ({tpot.low:.1f} to {tpot.high:.1f} for 9 of 10 servers like this), TTFT 250 ms ({ttft.low:.0f} to {ttft.high:.0f})"
    )
    assert found.as_dict()["like"]["predicted"][0]["low"] == tpot.low
    unknown = of(gpu="h100-80gb", model="qwen3-14b")
    assert unknown.headline() == "" and [each.metric for each in unknown.like.predicted] == ["tpot"]
    assert re.search(r"TPOT 0\.9\d to 1\.\d\d times the simulated one, from 22 runs of 6 servers", unknown.text())


def test_a_class_with_few_runs_prints_them():
    """The one hybrid model, and TTFT in overload on an A100."""
    found = of(open_loop(tpot=5.0, ttft=50.0), gpu="h200", model="qwen3.5-35b-a3b", quantization="fp8")
    assert found.headline() == "" and all(each.factors is None for each in found.like.predicted)
    errors = next(row["errors"] for row in ROWS if "qwen3.5" in row["run"])
    assert f"TPOT {errors['tpot']:+.0%} (h200 qwen3.5-35b-a3b fp8 ShareGPT 4/s)" in found.text()
    burst = of(
        Served("overload", "at once", {"tpot": 100.0, "ttft": 4e4, "throughput": 2e3}),
        gpu="a100-80gb",
        model="qwen3-14b",
    )
    tpot, ttft, throughput = burst.like.predicted
    assert tpot.factors is not None and ttft.factors is throughput.factors is None
    assert (
        set(ttft.errors)
        == set(throughput.errors)
        == {row["run"] for row in ROWS if row["kind"] == "dense" and row["load"] == "at once"}
    )
    assert "TTFT" not in burst.headline() and "throughput" in burst.text()


def test_what_no_measured_server_has_is_named_and_has_no_interval():
    for fields, lacking in (
        ({"enforce_eager": True}, "steps without CUDA graphs"),
        ({"pipeline_parallel_size": 2}, "several pipeline stages"),
        ({"quantization": "fp8"}, None),
        ({"quantization": "awq"}, "weights in 4 bits (awq)"),
        ({"step_scale": 1.2}, "scaled steps (--step-scale)"),
        ({"policy": "tgi"}, "the policy tgi"),
        ({"policy": "vllm-real"}, None),
    ):
        chosen = {"policy": "vllm-v1", "gpu": "h100-80gb", "model": "qwen3-14b"} | fields
        found = evidence(settings(**chosen), open_loop(tpot=10.0))
        assert found.like.lacking == (() if lacking is None else (lacking,))
        assert (found.headline() == "") == (lacking is not None)
        assert (
            lacking is None or f"No interval: none of the measured servers of its class has {lacking}" in found.text()
        )


def test_a_kv_cache_in_another_format_is_named():
    fields = {"gpu": "h100-80gb", "model": "llama-3.1-70b", "tensor_parallel_size": 2, "quantization": "fp8"}
    assert of(**fields, kv_cache_dtype="fp8").like.other_kv_format is None
    found = of(**fields)
    assert found.like.other_kv_format == "16 bits" and found.like.predicted[0].factors is not None
    assert found.text().endswith("None of them has a KV cache in 16 bits.")


@pytest.mark.parametrize(
    ("fields", "int4"),
    [
        ({"model": "kimi-k2.5", "gpu": "h200", "tensor_parallel_size": 8}, False),
        ({"model": "llama-3.1-8b", "gpu": "h100-80gb", "quantization": "awq"}, True),
        ({"model": "llama-3.1-8b", "gpu": "h100-80gb", "quantization": "awq", "cost": "roofline"}, False),
    ],
)
def test_gemms_of_4_bits_have_no_table(fields, int4):
    """Experts have one."""
    found = of(**fields)
    assert (list(found.gemms) == ["awq"]) == int4
    assert (
        "No table of vLLM has int4 GEMMs: those of these weights, in MACHETE, take the time" in found.text()
    ) == int4


def test_weights_that_are_unpacked_on_an_a100_name_both_kernels():
    """And that the load decides which format is faster, with what servers showed."""
    for form, kernels in (("awq", "MARLIN"), ("fp8", "MARLIN")):
        found = of(gpu="a100-80gb", model="qwen3-14b", quantization=form, vllm_release="0.11")
        assert found.gemms[form] == (kernels, UNPACKING_TABLE)
        assert "their tables are of TRTLLM_WEIGHT_ONLY/SGLANG_MARLIN, as on the measured servers." in found.text()
        assert "Which number format is faster on this GPU depends on the load" in found.text()
    assert "Which number format" not in of(gpu="h100-80gb", model="qwen3-14b", quantization="awq").text()


def test_gpus_without_measured_servers_say_so():
    for name in ("b300", "gb200"):
        found = of(gpu=name, model="qwen2.5-7b")
        assert found.like.predicted == () and found.text().endswith(
            "No measured server is like this, so its error is not known."
        )


@pytest.mark.parametrize(
    ("name", "shape"), [("mi300x", "qwen3-14b"), ("mi355x", "gpt-oss-120b"), ("h200", "kimi-linear-48b-a3b")]
)
def test_data_sheets_have_the_interval_of_all_servers_simulated_from_theirs(name, shape):
    """Wider than that of a class with tables, and with its class in the line."""
    found = of(open_loop(), gpu=name, model=shape)
    tpot = found.like.predicted[0]
    assert found.cost == "roofline" and tpot.server_class.startswith("NVIDIA cards, simulated from data sheets")
    assert tpot.servers > 20 and tpot.factors[1] > 1
    low, high = of(open_loop(), gpu="h100-80gb", model="qwen3-14b").like.predicted[0].factors
    assert tpot.factors[1] / tpot.factors[0] > 2 * high / low
    apart = of(gpu=name, model=shape, enforce_eager=True)
    assert apart.like.predicted == () and "steps without CUDA graphs" in apart.text()


def test_states_have_tables_and_errors_of_the_runs_like_them():
    """One run: its error is printed, and no interval."""
    hybrid = of(open_loop(), gpu="h200", model="qwen3.5-35b-a3b", quantization="fp8")
    assert (hybrid.cost, len(hybrid.like.predicted)) == ("fitted", 2)
    assert all(each.factors is None for each in hybrid.like.predicted)


@pytest.mark.parametrize(("card", "shape"), [("h200", "nemotron-3-nano-30b-a3b"), ("rtx-4090", "qwen3-next-80b-a3b")])
def test_states_without_a_table_say_so_and_have_the_interval_of_data_sheets(card, shape):
    """Mamba 2, and gated delta nets of a card of which vLLM has no table."""
    found = of(open_loop(), gpu=card, model=shape, tensor_parallel_size=4)
    tpot = found.like.predicted[0]
    assert found.cost == "fitted" and found.states_from_sheet and tpot.factors[1] > 1.5
    assert tpot.server_class.startswith("NVIDIA cards, simulated from data sheets")
    assert "No table of this GPU has the states of this model's layers: these take the data sheet." in found.text()
    assert not of(open_loop(), gpu="h200", model="qwen3.5-35b-a3b", quantization="fp8").states_from_sheet
    assert found.untabulated == ("its states",)
    half = of(open_loop(), gpu="a100-80gb", model="qwen3.5-35b-a3b")
    assert half.untabulated == ("its states in prompts",)
    assert half.states_from_sheet and half.like.from_data_sheets
    assert "decodes take another engine's table, prompts the data sheet." in half.text()


@pytest.mark.parametrize("card", ["a100-80gb", "l40s"])
def test_attention_in_a_backend_without_a_table_has_the_interval_of_data_sheets(card):
    """Sinks of gpt-oss run in Triton's backend there; no server of it was measured on these cards, and 32K prompts were 2.6 times as slow on an A100."""
    found = of(open_loop(tpot=10.0), gpu=card, model="gpt-oss-20b")
    tpot = found.like.predicted[0]
    assert found.like.from_data_sheets and tpot.factors[0] < 0.7 and tpot.factors[1] > 1.8
    assert found.headline().startswith("TPOT 10.0 ms (") and "Attention runs in TRITON_ATTN" in found.text()
    assert "its error is not known" in found.text() and "as on the measured servers" not in found.text()
    assert found.untabulated == ("attention in TRITON_ATTN",)
    dense = of(open_loop(tpot=10.0), gpu="h100-80gb", model="llama-3.1-8b")
    assert not dense.like.from_data_sheets and dense.untabulated == ()


def test_experts_of_an_unknown_shape_are_named():
    """With the errors of whole shapes that were held out of the profile's fit; docs/results/profiles.md has them, too."""
    found = of(gpu="h100-80gb", model="glm-4.5-air", tensor_parallel_size=4)
    held_out = profile("h100-80gb").ops["moe"].fit["held_out_shapes"].values()
    assert found.experts.median_error == max(each["median_error"] for each in held_out)
    assert found.text().endswith("misses shapes outside of the fit by 8% in the median and by 41% for one in ten.")
    assert of(gpu="h100-80gb", model="gpt-oss-120b").experts is None
    found = of(gpu="rtx-4090", model="gpt-oss-20b")
    assert "such experts: they count as GEMMs." in found.text()
    assert (found.attention_backend, found.attention_table) == ("TRITON_ATTN", "FLASH_ATTN 2")
    assert "Attention runs in TRITON_ATTN" in found.text() and "Attention runs" not in of(gpu="rtx-4090").text()


def test_a_line_of_each_cost_model():
    lines = {
        cost: of(gpu="h100-80gb", model="llama-3.1-8b", cost=cost, outside_ms=0).text()
        for cost in ("fitted", "roofline")
    }
    assert lines["fitted"].startswith(
        "Step times: kernel times of h100-80gb from published tables (--cost fitted). 9 of 10"
    )
    assert lines["roofline"].startswith(
        "Step times: a roofline from the data sheet of h100-80gb (--cost roofline). 9 of 10 servers like this"
    )
    paper = evidence(settings(policy="vllm-sosp23", cost="paper"))
    assert (paper.basis, paper.cost) == ("the paper", "paper")
    scaled = "kernel times of a100-80gb from published tables, longer where the memory of a100-40gb bounds them"
    assert scaled in evidence(settings(policy="vllm-sosp23")).text()


def test_the_default_is_the_profile_where_it_covers_the_model():
    """Latent attention has an operation on cards with a table of it alone, and states need one beside it."""
    assert default_cost(model("llama-3.1-8b"), gpu("h200")) == "fitted"
    assert default_cost(model("llama-3.1-8b"), gpu("mi300x")) == "roofline"
    assert default_cost(model("deepseek-v3"), gpu("h200")) == "fitted"
    for name in ("nemotron-h-8b", "qwen3.5-35b-a3b", "deepseek-v3.2", "glm-5"):
        assert default_cost(model(name), gpu("h200")) == "fitted"
    for name, card in (("deepseek-v3", "a100-80gb"), ("deepseek-v3.2", "l40s"), ("kimi-linear-48b-a3b", "h200")):
        assert default_cost(model(name), gpu(card)) == "roofline"


def test_several_runs_have_each_line_once():
    runs = [settings(policy="vllm-v1", model="llama-3.1-8b", gpu=name) for name in ("h200", "h200", "l4")]
    assert len(evidence_lines(runs)) == 2
    many = [
        settings(policy="vllm-v1", model="llama-3.1-8b", gpu=name)
        for name in ("h200", "l4", "a10", "mi300x", "mi355x", "rtx-5090")
    ]
    assert evidence_lines(many)[-1] == "There are 2 other kinds of step times."


@pytest.mark.parametrize(
    ("fields", "outside_ms"),
    [
        ({}, 7),
        ({"outside_ms": 0}, None),
        ({"outside_ms": 53}, 53),
        ({"endpoint": "chat"}, 47),
        ({"endpoint": "chat", "outside_ms": 53}, 53),
        ({"policy": "vllm-sosp23"}, None),
        ({"policy": "sglang"}, None),
    ],
)
def test_the_time_outside_of_the_engine_is_stated(fields, outside_ms):
    """Also of a finished run; one that does not record it had none."""
    chosen = {"policy": "vllm-v1", "gpu": "h100-80gb", "model": "qwen3-14b"} | fields
    stated = "" if outside_ms is None else f"TTFT has {outside_ms} ms outside of the engine"
    recorded = recorded_text(settings(**chosen).as_dict())
    for text in (evidence(settings(**chosen)).text(), recorded):
        assert (stated in text) if stated else ("outside of the engine" not in text)
    assert "outside of the engine" not in recorded_text(chosen | {"outside_ms": None})


@pytest.mark.parametrize(("given", "word"), [(None, None), ("measured", "measured"), ('{"token": 12}', "given")])
def test_event_loops_of_the_api_server_are_stated(given, word):
    """Also of a finished run."""
    chosen = settings(policy="vllm-v1", gpu="h100-80gb", model="qwen3-14b", api_server=given)
    for text in (evidence(chosen).text(), recorded_text(chosen.as_dict())):
        assert ("event loops" in text) == (word is not None)
        assert word is None or f"with {word} times" in text


@pytest.mark.parametrize(
    ("card", "quantization", "kernels"),
    [
        ("a100-80gb", "fp8", ("MARLIN", UNPACKING_TABLE)), ("a100-80gb", "awq", ("MARLIN", UNPACKING_TABLE)), ("a100-80gb", None, None),
        ("h100-80gb", "fp8", ("CUTLASS", "CUTLASS")), ("h100-80gb", "gptq", ("MACHETE", None)), ("h100-80gb", "nvfp4", ("HUMMING", None)),
        ("b200", "nvfp4", ("FLASHINFER_CUTEDSL", "FLASHINFER_CUTEDSL")), ("l40s", "fp8", ("CUTLASS", "CUTLASS")),
        ("rtx-4090", "fp8", ("CUTLASS", None)),
    ],
)  # fmt: skip
def test_kernels_of_gemms_are_named_with_those_of_their_tables(card, quantization, kernels):
    """vLLM's FP8 on an A100 was measured slower than bf16, and the tables have another kernel."""
    given = settings(policy="vllm-v1", model="qwen3-14b", gpu=card, quantization=quantization)
    found = evidence(given)
    assert found.gemms == ({} if kernels is None else {quantization: kernels})
    assert ("of 16-bit weights" in found.text()) == (
        kernels is not None and kernels[1] is None and quantization not in ("awq", "gptq")
    )
    described = cost(
        "fitted", model("qwen3-14b"), gpu(card), deployment=Deployment(quantization=quantization)
    ).describe()
    assert described.get("gemm_kernels") == (kernels and {quantization: kernels[0]})
    assert described.get("gemm_tables") == (kernels and {quantization: kernels[1]})


@pytest.mark.parametrize(
    ("fields", "gemms", "experts"),
    [
        ({"gpu": "h200", "model": "deepseek-v3", "tensor_parallel_size": 8}, ("FLASHINFER_DEEPGEMM", "CUTLASS"), ("TRITON", "TRITON")),
        ({"gpu": "h200", "model": "deepseek-v3", "tensor_parallel_size": 8, "enable_expert_parallel": True}, ("FLASHINFER_DEEPGEMM", "CUTLASS"), ("FLASHINFER_CUTLASS",) * 2),
        ({"gpu": "h100-80gb", "model": "gpt-oss-120b"}, None, ("TRITON", "TRITON")),
        ({"gpu": "b200", "model": "gpt-oss-120b"}, None, ("FLASHINFER_TRTLLM_MXFP4_BF16",) * 2),
        ({"gpu": "b200", "model": "gpt-oss-120b", "moe_backend": "flashinfer_trtllm_afp8"}, None, ("FLASHINFER_TRTLLM_MXFP4_MXFP8",) * 2),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b", "vllm_release": "0.21"}, None, ("FLASHINFER_CUTLASS", "TRITON")),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b"}, None, ("TRITON", "TRITON")),
        ({"gpu": "h200", "model": "kimi-k2.5", "tensor_parallel_size": 8}, None, ("HUMMING", "MARLIN")),
        ({"gpu": "h200", "model": "kimi-k2.5", "tensor_parallel_size": 8, "vllm_release": "0.31"}, None, ("MARLIN", "MARLIN")),
    ],
)  # fmt: skip
def test_kernels_of_other_tables_are_named(fields, gemms, experts):
    found = of(**fields)
    assert (list(found.gemms.values()), found.expert_kernels) == ([] if gemms is None else [gemms], experts)
    for kind, pair in (("GEMMs of these weights", gemms), ("Experts", experts)):
        named = pair is not None and f"{kind} run in {pair[0]}, and their tables are of {pair[1]}" in found.text()
        assert named == (pair is not None and pair[0] != pair[1])


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        # The measured servers set VLLM_MXFP4_USE_MARLIN=1, and VLLM_USE_FLASHINFER_MOE_MXFP4_MXFP8=1.
        ({"gpu": "h100-80gb", "model": "gpt-oss-120b"}, ("mxfp4 experts in TRITON",)),
        ({"gpu": "h100-80gb", "model": "gpt-oss-120b", "moe_backend": "marlin"}, ()),
        ({"gpu": "b200", "model": "gpt-oss-120b"}, ("mxfp4 experts in FLASHINFER_TRTLLM_MXFP4_BF16",)),
        ({"gpu": "b200", "model": "gpt-oss-120b", "moe_backend": "flashinfer_trtllm_afp8"}, ()),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b"}, ()),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b", "vllm_release": "0.21"}, ("16-bit experts in FLASHINFER_CUTLASS",)),
    ],
)  # fmt: skip
def test_servers_with_other_kernels_give_no_interval(fields, lacking):
    found = of(open_loop(tpot=10.0), **fields)
    assert found.like.lacking == lacking and (found.headline() == "") == bool(lacking)


@pytest.mark.parametrize(
    ("fields", "part"),
    [({"vllm_release": "0.21"}, "Experts run in FLASHINFER_CUTLASS"), ({"attention_backend": "TRITON_ATTN"}, "Attention runs in TRITON_ATTN")],
)  # fmt: skip
def test_a_finished_run_has_the_kernels_of_its_release(fields, part):
    chosen = settings(policy="vllm-v1", gpu="h100-80gb", model="mixtral-8x7b", **fields)
    assert part in recorded_text(chosen.as_dict())
    assert part not in recorded_text(settings(policy="vllm-v1", gpu="h100-80gb", model="mixtral-8x7b").as_dict())
