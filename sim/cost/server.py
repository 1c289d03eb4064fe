"""The constants of a server: the time of a request and of a step beside the operations that a GPU computes.

    request   outside_ms           HTTP, tokeniser and network, before the first step and after the last token
    step      operations + step_us + host_us                    host work first, then the GPU's
              max(operations + step_us, host_us)                asynchronous scheduling: the host works on the next step
                                                                while the GPU computes this one

``operations`` is the step of a cost model without what that assumes beside them (``overhead_ticks``). Where no constants are
known, asynchronous scheduling hides the host work that it assumes (``host_ticks``). ``step_us`` is time
that the GPU itself loses in a step: launches and gaps between kernels, inputs, sampling. The constants hold for one card,
model, parallelism, release and cost model, and are refused for another one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from copy import copy
from os.path import basename
from typing import Annotated, Literal, Protocol, cast

from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass

from ..types import ticks
from ..types.errors import SettingError
from ..types.user_files import content_of
from ..types.validation import complaint
from .base import StepCost, StepParts, among, coefficient, effective_context, saved_ticks

#: A minute, and a second: larger values are in another unit.
OutsideMs = Annotated[float, Field(ge=0, le=60_000, allow_inf_nan=False)]
StepUs = Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)]
#: Metrics with an error in a file, and a relative error.
Metric = Literal["output_throughput", "mean_ttft_ms", "mean_tpot_ms", "mean_e2el_ms"]
Error = Annotated[float, Field(ge=-1, allow_inf_nan=False)]
#: Settings that a file has, all of them: constants of a server that is not described fit none.
SERVER_SETTINGS = (
    "gpu", "model", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "enable_expert_parallel",
    "quantization", "kv_cache_dtype", "enforce_eager", "async_scheduling", "vllm_release", "cost",
)  # fmt: skip


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerConstants:
    """Time that a server adds to the operations of the GPU.

    Attributes:
        outside_ms: Milliseconds of each request outside the engine.
        step_us: Microseconds of each step on the GPU.
        host_us: Microseconds of each step on the host. None if unknown: then the host time is that of the cost model,
            or hidden under asynchronous scheduling.
    """

    outside_ms: OutsideMs = 0.0
    step_us: StepUs = 0.0
    host_us: StepUs | None = None


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class ServerFit:
    """The benchmark that constants were fitted to, and the errors of its simulation: simulated over measured, less one.

    Attributes:
        benchmark_sha256: Hash of the benchmark's file.
        requests: Number of answered requests.
        request_rate: Requests/s that the client sent; None if all were sent at once, or whenever one was answered.
        max_concurrency: Requests in flight at the client, at most; None for no limit.
        errors_before, errors: Without the constants, and with them, by metric, as far as the benchmark has it.
    """

    benchmark_sha256: Annotated[str, Field(pattern="^[0-9a-f]{64}$")]
    requests: Annotated[int, Field(ge=1)]
    request_rate: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None
    max_concurrency: Annotated[int, Field(ge=1)] | None
    errors_before: dict[Metric, Error]
    errors: dict[Metric, Error]


@dataclass(frozen=True, config=ConfigDict(extra="forbid"))
class Server:
    """A file of constants of one server.

    Attributes:
        source: The measurements that the constants were fitted to.
        server: Settings that a run must have for the constants to hold, by name.
        constants: The constants.
        fit: The benchmark and the errors of the fit; None if the file does not record them.
        name: Name of the file.
        sha256: Hash of its bytes.
    """

    schema_version: Literal[1]
    kind: Literal["server"]
    source: str
    server: dict[str, str | bool | int | None]
    constants: ServerConstants
    fit: ServerFit | None = None
    name: str = ""
    sha256: str = ""

    @property
    def cost(self) -> str:
        """The cost model that the constants were fitted with."""
        return str(self.server["cost"])

    def require(self, settings: Mapping[str, object]) -> None:
        """Refuse a replica that is not this server.

        Args:
            settings: Settings of the replica by name; settings that it lacks are not compared.

        Raises:
            SettingError: A setting differs; the message has its name, both values and the remedy.
        """
        for field, value in self.server.items():
            if field in settings and settings[field] != value:
                remedy = (
                    f"{self.name} was fitted with {field} = {value!r}; {_advice(field, value)}, or leave --server out"
                )
                raise SettingError(field, settings[field], remedy)


def _advice(field: str, value: str | bool | int | None) -> str:
    """How to give a setting that value on the command line."""
    flag = field.replace("_", "-")
    if value is None:
        return f"leave --{flag} out"
    if isinstance(value, bool):
        return f"give --{flag}" if value else f"give --no-{flag}"
    return f"give --{flag} {value}"


_FILE = TypeAdapter(Server)


def read_server(path: str) -> Server:
    """Read a file of server constants.

    Raises:
        UserError: The file cannot be read, is of another kind, or lacks a setting. The message has field, value and
            remedy.
    """
    text, name = content_of(path, "server"), basename(path)
    try:
        found = _FILE.validate_json(text)
    except ValidationError as error:
        raise complaint(name, error, "file of a server's constants") from None
    missing = next((field for field in SERVER_SETTINGS if field not in found.server), None)
    if missing is not None:
        remedy = "is missing; write the file anew with fragmeter validate --against FILE --save-server FILE"
        raise SettingError(f"{name}: server.{missing}", None, remedy)
    return Server(**vars(found) | {"name": name, "sha256": hashlib.sha256(text).hexdigest()})


class OperationCost(StepCost, Protocol):
    """A cost model that knows what it assumes beside the operations of a step."""

    def overhead_ticks(self) -> int:
        """That part of every step."""

    def host_ticks(self) -> int:
        """Of it the work of the host, as far as it is an assumption and not a measurement of this device."""


class ServedCost:
    """Step times of a cost model on a server with known constants. See ``StepCost``; copies and swaps are not changed.

    Args:
        inner: The cost model of the operations on the GPU.
        server: The constants; None if unknown.
        asynchronous: Whether the server decides a step while the step before it runs.
    """

    def __init__(self, inner: OperationCost, server: Server | None, asynchronous: bool) -> None:
        self.inner, self.server, self.name = inner, server, inner.name
        self.swap_out_ticks, self.swap_in_ticks = inner.swap_out_ticks, inner.swap_in_ticks
        self.copy_ticks, self.effective_context = inner.copy_ticks, effective_context(inner)
        self.saved_ticks = saved_ticks(inner)
        self._least = 1
        self.outside_ticks: int | None = None
        if server is None:
            self._more = -inner.host_ticks() if asynchronous else 0
            return
        constants, assumed = server.constants, inner.overhead_ticks()
        self.outside_ticks = round(constants.outside_ms * ticks.PER_MS)
        host = None if constants.host_us is None else round(constants.host_us * ticks.PER_US)
        # What a step takes more than the inner one, and what it takes at least.
        self._more = round(constants.step_us * ticks.PER_US) - assumed
        if asynchronous:
            self._least = max(1, host or 0)
        else:
            self._more += assumed if host is None else host

    def among(self, tokens: Sequence[int]) -> StepCost:
        """See ``base.among``."""
        found = copy(self)
        found.inner = cast(OperationCost, among(self.inner, tokens))
        return found

    def step_ticks(self, decodes: int, decode_context: int, prefill_tokens: int, prefill_pairs: int) -> int:
        """See ``StepCost``."""
        operations = self.inner.step_ticks(decodes, decode_context, prefill_tokens, prefill_pairs)
        return max(self._least, operations + self._more)

    def decode_line(self, decodes: int, context: int) -> tuple[int, int, int | None]:
        """See ``StepCost``; a knot more, where the GPU begins to take longer than the host."""
        base, slope, until = self.inner.decode_line(decodes, context)
        base += self._more
        if base + slope * context >= self._least:
            return base, slope, until
        if slope:
            # The first context at which the line reaches the least time.
            reached = -(-(self._least - base) // slope)
            until = reached if until is None else min(until, reached)
        return self._least, 0, until

    def parts(self, inner: StepParts) -> StepParts:
        """``StepParts`` of this cost, from those of the inner one."""
        return inner._replace(more=self._more, least=self._least)

    def describe(self) -> dict[str, object]:
        """See ``StepCost``."""
        if self.server is None:
            hidden = coefficient(self.inner.host_ticks(), "ticks", "the cost model; hidden by asynchronous scheduling")
            return {**self.inner.describe(), "host_hidden": hidden}
        source, constants = self.server.source, self.server.constants
        terms = {"outside_ms": (constants.outside_ms, "ms"), "step_us": (constants.step_us, "us")}
        if constants.host_us is not None:
            terms["host_us"] = (constants.host_us, "us")
        found = {f"server.{name}": coefficient(value, unit, source) for name, (value, unit) in terms.items()}
        return {**self.inner.describe(), "server": self.server.name, "server_sha256": self.server.sha256, **found}
