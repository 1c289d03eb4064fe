"""Fit the profile of a GPU to tables of the layers of one model, as LLMServingSim's profiler writes them.

    python -m tools.profiles.fit_layers PREFIX --gpu CARD.json --model MODEL --source TEXT --out profile.json

reads ``PREFIX_attention``, ``PREFIX_dense`` and ``PREFIX_per_sequence`` (``.csv`` or ``.csv.gz``), fits the operations of a
step, writes the profile, and prints the prediction error of held-out columns. Columns, with times in microseconds of one layer:

    attention     prefill_chunk, kv_prefill, n_decode, kv_decode, time_us: ``prefill_chunk`` tokens after ``kv_prefill``,
                  together with ``n_decode`` sequences of ``kv_decode`` tokens; the KV write is part of it
    dense         layer, tokens, time_us
    per_sequence  layer (``lm_head`` or ``sampler``), sequences, time_us

The profiles of the RTX cards are fitted to such tables, which are neither a dependency nor part of the package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.gpu.calibrate import points
from fragmeter.gpu.calibrate.fitting import Points, Say, describe, limit_of
from fragmeter.sim.cost import shares
from fragmeter.sim.cost.calibration import MOST_PER_S
from fragmeter.sim.output import frames as pd
from fragmeter.sim.output.files import require_writable_file, write_whole
from fragmeter.sim.spec import ModelSpec
from fragmeter.sim.spec import model as model_spec
from fragmeter.sim.spec.gpu import GpuSpec, gpu
from fragmeter.sim.types.errors import UserError

from .fit_profiles import as_text, assumed, print_rows, to_stderr
from .rows import silent
from .tables import checked

#: Layers of one transformer layer that are no GEMM, and how often each runs.
_ELEMENTWISE = {"layernorm": 2, "rotary_emb": 1, "act_fn": 1}
_IN_ATTENTION = "part of the measured attention, which writes the keys and values first"


class LayerTables:
    """The tables of one model on one GPU.

    Args:
        prefix: Path of the files up to ``_attention``.
        model: Shapes of the layers; a dense model on one GPU.

    Raises:
        UserError: A table is missing, lacks a column, or has a wrong row.
    """

    def __init__(self, prefix: Path, model: ModelSpec) -> None:
        self.model = model
        self._attention = attention_table(prefix)
        self._dense = _table(prefix, "dense", {"layer": None, "tokens": 1})
        self._rows = _table(prefix, "per_sequence", {"layer": None, "sequences": 1})

    def gemm(self) -> Points:
        """Projections over tokens, and the output head over sequences."""
        names = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")
        shapes = dict(zip(names, points.layer_gemms(self.model), strict=True))
        found = [(*_of(self._dense, "tokens", name), *shape) for name, shape in shapes.items()]
        found.append((*_of(self._rows, "sequences", "lm_head"), *points.head_gemm(self.model)))
        m, us = (np.concatenate([one[column] for one in found]) for column in (0, 1))
        n, k = (np.concatenate([np.full(len(one[0]), float(one[column])) for one in found]) for column in (2, 3))
        return Points("gemm", {"m": m, "n": n, "k": k}, us)

    def elementwise(self) -> Points:
        """Norms, rotary positions and activation of one layer."""
        tokens, _ = _of(self._dense, "tokens", "layernorm")
        us = np.sum([count * _of(self._dense, "tokens", name)[1] for name, count in _ELEMENTWISE.items()], axis=0)
        widths = {"hidden_size": self.model.hidden_size, "intermediate_size": self.model.intermediate_size}
        return Points("elementwise", {"tokens": tokens} | _filled(len(us), widths), us)

    def embedding(self) -> Points:
        """Embedding, and the last norm."""
        tokens, us = _of(self._dense, "tokens", "embedding")
        sizes = {"tokens": tokens} | _filled(len(us), {"hidden_size": self.model.hidden_size})
        return Points("embedding", sizes, us + _of(self._dense, "tokens", "final_layernorm")[1])

    def step(self) -> Points:
        """The sampler."""
        rows, us = _of(self._rows, "sequences", "sampler")
        return Points("step", {"rows": rows}, us)

    def decode_attention(self) -> Points:
        """Sequences that decode alone."""
        found = self._attention[self._attention.prefill_chunk == 0]
        sizes = {"batch": _floats(found.n_decode), "context_tokens": _floats(found.n_decode * found.kv_decode)}
        return Points("decode_attention", sizes | self._heads(len(found)), _floats(found.time_us))

    def prefill_attention(self) -> Points:
        """Chunks alone."""
        found = self._attention[self._attention.n_decode == 0]
        tokens, before = _floats(found.prefill_chunk), _floats(found.kv_prefill)
        sizes = {"tokens": tokens, "pairs": _pairs(tokens, before), "context_tokens": tokens + before}
        return Points("prefill_attention", sizes | self._heads(len(found)), _floats(found.time_us))

    def mixed_attention(self) -> Points:
        """Chunks and decodes together, of which the table has both apart, too."""
        decode = self._attention[self._attention.prefill_chunk == 0].set_index(["n_decode", "kv_decode"]).time_us
        prefill = self._attention[self._attention.n_decode == 0].set_index(["prefill_chunk", "kv_prefill"]).time_us
        found = self._attention[(self._attention.n_decode > 0) & (self._attention.prefill_chunk > 0)]
        apart = _floats(found[["n_decode", "kv_decode"]].join(decode, on=["n_decode", "kv_decode"]).time_us)
        apart = apart + _floats(
            found[["prefill_chunk", "kv_prefill"]].join(prefill, on=["prefill_chunk", "kv_prefill"]).time_us
        )
        tokens, batch = _floats(found.prefill_chunk), _floats(found.n_decode)
        sizes = {
            "apart_us": apart,
            "batch": batch,
            "context_tokens": batch * _floats(found.kv_decode),
            "tokens": tokens,
            "pairs": _pairs(tokens, _floats(found.kv_prefill)),
            **_filled(len(found), {"heads": self.model.num_heads}),
        }
        return Points("mixed_attention", sizes, _floats(found.time_us)).take(~np.isnan(apart))

    def _heads(self, rows: int) -> dict[str, np.ndarray]:
        model = self.model
        sizes = {"heads": model.num_heads, "kv_heads": model.num_kv_heads, "head_dim": model.head_dim}
        return _filled(rows, sizes)


def profile(tables: LayerTables, sheet: GpuSpec, source: str, say: Say = silent) -> dict[str, Any]:
    """The content of a profile.

    Args:
        say: Is called with one line before each fit; that of ``mixed_attention`` may take minutes.
    """
    ops = assumed(sheet)
    measured = ("gemm", "decode_attention", "prefill_attention", "mixed_attention", "elementwise", "embedding")
    for name in measured:
        found = getattr(tables, name)()
        say(f"{sheet.name}: {name}, {len(found.us):,} rows")
        ops[name] = describe(found)
    group = {"query_group": tables.model.num_heads // tables.model.num_kv_heads}
    ops["mixed_attention"] = group | ops["mixed_attention"]
    ops["kv_write"] = {"coefficients": {"bytes_per_s": MOST_PER_S}, "source": _IN_ATTENTION}
    sampler = describe(tables.step())
    host = ops["step"]["coefficients"]["t0_us"]
    sampler["coefficients"]["t0_us"] += host
    ops["step"] = sampler | {"source": f"the sampler, and {host:g} us of host work, {shares.ASSUMED}"}
    return {
        "schema_version": 1,
        "kind": "profile",
        "device": {"name": sheet.name, "gpu": sheet.name, "data_sheet": sheet.source},
        "source": source,
        # The tables of the package's profiles.
        **({"licence": "derived from tables under the MIT licence; see NOTICE"} if sheet.path is None else {}),
        "dtype": "bf16",
        "ops": ops,
    }


def reached(tables: LayerTables, sheet: GpuSpec) -> shares.Shares:
    """Shares of the data sheet that the measured layers reach, as ``sim.cost.shares`` defines them; medians.

    The prompt of 4,096 tokens is two chunks of 2,048.
    """
    gemm = tables.gemm()
    weights = 2 * gemm.column("n") * gemm.column("k") / gemm.us * 1e6 / sheet.memory_bytes_per_s
    flops = np.asarray(gemm.work.flops) / gemm.us * 1e6 / sheet.fp16_flops_per_s
    few, many = gemm.column("m") <= 64, gemm.column("m") >= 1024
    decode, prefill = tables.decode_attention(), tables.prefill_attention()
    read = np.asarray(decode.work.bytes) / decode.us * 1e6 / sheet.memory_bytes_per_s
    lengths = [(32, 4096), (128, 1024)]
    at = [(decode.column("batch") == batch) & (decode.column("length") == length) for batch, length in lengths]
    chunk, span = prefill.column("tokens"), prefill.column("context_tokens")
    short, long = (chunk == 1024) & (span == 1024), (chunk == 2048) & ((span == 2048) | (span == 4096))
    per_us = sheet.fp16_flops_per_s / 1e6
    prompts = [
        float(np.sum(np.asarray(prefill.work.flops)[one]) / prefill.us[one].sum() / per_us) for one in (short, long)
    ]
    found = [
        float(np.median(weights[few])),
        float(np.median(flops[many])),
        float(np.mean([read[one].mean() for one in at])),
    ]
    return shares.Shares(*(round(share, 3) for share in (*found, *prompts)))


def report(name: str, ops: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """One line per operation and held-out column, or shapes."""
    for operation, entry in ops.items():
        fit = entry.get("fit", {})
        for column, found in (fit.get("held_out", {}) | fit.get("held_out_shapes", {})).items():
            limit = limit_of(fit)
            met = {"limit": limit, "met": found["median_error"] <= limit}
            yield {"gpu": name, "op": operation, "held_out": column, **found, **met}


def attention_table(prefix: Path) -> pd.DataFrame:
    """The table of attention.

    Raises:
        UserError: As ``LayerTables``.
    """
    return _table(prefix, "attention", dict.fromkeys(("prefill_chunk", "kv_prefill", "n_decode", "kv_decode"), 0))


def _table(prefix: Path, name: str, columns: Mapping[str, int | None]) -> pd.DataFrame:
    found = next((path for end in (".csv", ".csv.gz") if (path := Path(f"{prefix}_{name}{end}")).is_file()), None)
    if found is None:
        raise UserError(f"{prefix}_{name}.csv: there is no such file, and no {prefix.name}_{name}.csv.gz")
    return checked(found.read_bytes(), str(found), columns, "time_us")


def _of(table: pd.DataFrame, size: str, layer: str) -> tuple[np.ndarray, np.ndarray]:
    """Sizes and microseconds of a layer."""
    found = table[table.layer == layer].sort_values(size)
    if not len(found):
        raise UserError(f"layer = {layer!r}: the table has no rows of it")
    return _floats(found[size]), _floats(found.time_us)


def _floats(column: pd.Series) -> np.ndarray:
    return column.to_numpy(float)


def _filled(rows: int, sizes: dict[str, int]) -> dict[str, np.ndarray]:
    return {name: np.full(rows, float(size)) for name, size in sizes.items()}


def _pairs(tokens: np.ndarray, before: np.ndarray) -> np.ndarray:
    return tokens * before + tokens * (tokens + 1) / 2


def main(arguments: list[str] | None = None) -> int:
    """Fit, write and print; returns 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m tools.profiles.fit_layers", description=__doc__.splitlines()[0])
    parser.add_argument("prefix", type=Path, help="path of the tables up to _attention.csv.gz")
    parser.add_argument("--gpu", required=True, help="GPU: a preset, or its JSON file")
    parser.add_argument("--model", required=True, help="preset of the model, or its config.json")
    parser.add_argument("--source", required=True, help="origin of the tables, for the profile")
    parser.add_argument("--out", type=Path, default=Path("profile.json"), help="profile, by default profile.json")
    options = parser.parse_args(arguments)
    try:
        require_writable_file(options.out)
        sheet = gpu(options.gpu)
        tables = LayerTables(options.prefix, model_spec(options.model))
        found = profile(tables, sheet, options.source, to_stderr)
        write_whole(options.out, as_text(found))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print_rows(list(report(sheet.name, found["ops"])))
    mixed = tables.mixed_attention()
    ratio = mixed.us / mixed.column("apart_us")
    print("mixed over apart:", np.quantile(ratio, (0.1, 0.5, 0.9)).round(3).tolist())
    print(reached(tables, sheet))
    return 0


if __name__ == "__main__":
    sys.exit(main())
