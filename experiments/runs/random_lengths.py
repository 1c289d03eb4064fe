"""Flags for requests of given lengths, by the names of ``vllm bench serve``."""

from __future__ import annotations

from typing import Annotated

from cyclopts import Parameter
from pydantic import ConfigDict, Field
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.types.bounds import Tokens
from ...sim.types.errors import SettingError
from ...sim.types.user_files import json_value
from ...traces.synthesis.random_load import RandomLoad

#: Defaults of ``vllm bench serve`` for what is left out of a load that is given.
DEFAULT_INPUT_LEN, DEFAULT_OUTPUT_LEN = 1024, 128
_MOST_CV = 100.0


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class RandomLengths:
    """Requests of given lengths.

    Attributes:
        input_len: Draw requests with prompts of this many tokens on average, without random_prefix_len. By default 1024,
            as in vLLM, if another of these flags is given.
        output_len: Mean tokens of the outputs; by default 128, as in vLLM.
        random_range_ratio: As in vLLM: lengths are uniform from (1 - ratio) to (1 + ratio) times their mean, with a ratio from 0
            to below 1; '{"input": 0.3, "output": 0.5}' gives one to each. By default 0: all are equal.
        random_cv: Lognormal lengths with this coefficient of variation in place of uniform ones; '{"input": 1, "output":
            0.5}' gives one to each.
        random_prefix_len: As in vLLM: tokens that all prompts begin with, in addition to input_len, such as a system prompt.
    """

    input_len: Annotated[Tokens | None, Parameter(alias="--random-input-len")] = None
    output_len: Annotated[Tokens | None, Parameter(alias="--random-output-len")] = None
    random_range_ratio: float | str | None = None
    random_cv: float | str | None = None
    random_prefix_len: Annotated[int, Field(ge=0, le=2**31)] | None = None

    @property
    def random_load(self) -> RandomLoad | None:
        """The load of these lengths; None if none is given.

        Raises:
            SettingError: A ratio or a coefficient of variation is invalid, or both are given.
        """
        given = [name for name in RandomLengths.__dataclass_fields__ if getattr(self, name) is not None]
        if not given:
            return None
        if self.random_cv is not None and self.random_range_ratio is not None:
            raise SettingError("random_cv", self.random_cv, "excludes random_range_ratio; give one of them")
        ratios = cvs = None
        if self.random_range_ratio is not None:
            ratios = _pair("random_range_ratio", self.random_range_ratio, 1.0, "0 or more and below 1")
        if self.random_cv is not None:
            cvs = _pair("random_cv", self.random_cv, _MOST_CV, f"0 or more and below {_MOST_CV:g}")
        return RandomLoad(
            self.input_len or DEFAULT_INPUT_LEN,
            self.output_len or DEFAULT_OUTPUT_LEN,
            ratios or (0.0, 0.0),
            cvs,
            self.random_prefix_len or 0,
        )


def _pair(field: str, given: float | str, bound: float, allowed: str) -> tuple[float, float]:
    """The values of prompts and of outputs, from one number for both or from a JSON object."""
    remedy = f'must be {allowed}, or such as {{"input": 0.3, "output": 0.5}}'
    try:
        value = json_value(given) if isinstance(given, str) else given
    except ValueError:
        raise SettingError(field, given, remedy) from None
    values = [value.get(name) for name in ("input", "output")] if isinstance(value, dict) else [value, value]
    if isinstance(value, dict) and len(value) != len(values):
        raise SettingError(field, str(given), remedy)
    numbers = [
        each for each in values if isinstance(each, int | float) and not isinstance(each, bool) and 0 <= each < bound
    ]
    if len(numbers) != len(values):
        raise SettingError(field, str(given), remedy)
    return float(numbers[0]), float(numbers[1])
