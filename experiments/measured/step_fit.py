"""Fits step times of a server to its recorded steps; ``sim.cost.steps`` has the formula.

A slot that a step reads again, as its block is in the tables of several decoding sequences, takes from 0 times to once the time of
a first read (``repeated_reads``); once where no step has any.

A step's time is the time from its beginning to the beginning of the next one: host work between two steps is part of it.
Before an idle time it ends with its own end. The fit minimises the sum of squared relative errors, with coefficients of
0 or more (``scipy.optimize.nnls``); its sum over all steps is then scaled to the measured one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ...gpu.calibrate.fitting import require_scipy
from ...sim.cost.steps import KIND, MOST_TOKENS_LOG2, SCHEMA_VERSION
from ...sim.recording.probe import ProbedStep
from ...sim.types.errors import UserError

#: Fewest steps to fit to, and the longest time between two steps that is part of the first one: longer ones are idle.
LEAST_STEPS, MOST_GAP_NS = 100, 50_000_000
_SCALARS = ("base_us", "row_us", "context_us", "chunk_us", "pair_us")


def fitted(header: Mapping[str, Any], steps: Sequence[ProbedStep], source: str) -> dict[str, Any]:
    """The content of a cost file (``sim.cost.steps``), fitted to steps of a server.

    Args:
        header: First line of the probe's file.
        source: Origin of the steps.

    Raises:
        UserError: Too few steps.
        MissingExtra: scipy is not installed.
    """
    server = {name: header[name] for name in ("vllm", "model", "max_num_seqs", "max_num_batched_tokens")}
    about = {"schema_version": SCHEMA_VERSION, "kind": KIND, "source": source, "server": server}
    return about | fit_steps(step_table(steps))


def step_table(steps: Sequence[ProbedStep]) -> dict[str, np.ndarray]:
    """Columns of the steps that computed tokens, but the last, int64 [steps]: arguments of a step's cost, and its ns."""
    rows = []
    for step, after in zip(steps, steps[1:]):
        if step.tokens:
            gap = after.begin_ns - step.end_ns
            ns = (after.begin_ns if gap <= MOST_GAP_NS else step.end_ns) - step.begin_ns
            decodes = sum(tokens for _, tokens in step.tokens) - step.prefill_tokens
            rows.append(
                (decodes, step.decode_context, step.repeated_slots, step.prefill_tokens, step.prefill_pairs, ns)
            )
    names = ("decodes", "decode_context", "repeated_slots", "prefill_tokens", "prefill_pairs", "ns")
    return dict(zip(names, np.array(rows, dtype=np.int64).reshape(-1, len(names)).T, strict=True))


def fit_steps(table: dict[str, np.ndarray]) -> dict[str, Any]:
    """The ``coefficients`` of a file of fitted steps, ``repeated_reads``, and the ``fit``: steps, and errors in sample.

    Raises:
        UserError: Too few steps.
        MissingExtra: scipy is not installed.
    """
    count = len(table["ns"])
    if count < LEAST_STEPS:
        raise UserError(f"the recording has {count} complete steps; record at least {LEAST_STEPS}")
    us, tokens = table["ns"] / 1e3, table["decodes"] + table["prefill_tokens"]
    knots = [0, *(1 << power for power in range(MOST_TOKENS_LOG2))]
    knots = [knot for knot in knots if knot < tokens.max()]
    ends = [*knots[1:], np.inf]
    columns = [
        np.ones(count), table["decodes"], table["decode_context"], table["prefill_tokens"] > 0, table["prefill_pairs"],
        *(np.clip(tokens - start, 0, end - start) for start, end in zip(knots, ends, strict=True)),
        # What a first read takes more than a repeated one: never less than nothing.
        np.where(table["repeated_slots"].any(), table["decode_context"] - table["repeated_slots"], 0),
    ]  # fmt: skip
    matrix = np.stack(columns, axis=1).astype(float)
    found = least_relative(matrix, us)
    errors = matrix @ found / us - 1
    coefficients = dict(zip(_SCALARS, found[: len(_SCALARS)].tolist(), strict=True))
    repeated_us = coefficients["context_us"]
    coefficients["context_us"] = first_us = repeated_us + float(found[-1])
    return {
        "coefficients": coefficients | {"token_us": found[len(_SCALARS) : -1].tolist()},
        "repeated_reads": repeated_us / first_us if first_us else 1.0,
        "fit": {
            "steps": count,
            "median_error": float(np.median(np.abs(errors))),
            "p90_error": float(np.percentile(np.abs(errors), 90)),
            "share_of_time_unexplained": float(np.abs(matrix @ found - us).sum() / us.sum()),
        },
    }


def least_relative(matrix: np.ndarray, us: np.ndarray) -> np.ndarray:
    """Coefficients of 0 or more with the least squares of relative errors, scaled so that the sum over all steps is the measured one.

    Args:
        matrix: float [steps, terms].
        us: float [steps], measured.

    Raises:
        MissingExtra: scipy is not installed.
    """
    require_scipy()
    from scipy.optimize import nnls

    # Columns of one size: their units differ by nine orders of magnitude.
    size = np.maximum(np.abs(matrix).max(axis=0), 1e-12)
    found = nnls(matrix / size / us[:, None], np.ones(len(us)))[0] / size
    return np.asarray(found * (us.sum() / (matrix @ found).sum()))
