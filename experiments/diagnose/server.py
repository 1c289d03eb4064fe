"""The server of a diagnosis: its command line on a GPU, as it serves and with flags changed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ...sim import Settings
from ...sim.config.settings import settings
from ...sim.cost import default_cost, prices_kv
from ...sim.spec.startup.capacity import Capacity
from ...sim.spec.startup.launch import Launch
from ...sim.types.errors import SettingError, UserError
from ..capacity.uncertainty import step_interval
from ..runs.near_saturation import with_steps
from ..runs.slo_check import compiled_cost
from ..sglang_server.start import started
from ..vllm_serve.line import ServeLine
from ..vllm_serve.log import StartupLog
from ..vllm_serve.start import Started, with_release

#: Flags of a line with their new values; None removes the flag.
Change = Mapping[str, str | bool | None]


#: What says the size of the KV cache of a ``server``, as text; only the first three are the server's own word.
POOL_ORIGINS = {
    "log": "by the start-up log",
    "metrics": "by its metrics",
    "flag": "by its command line",
    "probe": "an estimate, from the blocks of the probe",
    "computed": "an estimate, by {server}'s arithmetic at start",
}


#: Error of a fit from which on it bounds no step from above.
_MOST_ERROR = 1.0


@dataclass(frozen=True)
class Server:
    """A server that starts.

    Attributes:
        started: The line with vLLM's defaults, and a correction by the size of the KV cache that the server itself names.
        cost: Step time; None takes the GPU's profile if it covers the model, else the roofline.
        step_scale: Factor on the step time, fitted to a benchmark; None for 1.
        pool_origin: Key of ``POOL_ORIGINS``.
    """

    started: Started
    cost: str | None = None
    step_scale: float | None = None
    pool_origin: str = "computed"

    @property
    def launch(self) -> Launch:
        """The values that determine the KV cache."""
        return self.started.launch

    @property
    def pool(self) -> Capacity:
        """The KV cache."""
        return self.started.pool()

    @property
    def line(self) -> ServeLine:
        """The command line."""
        return self.started.line

    def settings(self) -> Settings:
        """The settings of its replica."""
        launch, line = self.launch, self.line
        cost = self.cost or default_cost(launch.model, launch.gpu, launch.deployment.quantization)
        found = with_release(self.started.settings(), line)
        return replace(found, cost=cost, step_scale=self.step_scale)

    def changed(self, change: Change) -> Server | None:
        """The server with some flags changed; None if its engine has no such flag, would refuse to start or might never admit a request, or
        ``cost`` does not price it."""
        try:
            other = replace(self, started=self.started.changed(change))
        except SettingError:
            return None
        if self.cost is not None and not prices_kv(self.cost, other.launch.deployment.kv_dtype):
            return None
        return other if other.refused() is None and other.started.admits_all() else None

    def paced(self, factor: float) -> Server | None:
        """The server with steps so many times as long; None beyond the factors of a setting."""
        found = with_steps(self.settings(), factor)
        return None if found is None else replace(self, step_scale=found.step_scale)

    def step_interval(self) -> tuple[float, float] | None:
        """Lowest and highest step time over the simulated one, nine times of ten: of servers, or of steps that a fit was made to. None if
        it is not known."""
        chosen = self.settings()
        error = getattr(compiled_cost(chosen), "p90_error", None)
        if error is not None:
            return (1 / (1 + error), 1 / (1 - error)) if error < _MOST_ERROR else None
        return step_interval(chosen)[0]

    def refused(self) -> str | None:
        """The engine's refusal to start; None if it starts."""
        found = self.started.refusal()
        return None if found is None else found.text


def server_of(line: ServeLine, gpu: str, model: str | None, log: StartupLog | None, cost: str | None = None) -> Server:
    """The server of a command line.

    Args:
        model: Preset or ``config.json`` in place of the model that the line names.
        log: Size of its KV cache, by its start-up log or its metrics.

    Raises:
        UserError: Its engine would refuse to start it, or a value is invalid.
    """
    server = Server(started(line, gpu, model, log), cost)
    if (text := server.refused()) is not None:
        remedy = "fragmeter plan --serve says more, and --startup-log replaces the estimate"
        raise UserError(f"serve: it does not start: {text.rstrip('.')}; {remedy}")
    if server.started.replicas > 1:
        raise SettingError("--data-parallel-size", server.started.replicas, "one engine is diagnosed; leave it out")
    server.started.require_simulated()
    settings(**server.settings().as_dict())
    return server


def flags_text(change: Change, line: ServeLine) -> str:
    """The flags of a change as the user of that line types them."""
    return " ".join(line.flag_text(name, value) for name, value in change.items())
