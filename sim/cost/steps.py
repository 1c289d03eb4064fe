"""Step times of one server, fitted to its recorded steps (``fragmeter calibrate --probe``).

    step = base + tokens(n) + row * decodes + context * read + chunk [prefill] + pair * prefill_pairs
    read = decode_context - (1 - repeated_reads) * repeated_slots

``tokens`` is a curve over the tokens of a step, of straight lines between powers of two. All coefficients are 0 or more.
``repeated_slots`` are those of ``decode_context`` in blocks that the table of another decoding sequence names, too
(``Memory.repeated_slots``): they come from a cache, in the share ``repeated_reads`` of the time of a first read.
The fit holds for the model, the device and the settings of that server, and for nothing else.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Mapping
from dataclasses import field
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..types import ticks
from ..types.errors import SettingError, UserError
from ..types.user_files import json_value
from ..types.validation import complaint
from .base import coefficient, context_of_reads

SCHEMA_VERSION, KIND = 1, "steps"
#: Ends of the lines of the curve over tokens: powers of two.
MOST_TOKENS_LOG2 = 17


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class StepCoefficients:
    """What a step takes, in microseconds.

    Attributes:
        base_us: Any step.
        token_us: Each token of a step beyond 0, 1, 2, 4, 8, ... tokens; the last value holds for all further ones.
        row_us: Each sequence that decodes.
        context_us: Each token of context that decoding sequences attend to, at its first read.
        chunk_us: A step that prefills.
        pair_us: Each causal (query, key) pair of its prefills.
    """

    base_us: float
    token_us: tuple[float, ...]
    row_us: float = 0.0
    context_us: float = 0.0
    chunk_us: float = 0.0
    pair_us: float = 0.0

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            for each in value if isinstance(value, tuple) else (value,):
                if not 0 <= each <= 1e9:
                    raise SettingError(f"coefficients.{name}", each, "must be from 0 to 1e9 microseconds")
        if not self.base_us:
            raise SettingError("coefficients.base_us", self.base_us, "must be above 0: every step takes time")
        if not 0 < len(self.token_us) <= MOST_TOKENS_LOG2:
            remedy = f"must have 1 to {MOST_TOKENS_LOG2} values"
            raise SettingError("coefficients.token_us", len(self.token_us), remedy)


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _Fit:
    p90_error: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None = None


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _File:
    schema_version: Literal[1]
    kind: Literal["steps"]
    source: str
    coefficients: StepCoefficients
    server: dict[str, Any] = field(default_factory=dict)
    outside_ms: float = 0.0
    repeated_reads: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0
    fit: _Fit = _Fit()


_FILE = TypeAdapter(_File)


class FittedSteps:
    """Step times fitted to the recorded steps of one server. See ``StepCost``; a swap is refused, as vLLM V1 has none.

    Args:
        coefficients: The fit.
        about: Further entries of ``describe``.
        outside_ms: Milliseconds of a request outside the server's engine, from the client's measurements; the
            attribute ``outside_ticks`` has them in ticks.
        repeated_reads: Time of a repeated read of KV over that of a first one.
        p90_error: Error of the fit that nine of ten steps do not exceed, simulated over measured, less one; None if it is not known.

    Attributes:
        effective_context: See ``base.effective_context``; None where repeated reads take as long.
    """

    name = "steps"

    def __init__(
        self,
        coefficients: StepCoefficients,
        about: Mapping[str, object] = {},
        outside_ms: float = 0.0,
        repeated_reads: float = 1.0,
        p90_error: float | None = None,
    ) -> None:
        self.coefficients, self._about, self.p90_error = coefficients, dict(about), p90_error
        self.repeated_reads, self.effective_context = repeated_reads, context_of_reads(repeated_reads)
        self.outside_ticks = round(outside_ms * ticks.PER_MS)
        self._row, self._context, self._chunk, self._pair = (
            _ticks(us)
            for us in (coefficients.row_us, coefficients.context_us, coefficients.chunk_us, coefficients.pair_us)
        )
        # Line i is for token counts from ``starts[i]``: (ticks at its start, ticks a token).
        self._starts = [0, *(1 << power for power in range(len(coefficients.token_us) - 1))]
        self._lines: list[tuple[int, int]] = []
        at = _ticks(coefficients.base_us)
        for start, end, us in zip(self._starts, [*self._starts[1:], 0], coefficients.token_us, strict=True):
            self._lines.append((at, _ticks(us)))
            at += _ticks(us) * (end - start)

    def _tokens(self, tokens: int) -> int:
        place = bisect_right(self._starts, tokens) - 1
        at, slope = self._lines[place]
        return at + slope * (tokens - self._starts[place])

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        time = self._tokens(decodes + prefill_tokens) + self._row * decodes + self._context * decode_context
        return time + self._chunk + self._pair * prefill_pairs if prefill_tokens else time

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; one line without end."""
        return self._tokens(decodes) + self._row * decodes, self._context, None

    def swap_out_ticks(self, blocks: int) -> int:
        """See ``StepCost``.

        Raises:
            UserError: Always: nothing was measured.
        """
        raise UserError(
            f"cost = {self.name!r}: has no time for copies of blocks; use roofline, or a policy without them"
        )

    swap_in_ticks = swap_out_ticks
    copy_ticks = swap_out_ticks

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        source = str(self._about.get("source", "fitted to recorded steps"))
        found = vars(self.coefficients) | {
            f"token_us[{place}]": us for place, us in enumerate(self.coefficients.token_us)
        }
        terms = {name: coefficient(us, "us", source) for name, us in found.items() if name != "token_us"}
        if self.effective_context is not None:
            terms["repeated_reads"] = coefficient(self.repeated_reads, "1", source)
        return {"name": self.name, **self._about, **terms}


def is_steps(text: bytes) -> bool:
    """Whether a file is a fit of steps, or claims to be one."""
    try:
        content = json_value(text)
    except ValueError:
        return False
    return isinstance(content, dict) and content.get("kind") == KIND


def read_steps(text: bytes, name: str) -> FittedSteps:
    """The content of a file.

    Raises:
        UserError: It is no fit; names the field, its value and the remedy.
    """
    try:
        content = _FILE.validate_json(text)
    except ValidationError as error:
        raise complaint(name, error) from None
    about: dict[str, object] = {"calibration": name, "sha256": hashlib.sha256(text).hexdigest()}
    about |= {"source": content.source, "server": content.server}
    return FittedSteps(content.coefficients, about, content.outside_ms, content.repeated_reads, content.fit.p90_error)


def _ticks(us: float) -> int:
    return round(us * ticks.PER_US)
