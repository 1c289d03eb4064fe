"""Options that state how to read a file, where the file does not state it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import ConfigDict, Field, model_validator
from pydantic.dataclasses import dataclass

from ...sim.types.errors import SettingError

#: Default limit on the decompressed size, in bytes: six times the largest public trace.
MOST_INFLATED_BYTES = 8 * 2**30
#: Names in ``columns``.
COLUMNS = ("arrival", "prompt", "output", "max_tokens", "n", "priority", "ignore_eos", "session")


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Reading:
    """Options of trace readers, for files that do not state these facts themselves.

    Attributes:
        skip_bad: Leave out rows with impossible values, and count them, instead of refusing the file.
        tokenizer: A ``tokenizer.json`` that counts the tokens of ShareGPT's texts; default: a quarter of their
            characters.
        columns: Names of the file's columns (or paths of JSON keys) for ours, such as
            ``arrival=created,prompt=usage.input_tokens,output=usage.output_tokens``; also ``max_tokens``, ``n``,
            ``priority``, ``ignore_eos`` and ``session``.
        time_unit: Unit of the trace's times; default: inferred from the format and the values (docs/traces.md).
        timed_trace_chunk_hash_size: Tokens of a full block of ``hash_ids``; default: inferred from the lengths, 512 as
            in Mooncake or 16 as in vLLM and Bailian.
        timed_trace_sec_multiplier: Seconds of one unit of ``timestamp``; default: as ``time_unit``.
        max_inflated_bytes: Most bytes of a decompressed file; a larger file is refused.
    """

    skip_bad: bool = False
    tokenizer: Path | None = None
    columns: str | None = None
    time_unit: Literal["s", "ms", "us", "ns"] | None = None
    timed_trace_chunk_hash_size: Annotated[int, Field(ge=1, le=2**20)] | None = None
    timed_trace_sec_multiplier: Annotated[float, Field(gt=0, le=86_400)] | None = None
    max_inflated_bytes: Annotated[int, Field(ge=1)] = MOST_INFLATED_BYTES

    @property
    def named(self) -> dict[str, str] | None:
        """``columns`` as a mapping from our names to those of the file; None if not given.

        Raises:
            SettingError: An entry is not NAME=COLUMN with a known NAME, or a length is missing.
        """
        if self.columns is None:
            return None
        parts = [part.partition("=") for part in self.columns.split(",")]
        found = {name.strip(): column.strip() for name, _, column in parts}
        known = all(name in COLUMNS and column for name, column in found.items()) and len(found) == len(parts)
        if not known or not {"prompt", "output"} <= found.keys():
            remedy = f"must be NAME=COLUMN,... with prompt and output, of {', '.join(COLUMNS)}"
            raise SettingError("columns", self.columns, remedy)
        return found

    @model_validator(mode="after")
    def _check(self) -> Reading:
        # Refused here if it is wrong.
        _ = self.named
        if self.time_unit is not None and self.timed_trace_sec_multiplier is not None:
            remedy = "excludes timed_trace_sec_multiplier; give one of them"
            raise SettingError("time_unit", self.time_unit, remedy)
        return self
