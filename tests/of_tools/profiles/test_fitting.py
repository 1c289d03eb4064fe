"""Fits: known coefficients come back from noisy points, and errors are those of columns that were left out."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import zipfile
from collections.abc import Iterable
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragmeter.gpu.calibrate import fitting
from fragmeter.reports.page.table import filled
from fragmeter.sim.cost.calibration import Calibration
from fragmeter.sim.cost.op_model import Coefficients, OpModel, Residuals
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.spec import gpu
from fragmeter.sim.types.errors import UserError
from paths import ROOT
from tools.profiles import fit_experts, fit_modules, fit_profiles
from tools.profiles.tables import OperationTables

SHAPES = ("interpolated", "extrapolated")
LIMITS = {"flops_per_s": 300e12, "bytes_per_s": 2e12}
GEMM = Coefficients(6, 250e12, 1.5e12, q=1.3)
FP8 = Coefficients(5, 500e12, 1.5e12, q=1.3)
FP4 = Coefficients(5, 1000e12, 1.5e12, q=1.3)
DECODE = Coefficients(12, bytes_per_s=1.7e12, flops_per_s=300e12, q=1.1)


REDUCED = Coefficients(4, bytes_per_s=1.6e11, q=1.5)


SIZES = (1, 4, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)


def gemms(model: OpModel, noise: float = 0.0, seed: int = 0, sizes: Iterable[int] = SIZES) -> list[dict[str, float]]:
    draw = np.random.default_rng(seed)
    points = []
    for m in sizes:
        for n in (1024, 2048, 4096, 8192, 16_384):
            for k in (1024, 4096, 16_384):
                us = float(model.us(OPERATIONS["gemm"](m, n, k))) * np.exp(noise * draw.standard_normal())
                points.append({"op": "gemm", "m": m, "n": n, "k": k, "us": us})
    return points


def decodes(model: OpModel) -> list[dict[str, float]]:
    shapes = [
        (batch, length)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for length in (128, 512, 2048, 4096, 8192, 32_768)
    ]
    head = {"op": "decode_attention", "heads": 32, "kv_heads": 8, "head_dim": 128, "block_size": 16}
    points = [head | {"batch": batch, "context_tokens": batch * length} for batch, length in shapes]
    return [point | {"us": float(model.us(OPERATIONS["decode_attention"](**arguments(point))))} for point in points]


def arguments(point: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in point.items() if name != "op"}


def shares(found: dict[str, float], wanted: Coefficients) -> list[float]:
    return [found[name] / getattr(wanted, name) for name in ("t0_us", "flops_per_s", "bytes_per_s", "q")]


class TestCoefficients:
    @pytest.mark.slow
    def test_come_back_from_exact_points(self):
        found = fitting.fit(gemms(OpModel(GEMM)))["gemm"]
        assert shares(found["coefficients"], GEMM) == pytest.approx([1] * 4, rel=0.01)
        assert found["fit"]["median_error"] < 0.002 and abs(found["fit"]["bias"]) < 0.002

    @pytest.mark.slow
    def test_come_back_through_noise(self):
        """5 % of noise on 180 points: rates within 3 %, and the reported errors are the noise."""
        found = fitting.fit(gemms(OpModel(GEMM), 0.05))["gemm"]
        assert shares(found["coefficients"], GEMM)[1:3] == pytest.approx([1] * 2, rel=0.03)
        assert shares(found["coefficients"], GEMM) == pytest.approx([1] * 4, rel=0.15)
        for errors in found["fit"]["held_out"].values():
            assert 0.02 < errors["median_error"] < 0.05 and abs(errors["bias"]) < 0.02

    @pytest.mark.slow
    def test_a_few_wild_points_change_little(self):
        points = gemms(OpModel(GEMM), 0.02)
        for point in points[::15]:
            point["us"] *= 8
        found = fitting.fit(points)["gemm"]["coefficients"]
        assert shares(found, GEMM)[1:3] == pytest.approx([1] * 2, rel=0.05)

    def test_of_transfers_and_steps_add_up(self):
        def us(size, blocks):
            return 15 + size / 20e3 + 2 * blocks

        copies = [(size, blocks) for size in (10**6, 10**7, 10**8) for blocks in (1, 8, 64)]
        points = [
            {"op": "swap_out", "bytes": size, "blocks": blocks, "us": us(size, blocks)} for size, blocks in copies
        ]
        points += [{"op": "step", "rows": rows, "us": 300 + 0.5 * rows} for rows in (1, 10, 100, 1000)]
        found = fitting.fit(points)
        swap, step = found["swap_out"]["coefficients"], found["step"]["coefficients"]
        assert (swap["t0_us"], swap["bytes_per_s"], swap["each_us"]) == pytest.approx((15, 20e9, 2), rel=0.03)
        assert (step["t0_us"], step["each_us"]) == pytest.approx((300, 0.5), rel=0.03)
        assert "residuals" not in swap

    def test_of_steps_grow_with_the_kv_that_they_read(self):
        """Also where rows and KV grow together in some of them."""
        shapes = [(1, 1e6), (4, 4e6), (16, 16e6), (64, 64e6), (1, 8e6), (8, 64e6), (32, 8e6), (64, 16e6)]
        points = [
            {"op": "step", "rows": rows, "kv_bytes": size, "us": 400 + 5 * rows + size / 20e3 / (1 + rows / 32)}
            for rows, size in shapes
        ]
        found = fitting.fit(points)["step"]["coefficients"]
        assert (found["t0_us"], found["each_us"], found["bytes_per_s"]) == pytest.approx((400, 5, 20e9), rel=0.03)

    def test_what_remains_of_a_long_step_counts_little(self):
        """Steps of 1 to 100 ms that are 1 % off: what remains of the long ones is noise, of the short ones 300 us."""
        parts = np.geomspace(1e3, 1e5, 12)
        off = np.where(np.arange(12) % 2, 0.99, 1.01)
        rest = np.maximum((parts + 300) * off - parts, 1)
        points = [
            {"op": "step", "rows": row, "us": us, "parts_us": part}
            for row, us, part in zip(range(1, 13), rest, parts, strict=True)
        ]
        blind = [{name: value for name, value in point.items() if name != "parts_us"} for point in points]
        found, wrong = (fitting.fit(some)["step"] for some in (points, blind))
        assert found["coefficients"]["t0_us"] == pytest.approx(300, rel=0.15)
        assert found["fit"]["median_error"] < 0.015 < wrong["fit"]["median_error"]

    @staticmethod
    def steps(launches, rest, off=0.01):
        """Steps with operations of 2 to 90 ms, which take the longer of these and ``launches``, and ``rest``, within ``off``."""
        found = []
        for place, part in enumerate(np.geomspace(2e3, 9e4, 12)):
            whole = (max(part, launches) + rest) * (1 + off * (-1) ** place)
            found.append({"op": "prefill_step", "rows": 1 + place % 4, "tokens": 16 + 300 * place})
            found[-1] |= {"us": max(0.02 * whole, whole - part), "parts_us": part}
        return found

    @pytest.mark.slow
    @pytest.mark.parametrize("launches", [4_000, 12_000, 40_000])
    def test_the_time_of_launches_is_found(self, launches):
        found = fitting.fit(self.steps(launches, 900), overlapped=True)
        assert found["launches"]["coefficients"]["t0_us"] == pytest.approx(launches, rel=0.08)
        assert found["launches"]["fit"] == found["prefill_step"]["fit"] and found["launches"]["fit"]["mape"] < 0.02
        assert all(
            {"points", "median_error", "mape", "bias", "held_out"} <= entry["fit"].keys() for entry in found.values()
        )
        # The rest of the steps, and what a launch that overlaps nothing would say of the longest one.
        rest = Calibration(_file(found), "x").ops["prefill_step"]
        assert float(rest.us(OPERATIONS["prefill_step"](2, 1000))) == pytest.approx(900, abs=0.12 * launches)
        assert "launches" not in fitting.fit(self.steps(launches, 900))

    @pytest.mark.slow
    def test_steps_that_add_up_have_no_launches(self):
        """Nor have few steps, which any number fits."""
        assert "launches" not in fitting.fit(self.steps(0, 3_000), overlapped=True)
        assert "launches" in fitting.fit(self.steps(12_000, 900), overlapped=True)
        assert "launches" not in fitting.fit(self.steps(12_000, 900)[::3], overlapped=True)

    def test_three_points_are_enough_for_something(self):
        points = [
            {"op": "kv_write", "tokens": tokens, "kv_heads": 8, "head_dim": 128, "us": 3 + tokens / 500}
            for tokens in (1, 100, 5000)
        ]
        model = Calibration(_file(fitting.fit(points)), "x").ops["kv_write"]
        assert [float(model.us(OPERATIONS["kv_write"](tokens, 8, 128))) for tokens in (1, 5000)] == pytest.approx(
            [3, 13], rel=0.05
        )


class TestResiduals:
    BENT = OpModel(DECODE, Residuals(("lanes", "length"), ((8, 2048), (128, 32_768)), (0.4, -0.1, 0.0, 0.2)))

    @pytest.mark.slow
    def test_take_up_what_the_coefficients_leave(self):
        found = fitting.fit(decodes(self.BENT))["decode_attention"]
        assert found["residuals"]["axes"] == ("lanes", "length")
        assert found["fit"]["median_error"] < 0.01
        assert all(errors["median_error"] < 0.03 for errors in found["fit"]["held_out"].values())

    @pytest.mark.slow
    def test_of_one_models_gemms_have_a_knot_at_every_size(self):
        """16 rows are faster than 15."""
        sizes = (1, 2, 4, 8, 15, 16, 32, 64, 128, 512)
        points = gemms(OpModel(GEMM), sizes=sizes)
        for point in points:
            point["us"] *= 1.6 if 2 < point["m"] < 16 else 1
        found = fitting.fit(points)["gemm"]
        assert set(sizes) <= set(found["residuals"]["knots"][found["residuals"]["axes"].index("m")])
        assert found["fit"]["p95"] < 0.02
        # Tables of many models have few knots, in which the step is lost.
        assert fitting.describe(fitting.table("gemm", points))["fit"]["p95"] > 0.1

    def test_of_one_models_norms_and_activations_have_a_knot_at_every_size(self):
        """Other kernels for a single token, and a second wave of blocks from 100 tokens on: no line."""
        sizes = {"hidden_size": 4096, "intermediate_size": 14_336}

        def us(tokens: int) -> float:
            return 36 * (0.8 if tokens == 1 else 1) * (1.25 if tokens > 100 else 1) + 0.14 * tokens

        points = [
            {"op": "elementwise", "tokens": tokens, **sizes, "us": us(tokens)}
            for tokens in (1, 2, 4, 8, 16, 32, 64, 128, 200, 256, 512, 700, 1024, 2048)
        ]
        found = fitting.fit(points)["elementwise"]
        assert found["residuals"]["axes"] == ("tokens",) and found["fit"]["p95"] < 0.02
        alone = fitting.describe(fitting.table("elementwise", points))
        assert "residuals" not in alone and alone["fit"]["p95"] > 0.05

    def test_without_them_the_errors_are_larger(self, monkeypatch):
        monkeypatch.setattr(fitting, "LEAST_POINTS_FOR_RESIDUALS", 10**6)
        assert fitting.fit(decodes(self.BENT))["decode_attention"]["fit"]["median_error"] > 0.02


class TestErrors:
    def test_are_of_columns_that_were_left_out(self, monkeypatch):
        """A fault that fills one column is fitted with that column, and shows when the column is held out."""
        points = gemms(OpModel(GEMM))
        for point in points:
            if point["m"] == 128:
                point["us"] *= 1.5
        table = fitting.table("gemm", points)
        which = table.column("m") == 128
        held = fitting.held_out(table, "m", within=which)
        model = fitting.fit_model(table)
        assert held["bias"] == pytest.approx(1 / 1.5 - 1, abs=0.03)
        assert (
            abs(fitting.errors(table.take(which), model.us(table.take(which).work))["bias"]) < abs(held["bias"]) - 0.03
        )
        seen = []
        monkeypatch.setattr(fitting, "fit_model", lambda part, limits: seen.append(part) or model)
        fitting.held_out(table, "m")
        for part in seen:
            left_out = set(table.column("m")) - set(part.column("m"))
            assert len(left_out) >= 3 and not {1, 8192} & left_out
            assert len(part.us) == sum(value not in left_out for value in table.column("m"))

    def test_by_hand(self):
        table = fitting.table("step", [{"rows": rows, "us": us} for rows, us in ((1, 10), (2, 10), (3, 20), (4, 40))])
        found = fitting.errors(table, np.array([11, 9, 22, 44]))
        assert found == {"median_error": 0.1, "mape": 0.1, "p90": 0.1, "p95": 0.1, "bias": 0.05}

    @pytest.mark.parametrize(("factor", "least", "most"), [(1, 0, 0.02), (3, 0.6, 0.7)])
    def test_shapes_are_left_out_with_all_their_tokens(self, factor, least, most):
        """What only the largest n has, nothing that is left can say: a factor of 3 is missed by two thirds."""
        points = gemms(OpModel(GEMM))
        for point in points:
            point["us"] *= factor if point["n"] == 16_384 else 1
        found = fitting.fit(points)["gemm"]["fit"]["held_out_shapes"]
        # n = 16,384 or k = 16,384: 7 of 15 shapes; n = 2,048, 4,096 or 8,192 with k = 4,096 are inside.
        assert (found["extrapolated"]["points"], found["interpolated"]["points"]) == (7 * 12, 3 * 12)
        assert least <= found["extrapolated"]["p90"] <= most

    def test_one_shape_cannot_be_left_out(self):
        one = [point for point in gemms(OpModel(GEMM)) if point["n"] == point["k"] == 1024]
        assert "held_out_shapes" not in fitting.fit(one)["gemm"]["fit"]

    def test_a_single_number_of_gpus_between_two_others_is_left_out(self):
        """Four GPUs that take twice as long as two and eight say: with the limit of all operations a failure."""
        points = [
            {"op": "all_reduce", "message_bytes": size, "ranks": ranks, "us": slow * float(REDUCED.us(work))}
            for size, (ranks, slow) in product((1e3, 1e5, 1e6, 1e7, 1e8), ((2, 1), (4, 2), (8, 1)))
            for work in [OPERATIONS["all_reduce"](size, ranks)]
        ]
        found = fitting.fit(points)["all_reduce"]["fit"]["held_out_shapes"]
        assert (found["interpolated"]["points"], found["extrapolated"]["points"]) == (5, 5)
        assert found["interpolated"]["median_error"] == pytest.approx(0.5, abs=0.05)
        assert found["interpolated"]["median_error"] > fitting.limit_of({}) == 0.05

    def test_experts_that_are_divided_one_way_or_the_other_have_a_largest_shape(self):
        """Every slice has all experts or whole ones: the largest has both, and slices between it and the smallest are inner."""
        slices = [(held, 2048) for held in (6, 24, 96, 384)] + [(384, width) for width in (64, 256, 1024)]
        points = [
            {"op": "moe", "tokens": tokens, "used": 8, "count": 384, "held": held, "hidden_size": 7168, "width": width}
            | {"us": float(GEMM.us(OPERATIONS["moe"](tokens, 8, 384, held, 7168, width)))}
            for (held, width), tokens in product(slices, (1, 16, 256, 4096))
        ]
        found = fitting.fit(points)["moe"]["fit"]["held_out_shapes"]
        assert (found["extrapolated"]["points"], found["interpolated"]["points"]) == (4, 4 * 4)

    @pytest.mark.slow
    def test_points_above_the_data_sheet_are_left_out_and_counted(self):
        points = gemms(OpModel(GEMM))
        for point in points[-4:]:
            point["us"] /= 3
        found = fitting.fit(points, LIMITS)["gemm"]
        assert (found["fit"]["points"], found["fit"]["impossible"]) == (176, 4)
        assert found["coefficients"]["flops_per_s"] <= 300e12


@pytest.mark.parametrize(
    ("points", "text"),
    [
        (
            [{"op": "gem", "us": 1}],
            "point: op = 'gem': one of gemm, gemm_fp8, gemm_nvfp4, gemm_w8, gemm_w4, moe, moe_fp8",
        ),
        ([{"op": "gemm", "m": 1, "n": 1, "us": 1}], "point of gemm: k = None: must be a positive number"),
        ([{"op": "step", "rows": 1, "us": -2}], "point of step: us = -2: must be a positive number"),
        ([{"op": "step", "rows": 1, "us": float("nan")}], "point of step: us = nan: must be a positive number"),
    ],
)
def test_a_wrong_point_is_named(points, text):
    with pytest.raises(UserError) as error:
        fitting.fit(points)
    assert str(error.value).startswith(text)


def _file(ops: dict[str, object]) -> bytes:
    document = {"schema_version": 1, "kind": "calibration", "source": "test", "ops": ops}
    return json.dumps(document).encode()


def published(folder: Path) -> Path:
    """A wheel of tables of the same form as the published ones, of kernels that are known."""
    common = {"framework": "VLLM", "version": "0.9.9", "device": "made up"}
    gemm = pd.DataFrame(gemms(OpModel(GEMM), 0.02)).drop(columns="op")
    gemm["latency"] = gemm.pop("us") / 1e3
    eight = [float(FP8.us(OPERATIONS["gemm_fp8"](row.m, row.n, row.k))) / 1e3 for row in gemm.itertuples()]
    four = [float(FP4.us(OPERATIONS["gemm_nvfp4"](row.m, row.n, row.k))) / 1e3 for row in gemm.itertuples()]
    other = pd.concat([gemm.assign(gemm_dtype="fp8", latency=eight), gemm.assign(gemm_dtype="nvfp4", latency=four)])
    faults = gemm.assign(gemm_dtype="bfloat16", latency=gemm.latency / 50).head(5)
    gemm = pd.concat([gemm.assign(gemm_dtype="bfloat16"), other, faults])
    attention = common | {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16", "window_size": 0, "head_dim": 128}
    shapes = [
        (batch, heads, kv_heads)
        for batch in (1, 2, 4, 8, 16, 32, 64, 128, 256)
        for heads, kv_heads in ((8, 8), (32, 8), (32, 4))
    ]
    decode, prefill = [], []
    for batch, heads, kv_heads in shapes:
        for length in (64, 256, 512, 1024, 4096, 8192, 32_768):
            work = OPERATIONS["decode_attention"](batch, batch * length, heads, kv_heads, 128)
            shape = attention | {"batch_size": batch, "num_heads": heads, "num_key_value_heads": kv_heads}
            decode.append(shape | {"step": length - 1, "latency": float(DECODE.us(work)) / 1e3})
            tokens, pairs = batch * length, batch * length * (length + 1) / 2
            work = OPERATIONS["prefill_attention"](tokens, pairs, tokens, heads, kv_heads, 128)
            prefill.append(shape | {"isl": length, "latency": float(GEMM.us(work)) / 1e3})
    decode.append(decode[0] | {"window_size": 128, "latency": 1.0})
    tables = {
        "gemm/vllm/0.9.9/gemm_perf": gemm.assign(**common),
        "attention/vllm/0.9.9/generation_attention_perf": pd.DataFrame(decode),
    }
    tables["attention/vllm/0.9.9/context_attention_perf"] = pd.DataFrame(prefill)
    reduced = [
        {"num_gpus": ranks, "message_size": size, "backend": backend, "latency": us * longer / 1e3}
        for ranks, size in product((2, 4, 8, 16), 2 ** np.arange(7, 30))
        for us in [float(REDUCED.us(OPERATIONS["all_reduce"](2.0 * size, ranks)))]
        for backend, longer in (("vllm_graph", 1), ("vllm_eager", 9))
    ]
    latent: dict[str, list[dict[str, object]]] = {"generation": [], "context": []}
    for form, heads, batch, length in product(
        ("bfloat16", "fp8_block"), (16, 64, 128), (1, 8, 64, 256), (2, 64, 512, 4096)
    ):
        row = {"gemm_type": form, "kv_cache_dtype": "bfloat16", "num_heads": heads, "batch_size": batch}
        row |= {"model": "deepseek-ai/DeepSeek-V3"}
        eight = "_fp8" if form == "fp8_block" else ""
        work = OPERATIONS[f"mla_decode{eight}"](batch, batch * length, heads)
        latent["generation"].append(row | {"step": length - 1, "latency": float(DECODE.us(work)) / 1e3})
        tokens = batch * length
        work = OPERATIONS[f"mla_prefill{eight}"](tokens, tokens * (length + 1) / 2, tokens, heads)
        latent["context"].append(row | {"isl": length, "latency": float(GEMM.us(work)) / 1e3})
    # In another number format of the KV cache.
    latent["context"].append(latent["context"][0] | {"kv_cache_dtype": "fp8", "latency": 9.0})
    # Of another model.
    latent["generation"].append(latent["generation"][0] | {"model": "moonshotai/Kimi-K3", "latency": 9.0})
    for kind, rows in latent.items():
        tables[f"mla/vllm/0.9.9/mla_{kind}_module_perf"] = pd.DataFrame(rows).assign(**common)
    tables["comm/vllm/0.9.9/custom_allreduce_perf"] = pd.DataFrame(reduced).assign(**common)
    without_latent = {path: table for path, table in tables.items() if not path.startswith("mla")}
    with zipfile.ZipFile(folder / "tables.whl", "w") as wheel:
        for system in ("a100_sxm", "h100_sxm", "h200_sxm"):
            # The published tables of the A100 have no latent attention.
            for path, table in tables.items() if system != "a100_sxm" else without_latent.items():
                wheel.writestr(f"core/systems/data/{system}/{path}.parquet", table.to_parquet())
        # An older version, which is not read.
        old = "core/systems/data/a100_sxm/gemm/vllm/0.9.8/gemm_perf.parquet"
        wheel.writestr(old, gemm.assign(**common, latency=99.0).to_parquet())
    return folder / "tables.whl"


#: How many times as long skewed routing takes; the last one is not read.
ROUTINGS = {"balanced": 1.0, "power_law_1.01": 1.21, "power_law_1.2": 99.0}
#: A kernel of experts.
EXPERTS = Coefficients(t0_us=20, flops_per_s=500e12, bytes_per_s=2e12, q=2)


def experts_table(factors: dict[str, float]) -> pd.DataFrame:
    """Rows of experts, by name and by how many times as long as ``EXPERTS`` they take."""
    rows = []
    for name, factor in factors.items():
        count, used, hidden, inter = map(int, name.split("x"))
        sizes = {"topk": used, "num_experts": count, "hidden_size": hidden, "inter_size": inter}
        for ranks, tokens in product((1, 2, 4), (1, 4, 16, 64, 128, 256, 512, 1024, 4096)):
            us = factor * float(EXPERTS.us(OPERATIONS["moe"](tokens, used, count, count, hidden, inter // ranks)))
            split = {"num_tokens": tokens, "moe_tp_size": ranks, "moe_ep_size": 1, "kernel_source": "made_up"}
            for form, (skew, longer) in product(("bfloat16", "fp8"), ROUTINGS.items()):
                rows.append(sizes | split | {"moe_dtype": form, "distribution": skew, "latency": us * longer / 1e3})
    # Without a gate: not read.
    rows.append(rows[0] | {"hidden_size": 2688, "latency": 5.0})
    return pd.DataFrame(rows)


def test_the_page_of_errors_is_that_of_the_profiles():
    """Every error of every profile; its generator is run again."""
    source = importlib.util.spec_from_file_location("profiles_page", ROOT / "docs" / "profiles.py")
    assert source is not None and source.loader is not None
    written = importlib.util.module_from_spec(source)
    source.loader.exec_module(written)
    page = written.PAGE.read_text("utf-8")
    assert filled(page, written.parts()) == page


class TestProfiles:
    @pytest.mark.slow
    def test_are_fitted_from_the_tables_in_a_wheel(self, tmp_path, monkeypatch, capsys):
        monkeypatch.setattr(fit_profiles, "SYSTEMS", {"a100-80gb": "a100_sxm"})
        monkeypatch.setattr(fit_profiles, "ADDED", {})
        wheel = published(tmp_path)
        arguments = ["--tables", str(wheel), "--out", str(tmp_path), "--json", str(tmp_path / "rows.json")]
        assert fit_profiles.main(arguments) == 0
        rows = json.loads((tmp_path / "rows.json").read_text())
        assert [(row["op"], row["held_out"]) for row in rows if row["held_out"] not in SHAPES] == [
            (operation, column)
            for operation in ("gemm", "decode_attention", "prefill_attention", "all_reduce")
            for column in OPERATIONS[operation].columns
        ]
        assert {(row["op"], row["held_out"]) for row in rows} >= {("gemm", shapes) for shapes in SHAPES}
        assert all(row["met"] and row["median_error"] < 0.05 for row in rows)
        assert "decode_attention" in capsys.readouterr().out
        for name in ("a100-80gb.json", "a100-40gb.json"):
            fitted = Calibration((tmp_path / name).read_bytes(), name)
            gemm = fitted.ops["gemm"]
            assert (gemm.fit["rows"], gemm.fit["rows_bf16"], gemm.fit["rows_above_data_sheet"]) == (545, 185, 5)
            assert gemm.fit["table"] == "a100_sxm/gemm/vllm/0.9.9/gemm_perf.parquet"
            assert gemm.coefficients.flops_per_s == pytest.approx(250e12, rel=0.05)
        memory = fitted.ops["decode_attention"].memory
        assert fitted.ops["decode_attention"].coefficients.bytes_per_s == pytest.approx(1.7e12, rel=0.05)
        assert memory is not None and memory.bytes_per_s == pytest.approx(0.92 * 1555e9)
        assert fitted.ops["decode_attention"].fit["rows"] == 190 and fitted.ops["decode_attention"].fit["points"] == 189

    @pytest.mark.slow
    def test_have_fp8_gemms_where_the_card_has_fp8(self, tmp_path, monkeypatch, capsys):
        """Added to a profile of other tables; its operations stay."""
        monkeypatch.setattr(fit_profiles, "SYSTEMS", {})
        monkeypatch.setattr(fit_profiles, "ADDED", {"rtx-pro-6000": "h100_sxm"})
        assert fit_profiles.main(["--tables", str(published(tmp_path)), "--out", str(tmp_path)]) == 0
        found, shipped = (
            json.loads((folder / "rtx-pro-6000.json").read_text())["ops"]
            for folder in (tmp_path, fit_profiles.PROFILES)
        )
        eight, four, reduced, small = (
            found.pop(name) for name in ("gemm_fp8", "gemm_nvfp4", "all_reduce", "small_kernel")
        )
        # The shortest GEMM, as the wheel has no other table of small kernels.
        assert set(small["fit"]["shortest_us"]) == {"gemm_perf"} and small["coefficients"]["t0_us"] > 0
        assert reduced["coefficients"]["bytes_per_s"] == pytest.approx(REDUCED.bytes_per_s, rel=0.02)
        assert shares(eight["coefficients"], FP8) == pytest.approx([1] * 4, rel=0.02)
        assert shares(four["coefficients"], FP4) == pytest.approx([1] * 4, rel=0.02)
        assert eight["fit"]["rows_fp8"] == 180 and "aiconfigurator" in eight["source"]
        assert four["fit"]["rows_nvfp4"] == 180
        # The made-up wheel has no experts: those of the profile stay.
        refitted = ("gemm_fp8", "gemm_nvfp4", "all_reduce", "small_kernel")
        for name in ("gemm", "decode_attention", "prefill_attention"):
            # Other kernels than those of the profile, which are compared with it and not fitted.
            compared, known = (ops[name]["fit"]["held_out_shapes"].pop("other table") for ops in (found, shipped))
            assert compared != known and compared["median_error"] > 0
        assert found == {name: entry for name, entry in shipped.items() if name not in refitted}
        # Twice the flops are all of the data sheet's ratio, less what both take to start.
        printed = capsys.readouterr().out
        assert re.search(r"rtx-pro-6000: fp8 GEMMs reach (0\.9\d\d|1\.0\d\d) of the share", printed)
        assert re.search(r"rtx-pro-6000: nvfp4 GEMMs reach 0\.[78]\d\d of the share", printed)

    @pytest.mark.slow
    def test_states_are_fitted_to_both_kernels_together(self, tmp_path):
        """Convolution and recurrence have rows of their own; models with the same heads on a rank are one point."""
        tables = tmp_path / "systems/data/h100_sxm/linear_attention/vllm/0.9.9"
        tables.mkdir(parents=True)
        rows = []
        kernel = Coefficients(t0_us=8, flops_per_s=100e12, bytes_per_s=2e12, q=2)
        for heads, batch, length in product((2, 4, 8, 16), (1, 2, 4, 8, 16, 32, 64, 128), (1, 64, 512, 2048)):
            sizes = {"batch_size": batch, "seq_len": length, "num_k_heads": heads, "num_v_heads": 2 * heads}
            work = OPERATIONS["gdn_prefill"](batch * length, length, heads, 2 * heads)
            calls = [("context", float(kernel.us(work)))]
            if length == 1:
                calls.append(("generation", float(kernel.us(OPERATIONS["gdn_decode"](batch, heads, 2 * heads)))))
            for (phase, us), (name, share), other in product(
                calls, (("convolution", 0.2), ("recurrence", 0.8)), (0.9, 1.1)
            ):
                row = {"phase": phase, "kernel_source": f"{name}_{phase}", "latency": share * other * us / 1e3}
                rows.append(sizes | {"head_k_dim": 128, "head_v_dim": 128} | row)
        # Of other widths: not read.
        rows.append(rows[0] | {"head_k_dim": 64, "latency": 9.0})
        pd.DataFrame(rows).to_parquet(tables / "gdn_perf.parquet")
        found = fit_modules.fitted_modules(OperationTables(tmp_path, "h100_sxm"), gpu("h100-80gb"))
        assert set(found) == {"gdn_decode", "gdn_prefill", "small_kernel"}
        assert found["gdn_decode"]["fit"]["points"] == 32
        for operation in ("gdn_decode", "gdn_prefill"):
            assert found[operation]["fit"]["median_error"] < 0.02
            assert all(errors["median_error"] < 0.05 for errors in found[operation]["fit"]["held_out"].values())
        model = OpModel(Coefficients(**found["gdn_decode"]["coefficients"]))
        work = OPERATIONS["gdn_decode"](16, 4, 8)
        assert float(model.us(work)) == pytest.approx(float(kernel.us(work)), rel=0.05)

    @pytest.mark.slow
    def test_experts_are_fitted_shape_by_shape(self, tmp_path):
        """Kernels of which one takes three times as long as the other: no model of both can follow, one of each does."""
        tables = tmp_path / "systems/data/h100_sxm/moe/vllm/0.9.9"
        tables.mkdir(parents=True)
        experts_table({"8x2x4096x14336": 1.0, "64x4x4096x14336": 3.0}).to_parquet(tables / "moe_perf.parquet")
        found = fit_experts.fitted_experts(OperationTables(tmp_path, "h100_sxm"), gpu("h100-80gb"))
        assert set(found) == {"moe", "moe_fp8"} and found["moe_fp8"]["fit"]["format"] == "fp8"
        entry = found["moe"]
        # Balanced and skewed calls are 1.21 apart: each is 1.1 from their mean.
        assert fitting.limit_of(entry["fit"]) == entry["fit"]["routing_spread"] == pytest.approx(0.1)
        assert set(entry["shapes"]) == {"8x2x4096x14336", "64x4x4096x14336"}
        assert entry["fit"]["held_out"]["tokens of a known shape"]["p90"] < 0.05 < entry["fit"]["p90"]
        ops = Calibration(_file({"moe": entry}), "made-up.json").ops["moe"]
        work = OPERATIONS["moe"](np.array([16.0, 700.0]), 4, 64, 64, 4096, 7168)
        # Even calls take as long as said, skewed ones 1.21 times: a point is the geometric mean.
        assert ops.shapes["64x4x4096x14336"].us(work) == pytest.approx(3 * 1.1 * EXPERTS.us(work), rel=0.05)

    def test_experts_of_a_table_without_a_column_are_refused(self, tmp_path):
        tables = tmp_path / "systems/data/h100_sxm/moe/vllm/0.9.9"
        tables.mkdir(parents=True)
        experts_table({"8x2x4096x14336": 1.0}).drop(columns="latency").to_parquet(tables / "moe_perf.parquet")
        with pytest.raises(UserError, match=r"moe_perf.parquet: latency is missing"):
            fit_experts.fitted_experts(OperationTables(tmp_path, "h100_sxm"), gpu("h100-80gb"))

    @pytest.mark.slow
    def test_a_folder_holds_what_the_wheel_holds(self, tmp_path):
        wheel = published(tmp_path)
        with zipfile.ZipFile(wheel) as content:
            content.extractall(tmp_path / "unpacked")
        for operation in fit_profiles.FITTED:
            one, other = (
                fit_profiles.read_table(OperationTables(place, "h200_sxm"), operation)
                for place in (wheel, tmp_path / "unpacked")
            )
            assert one[:4] == other[:4]
            assert one.points.us.tolist() == other.points.us.tolist()

    @pytest.mark.parametrize("place", ["none", "empty"])
    def test_without_tables_there_is_one_line(self, place, tmp_path, capsys):
        (tmp_path / "empty").mkdir()
        assert fit_profiles.main(["--tables", str(tmp_path / place), "--out", str(tmp_path)]) == 2
        line = capsys.readouterr().err
        assert line.count("\n") == 1 and str(tmp_path / place) in line

    @pytest.mark.slow
    @pytest.mark.skipif("AICONFIGURATOR_TABLES" not in os.environ, reason="needs the published tables")
    def test_that_come_with_the_package_are_those_of_the_published_tables(self, tmp_path):
        assert fit_profiles.main(["--tables", os.environ["AICONFIGURATOR_TABLES"], "--out", str(tmp_path)]) == 0
        for name in (*fit_profiles.SYSTEMS, *fit_profiles.SCALED):
            fitted, shipped = (
                json.loads((folder / f"{name}.json").read_text()) for folder in (tmp_path, fit_profiles.PROFILES)
            )
            tabulated = [name for name, entry in shipped["ops"].items() if "table" in entry.get("fit", {})]
            assert len(tabulated) == {"a": 9, "b": 31, "g": 31, "l": 15}.get(name[0], 28)
            for operation in tabulated:
                one, other = (content["ops"][operation]["coefficients"] for content in (fitted, shipped))
                assert one == pytest.approx(other, rel=0.01)
                assert fitted["ops"][operation]["fit"]["points"] == shipped["ops"][operation]["fit"]["points"]
