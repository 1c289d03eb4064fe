"""Metrics of speculative decoding, by the keys of ``vllm bench serve``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from ..runs.run import Run
from ..types.sums import total


def speculative_decoding(drafts: Mapping[str, np.ndarray] | None, most: int) -> dict[str, Any] | None:
    """How many drafts were accepted; None without speculative decoding.

    A draft here is that of one sequence in one step, and has up to ``num_speculative_tokens`` tokens. As in vLLM, accepted tokens
    count also past the end of an output, and drafts that only pad a step count as rejected. The rate is in percent, and the length
    counts the token that each step computes besides (``vllm/benchmarks/serve.py``).

    Args:
        drafts: Columns of ``ledger.DRAFT``.
        most: Draft tokens of a sequence and step, at most.
    """
    if drafts is None:
        return None
    number, drafted, accepted = len(drafts["index"]), total(drafts["drafts"]), total(drafts["accepted"])
    by_place = [int((drafts["accepted"] > place).sum()) for place in range(most)]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted if drafted else 0.0,
        "spec_decode_acceptance_length": 1 + accepted / number if number else 0.0,
        "spec_decode_num_drafts": number,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [count / number if number else 0.0 for count in by_place],
    }


def most_drafts(run: Run) -> int:
    """Draft tokens of a sequence and step in a run, at most."""
    speculation = run.replica.memory.speculation
    return 0 if speculation is None else speculation.config.num_speculative_tokens
