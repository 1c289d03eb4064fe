"""Calibration files: the operations of one device, measured on it or fitted to published measurements.

{"schema_version": 1, "kind": "calibration" | "profile", "device": {"name": ...}, "source": "...", "dtype": "fp16",
 "ops": {"gemm": {"coefficients": {...}, "residuals": {...}, "fit": {...}}, ...}, "points": [...]}

``"kv_cache_dtype": "fp8"`` of a calibration is the number format of the measured KV cache; "auto", the default, is that of the
activations. Optional: ``"repeated_reads": 0.3``, the time of a repeated read of KV over that of a first read. Decodes read a block once for each
block table that names it, and all but the first time it may come from the last-level cache. 1 where it was not measured.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from copy import copy
from dataclasses import field, replace
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..spec.deployment import dtype_bits
from ..types.errors import SettingError
from ..types.user_files import content_of
from ..types.validation import complaint
from .op_model import Coefficients, OpModel
from .operations import OPERATIONS, OpName, smallest_call

PROFILES = Path(__file__).parent / "profiles"
SCHEMA_VERSION = 1
if TYPE_CHECKING:
    _Known = OpName
else:
    _Known = Literal[tuple(OPERATIONS)]
#: Limit of the shortest call and of the time per piece: a thousand seconds. Larger values are in another unit.
MOST_US = 1e9
#: Limits of rates. The upper one is generous: a bound that no measured call reached may be fitted far above reality.
LEAST_PER_S, MOST_PER_S = 1e6, 1e21
#: Of the time of a step with prompts, which is fitted to tokens instead of bytes.
LEAST_TOKENS_PER_S = 1e3


@dataclass(frozen=True, config=ConfigDict(extra="ignore"))
class _File:
    schema_version: Literal[1]
    kind: Literal["calibration", "profile"]
    source: str
    ops: dict[_Known, OpModel]
    device: dict[str, Any] = field(default_factory=dict)
    dtype: str = "fp16"
    kv_cache_dtype: Literal["auto", "fp8"] = "auto"
    repeated_reads: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] = 1.0


_FILE = TypeAdapter(_File)


class Calibration:
    """The content of a calibration file.

    Attributes:
        name: Name of the file, without its folder.
        sha256: Hash of its bytes.
        kind: "calibration" if measured on the device, "profile" if fitted to published tables.
        device: Description of the device.
        source: Source of the numbers.
        dtype: Number format of the measured activations and weights.
        kv_cache_dtype: Number format of the measured KV cache: auto is that of the activations.
        ops: Models by name of the operation.
        repeated_reads: Time of a repeated read of KV over that of a first read; 1 without a measurement.
    """

    def __init__(self, text: bytes, name: str) -> None:
        """
        Raises:
            UserError: The text is no calibration; names the field, its value and the remedy.
        """
        try:
            content = _FILE.validate_json(text)
        except ValidationError as error:
            raise complaint(name, error) from None
        for operation, model in content.ops.items():
            _check_axes(f"{name}: ops.{operation}.residuals.axes", operation, model)
            _check_times(f"{name}: ops.{operation}.coefficients", operation, model.coefficients)
        self.name, self.sha256 = name, hashlib.sha256(text).hexdigest()
        self.kind, self.device, self.source = content.kind, content.device, content.source
        self.dtype, self.ops, self.repeated_reads = content.dtype, content.ops, content.repeated_reads
        self.kv_cache_dtype: str = content.kv_cache_dtype

    def kv_refusal(self, kv_dtype: str) -> str | None:
        """The reason why a calibration has no step times for a KV cache in this number format; None if it has.

        A calibration is measured over a KV cache in one format. A profile scales the reads of other formats by their
        bytes.
        """
        own = "auto" if dtype_bits(kv_dtype) == 16 else kv_dtype
        if self.kind == "profile" or own == self.kv_cache_dtype:
            return None
        return f"was measured with --kv-cache-dtype {self.kv_cache_dtype}, and the KV cache of this run is {kv_dtype}"

    def in_format(self, dtype: str, kv_cache_dtype: str) -> Calibration:
        """The same calls over weights and a KV cache of other number formats, by their bytes; the file's hash stays.

        Rates of arithmetic and the shortest calls stay as they were measured: what another format's units or conversions take is not known.
        """
        found, times = copy(self), dtype_bits(dtype) / dtype_bits(self.dtype)
        found.dtype, found.kv_cache_dtype = dtype, kv_cache_dtype
        if times != 1:
            found.ops = {
                name: replace(model, coefficients=model.coefficients.with_bytes(times))
                for name, model in self.ops.items()
            }
        return found

    def scaled(self, names: Iterable[str], factor: float) -> Calibration:
        """A copy in which the calls of the named operations take ``factor`` times as long; ``sha256`` stays that of the
        file."""
        found = copy(self)
        longer = {name: self.ops[name] for name in names if name in self.ops}
        found.ops = self.ops | {
            name: replace(model, coefficients=model.coefficients.scaled(factor)) for name, model in longer.items()
        }
        return found

    def require(self, names: Iterable[str]) -> None:
        """
        Raises:
            SettingError: The calibration lacks one of these operations.
        """
        missing = [name for name in names if name not in self.ops]
        if missing:
            remedy = f"has no model of {', '.join(missing)}; calibrate again with all operations, or leave --cost out"
            raise SettingError("cost", self.name, remedy)


def read(path: str | Path, field: str = "cost") -> Calibration:
    """Read a calibration file.

    Args:
        field: Setting that names it, for the error.

    Raises:
        UserError: The file cannot be read, or is no calibration.
    """
    return parsed(content_of(path, field), Path(path).name)


@lru_cache(maxsize=32)
def parsed(text: bytes, name: str) -> Calibration:
    """The calibration of these bytes. Each simulation asks for it, and reading a profile takes longer than a short run."""
    return Calibration(text, name)


@cache
def profile_names() -> tuple[str, ...]:
    """GPUs with a profile in the package."""
    return tuple(sorted(path.stem for path in PROFILES.glob("*.json")))


@cache
def profile(gpu: str) -> Calibration:
    """The profile of a GPU from the package. Each simulation asks for it, and files of the package do not change.

    Raises:
        SettingError: The package has no profile of this GPU.
    """
    if gpu not in profile_names():
        remedy = f"no profile of {gpu} comes with the package ({', '.join(profile_names())} have one); use roofline"
        raise SettingError("cost", "fitted", remedy)
    path = PROFILES / f"{gpu}.json"
    return parsed(path.read_bytes(), path.name)


def _check_axes(where: str, operation: OpName, model: OpModel) -> None:
    known = OPERATIONS[operation].knots
    for axis in model.residuals.axes if model.residuals else ():
        if axis not in known:
            raise SettingError(where, axis, f"one of {', '.join(known)}" if known else f"{operation} has no axes")


def _check_times(where: str, operation: OpName, coefficients: Coefficients) -> None:
    """Refuse coefficients that give a call no time, or an impossible time."""
    for field_name in ("t0_us", "each_us"):
        if (us := getattr(coefficients, field_name)) > MOST_US:
            raise SettingError(f"{where}.{field_name}", us, f"must be at most {MOST_US:g} microseconds")
    for field_name in ("flops_per_s", "bytes_per_s"):
        rate = getattr(coefficients, field_name)
        least = LEAST_TOKENS_PER_S if operation == "prefill_step" else LEAST_PER_S
        if rate is not None and not least <= rate <= MOST_PER_S:
            remedy = f"must be from {least:g} to {MOST_PER_S:g} a second"
            raise SettingError(f"{where}.{field_name}", rate, remedy)
    if operation == "mixed_attention" and coefficients != Coefficients(each_us=coefficients.each_us):
        raise SettingError(
            where, operation, "has one coefficient, each_us: a factor on the time of the two calls apart"
        )
    work = smallest_call(operation)
    if not coefficients.us(work) > 0:
        kinds = {"flops_per_s": work.flops, "bytes_per_s": work.bytes, "each_us": work.pieces}
        known = ["t0_us", *(kind for kind, amount in kinds.items() if amount)]
        given = {name: value for name, value in vars(coefficients).items() if value is not None}
        raise SettingError(where, given, f"calls take no time; give {' or '.join(known)} above 0")
