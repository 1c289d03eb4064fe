"""A profile from tables of layers: planted coefficients come back."""

from __future__ import annotations

import itertools
import json

import numpy as np
import pandas as pd
import pytest

from fragmeter.sim.cost import CalibratedCost
from fragmeter.sim.cost.calibration import Calibration
from fragmeter.sim.cost.gemms import layer_gemms
from fragmeter.sim.cost.op_model import Coefficients, OpModel
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.spec import gpu, model
from tools.profiles import fit_layers

SPEC = model("llama-3.1-8b")
GEMM = OpModel(Coefficients(5, 150e12, 0.9e12, q=2))
DECODE = OpModel(Coefficients(10, 100e12, 0.8e12, q=2))
PREFILL = OpModel(Coefficients(12, 80e12, 0.7e12, q=2))
HEADS = (32, 8, 128)


def decode_us(batch, length):
    return float(DECODE.us(OPERATIONS["decode_attention"](batch, batch * length, *HEADS)))


def prefill_us(tokens, before):
    pairs = tokens * before + tokens * (tokens + 1) / 2
    return float(PREFILL.us(OPERATIONS["prefill_attention"](tokens, pairs, tokens + before, *HEADS)))


def factor(batch):
    """1.25 for one sequence, and a tenth more for each doubling."""
    return 1.25 + 0.1 * np.log2(batch)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory):
    place = tmp_path_factory.mktemp("tables") / "card"
    sizes = [2**power for power in range(12)]
    names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    shapes = {name: (gemm.n, gemm.k) for name, gemm in zip(names, layer_gemms(SPEC, 0, 1, None), strict=True)}
    dense = [(name, m, float(GEMM.us(OPERATIONS["gemm"](m, *shape)))) for name, shape in shapes.items() for m in sizes]
    small = {"layernorm": 2.0, "rotary_emb": 1.0, "act_fn": 3.0, "embedding": 2.0, "final_layernorm": 2.0}
    dense += [(name, m, us + m / 100) for name, us in small.items() for m in sizes]
    rows = [("lm_head", m, float(GEMM.us(OPERATIONS["gemm"](m, 128_256, 4096)))) for m in sizes[:9]]
    rows += [("sampler", m, 20 + 0.5 * m) for m in sizes[:9]]
    batches, lengths, chunks, before = (
        (1, 4, 16, 32, 64, 128),
        (64, 512, 1024, 4096),
        (16, 128, 1024, 2048),
        (0, 512, 2048),
    )
    attention = [(0, 0, n, length, decode_us(n, length)) for n, length in itertools.product(batches, lengths)]
    attention += [(c, k, 0, 0, prefill_us(c, k)) for c, k in itertools.product(chunks, before)]
    attention += [
        (c, k, n, length, factor(n) * (prefill_us(c, k) + decode_us(n, length)))
        for c, k, n, length in itertools.product(chunks, before, batches, lengths)
    ]
    for name, table, columns in (
        ("attention", attention, ["prefill_chunk", "kv_prefill", "n_decode", "kv_decode", "time_us"]),
        ("dense", dense, ["layer", "tokens", "time_us"]),
        ("per_sequence", rows, ["layer", "sequences", "time_us"]),
    ):
        pd.DataFrame(table, columns=columns).to_csv(f"{place}_{name}.csv.gz", index=False)
    return place


@pytest.fixture(scope="module")
def fitted(prefix):
    card = prefix.parent / "my-gpu.json"
    figures = {"memory_bytes": 25_250_627_584, "memory_gb_per_s": 1008, "fp16_tflops": 165.2, "pcie_gb_per_s": 32}
    card.write_text(json.dumps({"name": "my-gpu", "source": "made up", **figures}))
    arguments = [str(prefix), "--gpu", str(card), "--model", SPEC.name, "--source", "made up"]
    assert fit_layers.main([*arguments, "--out", str(prefix.parent / "profile.json")]) == 0
    text = (prefix.parent / "profile.json").read_bytes()
    # The notice is that of the tables of the package's profiles.
    assert "licence" not in json.loads(text)
    return Calibration(text, "profile.json")


@pytest.mark.slow
@pytest.mark.parametrize(("operation", "planted"), [("gemm", GEMM), ("prefill_attention", PREFILL)])
def test_rates_come_back(fitted, operation, planted):
    found = fitted.ops[operation].coefficients
    for name in ("flops_per_s", "bytes_per_s"):
        assert getattr(found, name) == pytest.approx(getattr(planted.coefficients, name), rel=0.1)


@pytest.mark.parametrize(("batch", "length"), [(1, 700), (8, 300), (50, 900), (128, 4096)])
def test_times_of_decodes_come_back(fitted, batch, length):
    """Their flops and bytes grow together, so that only the time is determined, not both rates."""
    work = OPERATIONS["decode_attention"](batch, batch * length, *HEADS)
    assert float(fitted.ops["decode_attention"].us(work)) == pytest.approx(decode_us(batch, length), rel=0.03)


def test_the_factor_of_mixed_calls_comes_back_and_a_constant_would_not(fitted):
    found = CalibratedCost(fitted, SPEC, gpu("rtx-4090"))._attention
    for batch in (1, 4, 16, 64):
        step = batch, batch * 512, 1024, 1024 * 1025 // 2
        apart = found.decode(batch)(batch * 512) + found.prefill(*step[2:])
        assert found.mixed(*step) / apart == pytest.approx(factor(batch), rel=0.03)
    assert factor(64) / factor(1) > 1.4


def test_the_sampler_and_the_assumed_host_are_a_steps(fitted):
    step = fitted.ops["step"].coefficients
    assert step.t0_us == pytest.approx(520, abs=2) and step.each_us == pytest.approx(0.5, rel=0.05)
    assert "assumed" in fitted.ops["step"].source


def test_errors_name_the_file_and_the_column(prefix, tmp_path, capsys):
    arguments = ["--gpu", "rtx-4090", "--model", SPEC.name, "--source", "x", "--out", str(tmp_path / "x.json")]
    assert fit_layers.main([str(tmp_path / "none"), *arguments]) == 2
    assert capsys.readouterr().err.count("\n") == 1
    (tmp_path / "card_attention.csv").write_text("prefill_chunk,time_us\n1,2\n")
    assert fit_layers.main([str(tmp_path / "card"), *arguments]) == 2
    assert "kv_prefill is missing" in capsys.readouterr().err
    (tmp_path / "card_attention.csv").write_text(
        "prefill_chunk,kv_prefill,n_decode,kv_decode,time_us\n1,0,0,0,2\n1,0,0,0,-3\n"
    )
    assert fit_layers.main([str(tmp_path / "card"), *arguments]) == 2
    assert "card_attention.csv, line 3: time_us = '-3': must be a positive number" in capsys.readouterr().err
    assert not (tmp_path / "x.json").exists()
