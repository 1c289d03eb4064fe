"""Errors of the rule for attention of mixed steps (``sim.cost.backends``), on tables of such calls.

    python -m tools.profiles.mixed_calls PREFIX [PREFIX ...] --gpu GPU --model MODEL [--backend NAME]

reads ``PREFIX_attention`` (``.csv`` or ``.csv.gz``, the columns of ``fit_layers``). Every mixed call is computed from the same table's prefill
and decode apart, so that only the rule is tested. Prints the median of the absolute error and the median error of the rule, of the sum of
both calls, and of 1.32 times that sum, which was assumed before. The tables are no part of the package.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from fragmeter.sim.cost import profile
from fragmeter.sim.cost.backends import BACKENDS, Backend, MixedCalls, attention_backend
from fragmeter.sim.cost.base import BLOCK_ROWS
from fragmeter.sim.output import frames as pd
from fragmeter.sim.spec import Deployment, ModelSpec
from fragmeter.sim.spec import model as model_spec
from fragmeter.sim.spec.gpu import GpuSpec, gpu
from fragmeter.sim.types.errors import UserError

from .fit_layers import attention_table
from .fit_profiles import print_rows

#: Of the sum of both calls, for every card without such calls, until 2026.
FORMER_FACTOR = 1.32
_DECODE, _PREFILL = ["n_decode", "kv_decode"], ["prefill_chunk", "kv_prefill"]


def mixed_calls(table: pd.DataFrame) -> pd.DataFrame:
    """The mixed calls of a table of attention, with the microseconds of their ``decode`` and ``prefill`` apart."""
    decode = table[table.prefill_chunk == 0].set_index(_DECODE).time_us.rename("decode")
    prefill = table[table.n_decode == 0].set_index(_PREFILL).time_us.rename("prefill")
    found = table[(table.n_decode > 0) & (table.prefill_chunk > 0)]
    return found.join(decode, on=_DECODE).join(prefill, on=_PREFILL).dropna()


def rule_us(calls: pd.DataFrame, model: ModelSpec, sheet: GpuSpec, backend: Backend) -> np.ndarray:
    """Microseconds of mixed calls by the rule, from both calls apart."""
    shape = model.head_attention()
    rate = profile(sheet.name).ops["prefill_attention"].coefficients.flops_per_s or sheet.fp16_flops_per_s
    token_bytes = 2 * shape.kv_heads * shape.head_dim * 2
    rule = MixedCalls(backend, sheet, shape.heads, shape.kv_heads, shape.head_dim, rate, token_bytes)
    us = calls.prefill.to_numpy(float)
    batches, alone = calls.n_decode.to_numpy(), calls.decode.to_numpy(float)
    context = batches * calls.kv_decode.to_numpy(float)
    blocks = -(-calls.prefill_chunk.to_numpy() // BLOCK_ROWS)
    decodes = np.zeros(len(us))
    for batch in np.unique(batches):
        of_batch = batches == batch
        decodes[of_batch] = rule.decode_us(int(batch), context[of_batch], alone[of_batch])
    return us + decodes + rule.block_us() * batches * blocks


def errors(name: str, calls: pd.DataFrame, us: np.ndarray) -> Iterator[dict[str, Any]]:
    """One line for the rule, and for each simpler one."""
    measured = calls.time_us.to_numpy(float)
    apart = (calls.decode + calls.prefill).to_numpy(float)
    for rule, simulated in (("rule", us), ("sum", apart), (f"{FORMER_FACTOR} x sum", FORMER_FACTOR * apart)):
        off = simulated / measured - 1
        found = {"median_abs": float(np.median(np.abs(off))), "median": float(np.median(off))}
        yield {"table": name, "calls": len(calls), "by": rule, **found}


def main(arguments: list[str] | None = None) -> int:
    """Read and print; returns 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m tools.profiles.mixed_calls", description=__doc__.splitlines()[0])
    parser.add_argument(
        "prefixes", type=Path, nargs="+", metavar="PREFIX", help="path of a table up to _attention.csv.gz"
    )
    parser.add_argument("--gpu", required=True, help="GPU with a profile")
    parser.add_argument("--model", required=True, help="preset of the model, or its config.json")
    parser.add_argument("--backend", choices=sorted(BACKENDS), help="instead of vLLM's default")
    options = parser.parse_args(arguments)
    try:
        sheet, model = gpu(options.gpu), model_spec(options.model)
        backend = BACKENDS[options.backend] if options.backend else attention_backend(model, sheet, Deployment())
        for prefix in options.prefixes:
            calls = mixed_calls(attention_table(prefix))
            print_rows(list(errors(prefix.name, calls, rule_us(calls, model, sheet, backend))))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
