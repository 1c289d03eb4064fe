"""What step times rest on: the line for each cost model, and the measured runs that are most like a simulation."""

from __future__ import annotations

import json
import re
import runpy
from importlib import resources
from pathlib import Path

import pytest

from fragmeter.experiments.measured.evidence import evidence, evidence_lines, recorded_text
from fragmeter.experiments.reproduce.servers import facts
from fragmeter.sim.cost import default_cost, profile
from fragmeter.sim.engine.settings import settings
from fragmeter.sim.spec import gpu, model

DOCS = Path(__file__).parents[3] / "docs"
PAGE = DOCS / "servers.md"
measured_load = runpy.run_path(str(DOCS / "servers.py"))["measured_load"]
ROWS = json.loads(
    resources.files("fragmeter.experiments.measured").joinpath("facts/server_errors.json").read_text("utf-8")
)


def of(load=None, **fields):
    return evidence(settings(policy="vllm-v1", **fields), load)


def test_the_errors_are_those_of_the_page():
    """Without constants of a server; the page is made from today's simulations."""
    cells = [
        line.split("|")[1:-1] for line in PAGE.read_text("utf-8").splitlines() if re.match(r"\| .* \| nothing \|", line)
    ]
    page = {cell[0].strip(): (cell[4].strip(), cell[7].strip(), cell[3].strip()) for cell in cells}
    given = {fact["name"] for fact in facts()["runs"] if fact.get("class") == "given"}
    page = {name: errors for name, errors in page.items() if name not in given}
    assert len(page) == len(ROWS) == len(facts()["runs"]) - len(given)
    for row in ROWS:
        errors = row["errors"]
        throughput = f"{errors['output_throughput']:+.1%}" if "output_throughput" in errors else ""
        assert (f"{errors['mean_ttft_ms']:+.1%}", f"{errors['mean_tpot_ms']:+.1%}", throughput) == page[row["run"]]


@pytest.mark.parametrize(
    ("fields", "models", "runs"),
    [
        ({"gpu": "h100-80gb", "model": "llama-3.1-8b"}, "llama-2-7b, qwen3-14b", 12),
        ({"gpu": "h100-80gb", "model": "qwen3-14b"}, "qwen3-14b", 7),
        ({"gpu": "h100-80gb", "model": "llama-3.1-70b", "tensor_parallel_size": 4}, "llama-2-70b", 5),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b", "tensor_parallel_size": 2}, "mixtral-8x7b", 5),
        ({"gpu": "h100-80gb", "model": "mixtral-8x7b", "tensor_parallel_size": 4}, "mixtral-8x7b", 2),
        ({"gpu": "h100-80gb", "model": "gpt-oss-120b", "tensor_parallel_size": 2}, "gpt-oss-120b", 4),
        ({"gpu": "a100-80gb", "model": "qwen3-14b"}, "qwen3-14b", 2),
        ({"gpu": "l40s", "model": "llama-3.1-8b"}, "qwen3-14b", 2),
        ({"gpu": "rtx-pro-6000", "model": "qwen3-32b", "tensor_parallel_size": 2}, "qwen3-32b", 2),
        ({"gpu": "rtx-4090", "model": "llama-3.1-8b"}, "llama-3.1-8b", 1),
    ],
)
def test_the_nearest_runs(fields, models, runs):
    found = of(**fields).nearest
    assert (found.model, found.runs, found.same_kind) == (models, runs, True)
    assert all(low <= high for low, high in found.errors.values())


def test_runs_of_the_other_kind_say_so():
    found = of(gpu="rtx-4090", model="gpt-oss-20b")
    assert not found.nearest.same_kind and "none has the same kind of layers (dense, or experts)" in found.text()


def test_what_no_measured_run_has_is_named():
    """Runs of several engines are not those of one, and number formats and latent attention are named."""
    found = of(gpu="h200", model="deepseek-v3", data_parallel_size=8, enable_expert_parallel=True)
    assert found.nearest.lacking == ("several engines", "latent attention", "weights in fp8")
    assert found.text().endswith("; none has several engines or latent attention or weights in fp8.")
    engines = of(gpu="rtx-pro-6000", model="qwen3-30b-a3b", data_parallel_size=2, enable_expert_parallel=True)
    assert (engines.nearest.runs, engines.nearest.lacking) == (1, ())
    of_two = {"gpu": "h100-80gb", "model": "llama-3.1-70b", "tensor_parallel_size": 2}
    fp8 = of(**of_two, quantization="fp8", kv_cache_dtype="fp8")
    assert (fp8.nearest.model, fp8.nearest.lacking) == ("llama-3.1-70b", ())
    assert of(**of_two).nearest.lacking == ("weights in 16 bits", "a KV cache in 16 bits")


@pytest.mark.parametrize(
    ("fields", "lacking", "int4"),
    [
        ({"model": "kimi-k2.5", "gpu": "h200", "tensor_parallel_size": 8}, "experts in 4 bits", False),
        ({"model": "llama-3.1-8b", "gpu": "h100-80gb", "quantization": "awq"}, "weights in 4 bits (awq)", True),
        ({"model": "llama-3.1-8b", "gpu": "h100-80gb", "quantization": "awq", "cost": "roofline"}, None, False),
    ],
)
def test_weights_of_4_bits_are_named_in_words(fields, lacking, int4):
    """GEMMs of them have no table; experts have one."""
    found = of(**fields)
    assert lacking is None or lacking in found.nearest.lacking
    assert (
        found.int4_gemms
        == int4
        == found.text().endswith(
            "No table of vLLM has int4 GEMMs: those of these weights take the time of bf16 GEMMs that read 4 bits a weight."
        )
    )


@pytest.mark.parametrize(
    ("fields", "lacking"),
    [
        ({"kv_cache_dtype": "fp8"}, ("a KV cache in fp8",)),
        ({"kv_cache_dtype": "bf16"}, ()),
        ({"policy": "vllm-real"}, ()),
        ({"policy": "tgi", "kv_cache_dtype": "int8"}, ("the policy tgi", "a KV cache in int8")),
    ],
)
def test_the_kv_cache_and_the_policy_are_named(fields, lacking):
    chosen = {"policy": "vllm-v1", "gpu": "h100-80gb", "model": "qwen3-14b"} | fields
    assert evidence(settings(**chosen)).nearest.lacking == lacking


def test_ttft_of_overload_is_stated_apart():
    """Two runs of Qwen3 32B in overload have no other TTFT; of Mixtral on two A100 one is in overload."""
    found = of(gpu="rtx-pro-6000", model="qwen3-32b", tensor_parallel_size=2)
    rows = [row for row in ROWS if row["model"] == "qwen3-32b"]
    assert {row["load"] for row in rows} == {"overload"} and "mean_ttft_ms" not in found.nearest.errors
    ttft = [row["errors"]["mean_ttft_ms"] for row in rows]
    assert found.nearest.overload_ttft == (min(ttft), max(ttft))
    assert f"mean TPOT {min(r['errors']['mean_tpot_ms'] for r in rows):+.0%}" in found.text()
    assert f"; TTFT in overload {min(ttft):+.0%} to {max(ttft):+.0%}." in found.text()
    mixed = of(gpu="a100-80gb", model="mixtral-8x7b", tensor_parallel_size=2)
    assert mixed.nearest.errors["mean_ttft_ms"][0] == mixed.nearest.errors["mean_ttft_ms"][1]
    assert "TTFT in overload" in mixed.text()


def test_gpus_without_measured_runs_say_so():
    for name in ("b300", "gb200", "l4"):
        found = of(gpu=name, model="qwen2.5-7b")
        assert found.nearest is None and found.text().endswith("No measured run was simulated with them.")


def test_load_counts_after_parallelism_and_before_the_model():
    of_four = {"gpu": "h100-80gb", "model": "llama-3.1-70b", "tensor_parallel_size": 4}
    busy, light = of("busy", **of_four), of("light", **of_four)
    assert (busy.nearest.runs, busy.nearest.load, busy.nearest.lacking) == (1, "busy", ())
    assert (light.nearest.runs, light.nearest.load) == (4, "light load")
    only = next(row for row in ROWS if row["run"] == "h100-80gb llama-2-70b general 20/s")
    assert busy.nearest.errors["mean_tpot_ms"] == (only["errors"]["mean_tpot_ms"],) * 2
    assert "the measured run most like it (llama-2-70b on 4 GPUs; busy): mean" in busy.text()
    nowhere = of("busy", gpu="h100-80gb", model="qwen3-14b")
    assert (nowhere.nearest.model, nowhere.nearest.load) == ("qwen3-14b", "light load")
    assert "; none has this load (busy)." in nowhere.text()


def test_loads_of_the_measured_runs():
    """By Little's law from the published figures: 6 requests/s of 18.0 s take 108 of 128 places; 20 of 5.58 s 112, of 4.16 s 83."""
    loads = {row["run"]: row["load"] for row in ROWS}
    assert (loads["l40s qwen3-14b general 6/s"], loads["h100-80gb llama-2-70b general 20/s"]) == ("busy", "busy")
    assert loads["h100-80gb llama-2-7b general 20/s"] == "light"
    assert loads["h100-80gb gpt-oss-120b x2 1k1k 64 users"] == "light"
    names = {fact["name"] for fact in facts()["runs"] if "requests_file" not in fact} & loads.keys()
    assert {name: measured_load(name) for name in names if loads[name] != "overload"} == {
        name: loads[name] for name in names if loads[name] != "overload"
    }


def test_the_same_model_on_another_card_is_named():
    """With the runs of the same load, if there are some; never where the card itself has some."""
    found = of("busy", gpu="h200", model="qwen3-14b").elsewhere
    assert (found.gpus, found.runs, found.load) == ("l40s", 1, "busy")
    assert found.errors["mean_ttft_ms"] == (-0.672, -0.672)
    line = of("light", gpu="b300", model="qwen3-14b").text()
    assert (
        "No measured run was simulated with them. The same model was measured on h100-80gb, a100-80gb, l40s (10 runs"
        in line
    )
    assert of("light", gpu="l40s", model="qwen3-14b").elsewhere is None
    assert of("light", gpu="mi300x", model="qwen3-14b").elsewhere is None


def test_experts_of_an_unknown_shape_are_named():
    """With the errors of whole shapes that were held out of the profile's fit; docs/profiles.md has them, too."""
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
        "Step times: kernel times of h100-80gb from published tables (--cost fitted). Errors in"
    )
    assert lines["roofline"].startswith(
        "Step times: a roofline from the data sheet of h100-80gb (--cost roofline). No measured"
    )
    paper = evidence(settings(policy="vllm-sosp23", cost="paper"))
    assert (paper.basis, paper.cost) == ("the paper", "paper")
    scaled = "kernel times of a100-80gb from published tables, scaled to a100-40gb by the bandwidths of the data sheets"
    assert scaled in evidence(settings(policy="vllm-sosp23")).text()


def test_the_default_is_the_profile_where_it_covers_the_model():
    """Fixed-size states have no operation in the profiles, and latent attention only on cards with a table of it."""
    assert default_cost(model("llama-3.1-8b"), gpu("h200")) == "fitted"
    assert default_cost(model("llama-3.1-8b"), gpu("mi300x")) == "roofline"
    assert default_cost(model("deepseek-v3"), gpu("h200")) == "fitted"
    for name, card in (("deepseek-v3", "a100-80gb"), ("nemotron-h-8b", "h200")):
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
