"""Commands under another builtin ``sum``: from left to right, as up to Python 3.11, or with an unlike last digit.

python other_sums.py KIND FOLDER      runs COMMANDS, which write into FOLDER; KIND builtin keeps the interpreter's own

Python 3.12 sums floats with a compensation, so that a last digit may be another one. No result may depend on it.
"""

from __future__ import annotations

import builtins
import sys
from collections.abc import Callable, Iterable
from functools import reduce
from math import fsum, inf, nextafter
from operator import add
from pathlib import Path
from typing import Any

SMALL = ["--num-prompts", "60", "--request-rate", "4"]
DRAFTS = '{"method":"ngram","num_speculative_tokens":3,"rejection_sample_method":"synthetic","synthetic_acceptance_length":2.1}'
LLAMA = ["--model", "llama-3.1-8b", "--gpu", "h100-80gb"]
#: Of every kind of result, with the memories and costs that sum most.
COMMANDS: dict[str, list[str]] = {
    "llama-cpp": ["simulate", "--policy", "llama-cpp", *SMALL],
    "orca": ["simulate", "--policy", "orca-pow2", *SMALL],
    "windows": ["simulate", "--model", "gemma-3-27b", "--gpu", "h200", "--policy", "vllm-v1", *SMALL],
    "experts": ["simulate", "--model", "gpt-oss-20b", "--gpu", "h200", "--policy", "vllm-v1", "--cost", "roofline", *SMALL],
    "drafts": ["simulate", *LLAMA, "--policy", "vllm-v1", "--speculative-config", DRAFTS, *SMALL],
    "fleet": ["simulate", *LLAMA, "--policy", "vllm-v1", "--num-replicas", "2", *SMALL],
    "sweep": ["sweep", "--grid", "policy=orca-max,vllm-v1", "--goodput", "ttft:2000", "--jobs", "1", *SMALL],
    "plan": [
        *("plan", *LLAMA, "--goodput", "ttft:500", "--request-rate", "30", "--num-prompts", "100", "--seeds", "4", "--jobs", "1"),
    ],
}  # fmt: skip


def left_to_right(items: Iterable[Any], /, start: Any = 0) -> Any:
    """As up to Python 3.11."""
    return reduce(add, items, start)


def unlike(items: Iterable[Any], /, start: Any = 0) -> Any:
    """A sum of floats differs in its last digit from the exact one; every other sum is as ever."""
    found = [*items]
    if len(found) > 1 and all(type(each) in (int, float) for each in (start, *found)) and float in map(type, found):
        return nextafter(fsum((start, *found)), inf)
    return left_to_right(found, start)


KINDS: dict[str, Callable[..., Any]] = {"builtin": sum, "left_to_right": left_to_right, "unlike": unlike}


def main(kind: str, folder: str) -> None:
    """Run every command."""
    from fragmeter.experiments.cli.app import DONE, status

    builtins.sum = KINDS[kind]
    for name, command in COMMANDS.items():
        if (code := status([*command, "--out", str(Path(folder) / name)])) != DONE:
            raise SystemExit(f"{name}: exit status {code}")


if __name__ == "__main__":
    main(*sys.argv[1:])
