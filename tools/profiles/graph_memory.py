"""The logged memory of CUDA graphs beside what ``sim.spec.startup.cuda_graphs`` computes, and the fit of its constants.

    python -m tools.profiles.graph_memory

prints each log, the fitted constants, and the errors of each card's logs by the constants that all other cards give.

The constants minimise the sum of the logs' relative errors, on a logarithmic scale: each is multiplied or divided by ever smaller steps
while that lowers the sum.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from math import log
from pathlib import Path
from typing import Any, NamedTuple

from fragmeter.sim.spec.gpu import GIB
from fragmeter.sim.spec.startup.cuda_graphs import (
    BOTH,
    FITTED,
    FULL,
    MIB,
    PIECEWISE,
    Captures,
    Fitted,
    GraphShape,
    Reduction,
    captured_bytes,
    estimated_bytes,
)
from fragmeter.sim.spec.startup.estimate import Estimate

FILE = Path(__file__).with_name("graphs.json")
#: Logs have two decimals.
_ROUNDING = GIB // 200
_FIRST_STEP, _LAST_STEP = 0.1, 0.01


class Logged(NamedTuple):
    """A log: what capture took, or vLLM's own estimate of it, and ours."""

    card: str
    model: str
    vllm: str
    kind: str
    logged_bytes: int
    graphs: Captures
    shape: GraphShape

    def bytes(self, fitted: Fitted = FITTED) -> Estimate:
        """What is computed."""
        if self.kind == "captured":
            return captured_bytes(self.graphs, self.shape, fitted)
        # The temporary tensors of gated delta nets are those of a step, which these logs do not give.
        return estimated_bytes(self.graphs, self.shape, 0)

    @property
    def holds(self) -> bool:
        """Whether the interval holds the log."""
        found = self.bytes()
        return found.low - _ROUNDING <= self.logged_bytes <= found.high + _ROUNDING


@cache
def logs(kind: str) -> tuple[Logged, ...]:
    """All logs of ``graphs.json`` of a kind: "captured" or "estimated"."""
    cases = json.loads(FILE.read_text("utf-8"))["cases"]
    return tuple(
        Logged(
            case["card"], case["model"], case["vllm"], kind, int(case[f"{kind}_gib"] * GIB), _graphs(case), _shape(case)
        )
        for case in cases
        if f"{kind}_gib" in case
    )


def _graphs(case: dict[str, Any]) -> Captures:
    pieces, full = range(1, case["piecewise"] + 1), range(1, case["full"] + 1)
    mode = PIECEWISE if not case["full"] else BOTH if case["piecewise"] else FULL
    return Captures(mode, tuple(pieces), (*full[:-1], case["largest_full"]) if full else ())


def _shape(case: dict[str, Any]) -> GraphShape:
    return GraphShape(
        minor=int(case["vllm"].split(".")[1]),
        num_layers=case["layers"],
        reduction=Reduction[case["reduction"].upper()],
        experts=case["experts"],
        blackwell=case["blackwell"],
        output_bytes=4 * case["heads"] // case["ranks"] * case["head_dim"] if case["hopper"] else 0,
        flashinfer=case["flashinfer"],
    )


def fit(found: Sequence[Logged], start: Fitted = FITTED) -> Fitted:
    """The constants with the least sum of relative errors of these logs."""

    def error(fitted: Fitted) -> float:
        return sum(abs(log(each.bytes(fitted).likely / each.logged_bytes)) for each in found)

    best, step = start, _FIRST_STEP
    least = error(best)
    while step > _LAST_STEP:
        before = least
        for name in Fitted._fields:
            for factor in (1 + step, 1 / (1 + step)):
                tried = best._replace(**{name: getattr(best, name) * factor})
                if (total := error(tried)) < least:
                    best, least = tried, total
        if least == before:
            step /= 2
    return best


def left_out() -> dict[str, list[float]]:
    """Errors of the logs of each card by the constants of all others, in GiB."""
    found = logs("captured")
    errors: dict[str, list[float]] = {}
    for card in sorted({each.card for each in found}):
        fitted = fit([each for each in found if each.card != card])
        errors[card] = [(each.bytes(fitted).likely - each.logged_bytes) / GIB for each in found if each.card == card]
    return errors


def main() -> None:
    """Print the tables."""
    for each in (*logs("captured"), *logs("estimated")):
        low, likely, high = (size / GIB for size in each.bytes())
        mark = "" if each.holds else "   outside"
        print(
            f"{each.vllm:8} {each.card:32} {each.model:24} {each.kind:9} {each.logged_bytes / GIB:6.2f}"
            f" {likely:6.2f} ({low:.2f} to {high:.2f}){mark}"
        )
    for name, value in fit(logs("captured"))._asdict().items():
        print(f"{name:14} {value if value < 1 else value / MIB:.3f}")
    for card, errors in left_out().items():
        print(f"without {card:32} " + " ".join(f"{error:+.2f}" for error in errors))


if __name__ == "__main__":
    main()
