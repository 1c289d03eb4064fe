"""Writes the table of the profiles' errors into docs/limits.md, from the profiles of the package.

python docs/profiles.py [--write]
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from pathlib import Path

from fragmeter.sim.cost.calibration import profile, profile_names

PAGE = Path(__file__).with_name("limits.md")
_MEASURED = ("gemm", "decode_attention", "prefill_attention", "mixed_attention")


def table() -> str:
    """A row for each operation of each card with measured points."""
    return "\n".join(_lines())


def _lines() -> Iterator[str]:
    yield "| card | operation | points | all: median | p95 | held out by | points | median | p95 | bias |"
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for card in profile_names():
        ops = profile(card).ops
        for name in _MEASURED:
            fit = ops[name].fit if name in ops else None
            if not fit:
                continue
            own = [f"{fit['points']:,}", f"{fit['median_error']:.1%}", f"{fit['p95']:.1%}"]
            for axis, held in fit["held_out"].items():
                out = [
                    axis,
                    f"{held['points']:,}",
                    f"{held['median_error']:.1%}",
                    f"{held['p95']:.1%}",
                    f"{held['bias']:+.1%}",
                ]
                yield f"| {' | '.join([card, name, *own, *out])} |"


def page(text: str) -> str:
    """The page with today's table."""
    new, count = re.subn(
        r"(<!-- profiles -->\n).*?(\n<!-- end of profiles -->)",
        lambda at: at[1] + table() + at[2],
        text,
        flags=re.DOTALL,
    )
    if count != 1:
        raise ValueError(
            f"{count} pairs of the markers <!-- profiles --> and <!-- end of profiles -->; there must be one"
        )
    return new


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(page(PAGE.read_text("utf-8")), "utf-8")
    print(table())
