"""Types of settings with their bounds.

The bounds are far beyond any real machine, and within the range of int64 ticks and tables.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import BeforeValidator, Field

#: Up to 18 digits, so that every number is finite.
_PLAIN = re.compile("[0-9]{1,18}")
_SHORT = re.compile("([0-9]{1,18}(?:[.][0-9]{1,18})?)([kmgt])|([0-9]{1,18})([KMGT])")
_SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def human_readable_int(text: str) -> int | None:
    """A number of tokens or bytes as vLLM reads it: ``16k`` is 16,000, ``16K`` is 16,384, and ``25.6k`` is 25,600.

    As in vLLM, only a decimal suffix (k, m, g, t) follows a fraction, and what remains of a fraction is cut off
    (vllm-project/vllm, ``vllm/utils/argparse_utils.py``).

    Returns:
        None if the text is neither of these nor plain digits.
    """
    found = _SHORT.fullmatch(text)
    if found is None:
        return int(text) if _PLAIN.fullmatch(text) else None
    decimal, suffix, whole, binary = found.groups()
    return int(float(decimal) * _SUFFIXES[suffix]) if suffix else int(whole) * _SUFFIXES[binary]


def _without_suffix(value: Any) -> Any:
    """The number of a text with a suffix; pydantic checks everything else."""
    return human_readable_int(value) if isinstance(value, str) and _SHORT.fullmatch(value) else value


@dataclass(frozen=True, slots=True)
class Tried:
    """Beside the type of a setting: a value unlike its default that shows in a small run, which the type does not say. Tests try it
    where no switch or choice does."""

    value: Any


@dataclass(frozen=True, slots=True)
class AlwaysTaken:
    """Beside the type of a setting that is refused in no run, though some do not read it: why."""

    why: str


Count = Annotated[int, Field(ge=1, le=2**31)]
Replicas = Annotated[int, Field(ge=1, le=1024)]
#: Programs add small numbers to it, for runs of their own.
Seed = Annotated[int, Field(ge=0, le=2**62)]
Jobs = Annotated[int, Field(ge=1, le=2**16)]
#: Runs of the same settings with other seeds.
Seeds = Annotated[int, Field(ge=1, le=1000)]
Tokens = Annotated[int, BeforeValidator(_without_suffix), Field(ge=1, le=2**31)]
Blocks = Annotated[int, Field(ge=1, le=2**26)]
BlockSize = Annotated[int, Field(ge=1, le=65_536)]
Gibibytes = Annotated[float, Field(ge=0, le=65_536)]
#: Factors on step times that can be given, and that are tried where one is fitted.
LEAST_SCALE, MOST_SCALE = 1e-3, 1e3
Scale = Annotated[float, Field(ge=LEAST_SCALE, le=MOST_SCALE)]
Seconds = Annotated[float, Field(ge=0, le=8.0e6)]
