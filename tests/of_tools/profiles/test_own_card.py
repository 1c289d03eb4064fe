"""A profile of a user's own card: operation tables of known kernels come back, and wrong rows are named."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from fragmeter.experiments.measured.evidence import evidence
from fragmeter.sim.config.settings import settings
from fragmeter.sim.cost import cost, default_cost
from fragmeter.sim.cost.calibration import Calibration
from fragmeter.sim.cost.op_model import Coefficients
from fragmeter.sim.cost.operations import OPERATIONS
from fragmeter.sim.spec import gpu, model
from tools.profiles import fit_profiles

SHEET = {
    "name": "my-gpu",
    "memory_bytes": 25_250_627_584,
    "memory_gb_per_s": 1008,
    "fp16_tflops": 165.2,
    "pcie_gb_per_s": 32,
    "source": "made up",
}
GEMM = Coefficients(6, 140e12, 0.9e12, q=2)
DECODE = Coefficients(8, 150e12, 0.8e12, q=2)
PREFILL = Coefficients(12, 90e12, 0.8e12, q=2)
GEMMS = [*product((1, 16, 128, 1024, 4096), (4096, 6144, 28_672), (4096, 14_336))]
HEADS = {"num_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
FORMATS = {"attn_dtype": "bfloat16", "kv_cache_dtype": "bfloat16"}
NAMES = ("gemm_perf", "generation_attention_perf", "context_attention_perf")


def rows() -> dict[str, list[dict[str, object]]]:
    """Rows as the collector writes them, of the kernels above."""
    gemm = [
        {"gemm_dtype": "bfloat16", "m": m, "n": n, "k": k, "latency": ms(GEMM, OPERATIONS["gemm"](m, n, k))}
        for m, n, k in GEMMS
    ]
    decode = [
        {**FORMATS, **HEADS, "batch_size": batch, "step": length - 1, "window_size": 0}
        | {"latency": ms(DECODE, OPERATIONS["decode_attention"](batch, batch * length, *HEADS.values()))}
        for batch, length in product((1, 4, 16, 64), (128, 512, 2048, 8192))
    ]
    prefill = [
        {**FORMATS, **HEADS, "batch_size": batch, "isl": isl}
        | {
            "latency": ms(
                PREFILL,
                OPERATIONS["prefill_attention"](batch * isl, batch * isl * (isl + 1) / 2, batch * isl, *HEADS.values()),
            )
        }
        for batch, isl in product((1, 4), (64, 128, 512, 1024, 2048, 4096, 8192))
    ]
    # Rows of a sliding window are not read.
    decode.append(decode[0] | {"window_size": 128, "latency": 9.0})
    return dict(zip(NAMES, (gemm, decode, prefill), strict=True))


def ms(kernel: Coefficients, work: object) -> float:
    return float(kernel.us(work)) / 1e3


@pytest.fixture
def card(tmp_path: Path) -> Path:
    (tmp_path / "my-gpu.json").write_text(json.dumps(SHEET | {"profile": "profile.json"}))
    (tmp_path / "tables").mkdir()
    for name, table in rows().items():
        # Half of them under the collector's own ending.
        pd.DataFrame(table).to_csv(
            tmp_path / "tables" / f"{name}.{'csv' if name == 'gemm_perf' else 'txt'}", index=False
        )
    return tmp_path / "my-gpu.json"


def fit(card: Path, tables: str = "tables", out: str = "profile.json", **changed: object) -> int:
    if changed:
        card.write_text(json.dumps(SHEET | changed))
    arguments = ["--gpu", str(card), "--tables", str(card.parent / tables), "--out", str(card.parent / out)]
    return fit_profiles.main(arguments)


@pytest.mark.slow
def test_a_profile_of_tables_gives_the_step_times_of_its_card(card, capsys):
    """From the tables to the default cost of the card: GEMMs at shapes between the rows take what the planted kernel takes."""
    assert fit(card) == 0
    printed = capsys.readouterr()
    fits = [line for line in printed.err.splitlines() if "rows of" in line]
    assert fits == [
        "my-gpu: gemm, 30 rows of gemm_perf.csv",
        "my-gpu: decode_attention, 16 rows of generation_attention_perf.txt",
        "my-gpu: prefill_attention, 14 rows of context_attention_perf.txt",
    ]
    assert "my-gpu: no moe_perf: experts count as GEMMs" in printed.err
    assert f'"profile": "profile.json" in {card}' in printed.out
    found = Calibration((card.parent / "profile.json").read_bytes(), "profile.json")
    between = OPERATIONS["gemm"](np.array([2, 64, 512]), 12_288, 8192)
    assert found.ops["gemm"].us(between) == pytest.approx(GEMM.us(between), rel=0.03)
    llama, own = model("llama-3.1-8b"), gpu(str(card))
    assert default_cost(llama, own) == "fitted"
    step = cost("fitted", llama, own)
    # 32 layers of four GEMMs and decode attention, the head, and 500 us of the host; norms and copies are a few percent.
    layer = sum(
        float(GEMM.us(OPERATIONS["gemm"](16, n, k)))
        for n, k in ((6144, 4096), (4096, 4096), (28_672, 4096), (4096, 14_336))
    )
    attention = float(DECODE.us(OPERATIONS["decode_attention"](16, 16 * 1000, *HEADS.values())))
    least = 32 * (layer + attention) + float(GEMM.us(OPERATIONS["gemm"](16, 128_256, 4096))) + 500
    assert least < step.step_ticks(16, 16_000, 0, 0) / 1e6 < 1.06 * least
    seen = evidence(settings(policy="vllm-v1", model="llama-3.1-8b", gpu=str(card), max_model_len=8192))
    assert seen.basis == "kernel tables"


@pytest.mark.slow
def test_the_same_tables_give_the_same_bytes_in_any_form(card):
    assert fit(card) == fit(card, out="again.json") == 0
    assert (card.parent / "profile.json").read_bytes() == (card.parent / "again.json").read_bytes()
    for name, table in rows().items():
        published = card.parent / "published" / "kind" / "vllm" / "0.24.0"
        published.mkdir(parents=True, exist_ok=True)
        pd.DataFrame(table).to_parquet(published / f"{name}.parquet")
        older = published.parent / "0.9.1"
        older.mkdir(exist_ok=True)
        pd.DataFrame(table).assign(latency=9.0).to_parquet(older / f"{name}.parquet")
    assert fit(card, "published", "parquet.json") == 0
    one, other = (json.loads((card.parent / name).read_text())["ops"] for name in ("profile.json", "parquet.json"))
    assert other["gemm"]["fit"].pop("table") == "kind/vllm/0.24.0/gemm_perf.parquet"
    one["gemm"]["fit"].pop("table")
    assert one["gemm"] == other["gemm"]


@pytest.mark.slow
def test_caches_decode_attention_as_the_file_of_the_card_says(card, capsys):
    """Half of the calls read from 1/50 of the cache to twice as much, which a step never finds in it."""
    for batch in (2, 8, 32, 128):
        add_rows(card, batch)
    assert fit(card) == fit(card, out="l2.json", l2_mib=8) == 0
    without, with_cache = (
        json.loads((card.parent / name).read_text())["ops"]["decode_attention"]["fit"]["points"]
        for name in ("profile.json", "l2.json")
    )
    read = [
        2 * batch * length * 8 * 128 * 2
        for batch, length in product((1, 2, 4, 8, 16, 32, 64, 128), (128, 512, 2048, 8192))
    ]
    kept = [size for size in read if size < (8 << 20) / 50 or size >= 2 * (8 << 20)]
    assert (without, with_cache) == (32, len(kept)) and 12 <= len(kept) < 32


def add_rows(card: Path, batch: int) -> None:
    path = card.parent / "tables" / "generation_attention_perf.txt"
    table = pd.read_csv(path)
    more = table[(table.batch_size == 1) & (table.window_size == 0)].assign(batch_size=batch)
    more["latency"] = [
        ms(DECODE, OPERATIONS["decode_attention"](batch, batch * (step + 1), *HEADS.values())) for step in more.step
    ]
    pd.concat([table, more]).to_csv(path, index=False)


def edited(card: Path, line: int, old: str, new: str) -> None:
    """Replace the last occurrence of a text in a line of the GEMMs, counted from 1."""
    path = card.parent / "tables" / "gemm_perf.csv"
    lines = path.read_text().splitlines()
    lines[line - 1] = new.join(lines[line - 1].rsplit(old, 1))
    path.write_text("\n".join(lines) + "\n")


@pytest.mark.parametrize(
    ("line", "old", "new", "message"),
    [
        (3, ",14336,", ",many,", "gemm_perf.csv, line 3: k = 'many': must be a whole number from 1"),
        (4, ",6144,", ",6144.5,", "gemm_perf.csv, line 4: n = '6144.5': must be a whole number from 1"),
        (31, "bfloat16,4096", "bfloat16,", "gemm_perf.csv, line 31: m = '': must be a whole number from 1"),
        (5, ",0.", ",-0.", "gemm_perf.csv, line 5: latency = '-0."),
        (1, "latency", "time", "gemm_perf.csv: latency is missing; the columns are gemm_dtype, m, n, k, time"),
        (2, ",1,", ",1,1,1,", "gemm_perf.csv, line 2: has 7 fields; the header has 5"),
    ],
)  # fmt: skip
def test_a_wrong_row_is_named_and_nothing_is_written(line, old, new, message, card, capsys):
    edited(card, line, old, new)
    assert fit(card) == 2
    said = capsys.readouterr().err
    assert message in said and said.count("\n") == 1
    assert not (card.parent / "profile.json").exists()


def test_a_wrong_row_below_an_empty_line_keeps_its_number(card, capsys):
    edited(card, 2, "bfloat16", "\nbfloat16")
    edited(card, 6, ",6144,", ",0,")
    assert fit(card) == 2
    assert "gemm_perf.csv, line 6: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "table", "message"),
    [
        ("context_attention_perf", None, "context_attention_perf: is not in "),
        ("gemm_perf", 11, "gemm_perf.csv: has 11 rows of gemm with n and k from 256; measure 12 or more"),
        ("generation_attention_perf", {"head_dim": 64}, "has 0 rows of decode_attention with head_dim 128"),
        ("gemm_perf", {"gemm_dtype": "float16"}, "gemm_perf.csv: has no rows in bfloat16"),
        ("gemm_perf", {"latency": 1e-6}, "gemm_perf.csv: 30 of 30 rows of gemm are faster than the data sheet allows"),
    ],
)
def test_tables_that_cannot_be_fitted_are_refused(name, table, message, card, capsys):
    path = next((card.parent / "tables").glob(f"{name}.*"))
    frame = pd.read_csv(path)
    path.unlink()
    if table is not None:
        (frame.head(table) if isinstance(table, int) else frame.assign(**table)).to_csv(path, index=False)
    assert fit(card) == 2
    errors = [line for line in capsys.readouterr().err.splitlines() if "rows of" not in line or message in line]
    assert message in errors[-1]
    assert not (card.parent / "profile.json").exists()


@pytest.mark.slow
def test_experts_in_too_few_rows_are_refused(card, capsys):
    row = {"moe_dtype": "bfloat16", "distribution": "balanced", "kernel_source": "x", "latency": 1.0}
    sizes = dict.fromkeys(("num_tokens", "topk", "moe_ep_size", "moe_tp_size"), 1)
    row |= sizes | {"num_experts": 8, "hidden_size": 4096, "inter_size": 14_336}
    pd.DataFrame([row]).to_csv(card.parent / "tables" / "moe_perf.csv", index=False)
    assert fit(card) == 2
    assert "moe_perf.csv: has 1 rows of moe with bfloat16, balanced or power" in capsys.readouterr().err
    # Without a row that is read the format is left out.
    pd.DataFrame([row | {"distribution": "uniform"}]).to_csv(card.parent / "tables" / "moe_perf.csv", index=False)
    assert fit(card) == 0
    assert "my-gpu: moe, no rows in moe_perf.csv" in capsys.readouterr().err


@pytest.mark.slow
def test_a_single_size_has_nothing_to_hold_out(card, capsys):
    for path in (card.parent / "tables").iterdir():
        table = pd.read_csv(path)
        pd.concat([table.head(1)] * 12).to_csv(path, index=False)
    assert fit(card) == 0
    assert capsys.readouterr().out.startswith("Profile: ")


def test_tables_of_two_cards_are_refused(card, capsys):
    other = card.parent / "tables" / "b"
    other.mkdir()
    (other / "gemm_perf.parquet").write_bytes(b"")
    assert fit(card) == 2
    assert "has gemm_perf twice, " in capsys.readouterr().err
