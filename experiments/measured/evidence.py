"""What the step times of a simulation rest on, and how far the measured ones of such servers are from them.

Step times of kernel tables have intervals, from the errors of measured servers of the same class (``servers_like``,
``intervals``). What no such server has is named, and then there is no interval. With constants of a server the errors are those of
the benchmark that they were fitted to.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from ...sim.config.settings import Settings
from ...sim.config.settings import settings as settings_of
from ...sim.cost import COST_NAMES, Server, ServerFit, default_cost, profile, profile_names, read_server
from ...sim.cost.backends import attention_backend, table_backend
from ...sim.cost.calibrated import experts_model
from ...sim.cost.kernels import UNPACKING_TABLE, Kernels, experts_kernels, model_gemm_kernels
from ...sim.cost.states import GDN_OPERATIONS, state_operations
from ...sim.engine.replica import deployment_of
from ...sim.policy.api_times import MEASURED
from ...sim.policy.options import VllmServeOptions
from ...sim.policy.registry import POLICIES
from ...sim.spec import gpu, model
from ...sim.spec.gpu import GpuSpec
from ...sim.types.errors import UserError
from ...sim.types.user_files import content_of, json_value
from ..runs.near_saturation import LoadClass
from .servers_like import INT4, MEASURED_POLICIES, Served, ServersLike, data_sheet_like, servers_like

#: Most lines that are printed.
_MOST_LINES = 4
#: Names of the errors in text.
_OF_FIT = {"output_throughput": "throughput", "mean_ttft_ms": "TTFT", "mean_tpot_ms": "TPOT", "mean_e2el_ms": "E2E"}
#: Settings of a finished run that its evidence depends on.
READ = (
    "policy", "model", "gpu", "tensor_parallel_size", "pipeline_parallel_size", "data_parallel_size", "quantization",
    "kv_cache_dtype", "enforce_eager", "cost", "server", "decode_context_parallel_size", "outside_ms", "endpoint",
    "api_server", "enable_expert_parallel", "vllm_release", "attention_backend", "moe_backend",
)  # fmt: skip
_INT4_GEMMS = "No table of vLLM has int4 GEMMs: those of these weights, in {}, take the time of bf16 GEMMs that read 4 bits a weight."
_UNPACKED_GEMMS = (
    "GEMMs of these weights run in {} on this GPU, and their tables are of 16-bit weights: its error is not known."
)
#: Measured and simulated throughput of Qwen3 14B with AWQ and FP8 weights against 16 bits, ShareGPT at once (docs/step-times.md).
_UNDECIDED = (
    "Which number format is faster on this GPU depends on the load: in a burst servers on an A100 gave 5 and 15 % less with such weights than with"
    " 16 bits, where the simulation has 16 and 17 % less; with few sequences it has them faster, which no server shows."
)
_OTHER_KERNELS = "{} in {}, and {} tables are of {}"
_OUTSIDE = {
    "completions": "TTFT has {:g} ms outside of the engine (--outside-ms; the chat endpoint took 47 to 60).",
    "chat": "TTFT has {:g} ms outside of the engine (--outside-ms; the chat endpoint took 47 to 60 on other servers).",
}
_API_SERVER = "Requests and outputs wait for event loops of the API server, with {} times (--api-server)."
_STATES = "No table of this GPU has the states of this model's layers: {} the data sheet."
_ALL_STATES, _PROMPTS = "these take", "decodes take another engine's table, prompts"
#: The source of a profile that is scaled from that of another card.
_SCALED = re.compile(r"; those of (\S+), longer where")


@dataclass(frozen=True)
class UnknownExperts:
    """Experts of a shape that no table of the card has.

    Attributes:
        operation: Their operation in the profile; None if they count as GEMMs.
        median_error, p90_error: Of whole shapes that were left out of its fit, interpolated or extrapolated, the larger; None if
            not known.
    """

    operation: str | None
    median_error: float | None = None
    p90_error: float | None = None

    def text(self) -> str:
        """One sentence."""
        if self.operation is None:
            return "No table of this GPU has such experts: they count as GEMMs."
        known = "with an error that is not known"
        if self.median_error is not None:
            known = f"which misses shapes outside of the fit by {self.median_error:.0%} in the median and by {self.p90_error:.0%} for one in ten"
        return f"No table has experts of this shape: their time is that of a fit over all shapes, {known}."


@dataclass(frozen=True)
class Evidence:
    """What step times rest on.

    Attributes:
        cost: The cost model.
        basis: "a measured server", "a measured device", "kernel tables", "kernel tables of" another card, "a data sheet" or
            "the paper".
        origin: The source, in words.
        load: Class of the simulated load, ``LoadClass``; None if it is not known.
        like: The measured servers of its class, with the intervals; None if the step times are not those that the runs were
            simulated with.
        experts: Experts of a shape without a table; None for all others.
        fit: The benchmark that the server's constants were fitted to; None without constants, or if their file does not record it.
        outside_ms: Time of a request outside of the engine, by the settings; 0 where constants of a server have it.
        endpoint: Endpoint of the API server.
        api_server: Times of its event loops, as a setting; None where they take none.
        attention_backend, attention_table: The backend of softmax attention that vLLM takes by default, and that of the tables of its time; None
            where the time is not of a profile of the package.
        gemms: Kernels of GEMMs by number format of their weights, and of the tables of their time; empty where the time is not of a profile of
            the package.
        expert_kernels: Those of experts; None without experts or a table of them.
        states_from_sheet: Whether layers with states take the data sheet, as no table of vLLM has theirs on the card.
        state_decodes: Whether their decodes have a table nevertheless, another engine's.
    """

    cost: str
    basis: str
    origin: str
    load: LoadClass | None = None
    like: ServersLike | None = None
    experts: UnknownExperts | None = None
    fit: ServerFit | None = None
    outside_ms: float = 0.0
    endpoint: str = "completions"
    api_server: str | None = None
    attention_backend: str | None = None
    attention_table: str | None = None
    gemms: Mapping[str, Kernels] = field(default_factory=dict)
    expert_kernels: Kernels | None = None
    states_from_sheet: bool = False
    state_decodes: bool = False

    def headline(self) -> str:
        """Simulated values with their intervals, such as "TPOT 12.3 ms (11.2 to 13.1 for 9 of 10 servers like this)"; empty without."""
        return "" if self.like is None else self.like.headline()

    @property
    def not_measured(self) -> tuple[str, ...]:
        """What the simulation has and no measured server of its class."""
        return () if self.like is None else self.like.not_measured

    @property
    def untabulated(self) -> tuple[str, ...]:
        """What of the model no kernel table of the card has, where the interval is that of data sheets for it."""
        if self.like is None or not self.like.from_data_sheets:
            return ()
        states = ["its states in prompts" if self.state_decodes else "its states"] * self.states_from_sheet
        differs = self.attention_backend != self.attention_table
        return (*states, *[f"attention in {self.attention_backend}"] * differs)

    def text(self) -> str:
        """One line."""
        parts = [f"Step times: {self.origin} (--cost {self.cost})."]
        if self.outside_ms:
            parts.append(_OUTSIDE[self.endpoint].format(self.outside_ms))
        if self.api_server is not None:
            parts.append(_API_SERVER.format(MEASURED if self.api_server == MEASURED else "given"))
        if self.basis == "a measured server":
            parts.append(_fit_text(self.fit))
        else:
            parts.append("No measured run was simulated with them." if self.like is None else self.like.text())
        if self.states_from_sheet:
            parts.append(_STATES.format(_PROMPTS if self.state_decodes else _ALL_STATES))
        if self.experts is not None:
            parts.append(self.experts.text())
        if self.attention_backend != self.attention_table:
            parts.append(self._other_text("Attention runs", self.attention_backend, "its", self.attention_table))
        parts += self._gemm_texts()
        if self.expert_kernels is not None and self.expert_kernels.differ:
            run, table = self.expert_kernels
            parts.append(self._other_text("Experts run", run, "their", table))
        return " ".join(parts)

    def _gemm_texts(self) -> Iterator[str]:
        for form, kernels in self.gemms.items():
            if form in INT4 and kernels.table is None:
                yield _INT4_GEMMS.format(kernels.run)
            elif kernels.table is None:
                yield _UNPACKED_GEMMS.format(kernels.run)
            elif kernels.differ:
                yield self._other_text("GEMMs of these weights run", kernels.run, "their", kernels.table)
        if any(kernels.table == UNPACKING_TABLE for kernels in self.gemms.values()):
            yield _UNDECIDED

    def _other_text(self, *named: str | None) -> str:
        """Measured servers of the class, where there are any, ran the same kernels."""
        like = self.like
        known = like is not None and like.predicted and not like.lacking and not like.from_data_sheets
        return f"{_OTHER_KERNELS.format(*named)}{', as on the measured servers.' if known else ': its error is not known.'}"

    def as_dict(self) -> dict[str, Any]:
        """As JSON data."""
        named = {
            "gemms": {form: kernels._asdict() for form, kernels in self.gemms.items()},
            "expert_kernels": self.expert_kernels and self.expert_kernels._asdict(),
        }
        return asdict(self) | named


def evidence(settings: Settings, served: Served = Served()) -> Evidence:
    """The evidence for the step times of these settings.

    Args:
        served: The simulated load and its results, as far as they are known.
    """
    found = _evidence(settings, served)
    own_options = settings.policy_options
    if isinstance(own_options, VllmServeOptions):
        found = replace(found, endpoint=own_options.endpoint, api_server=own_options.api_server)
        if found.basis != "a measured server":
            found = replace(found, outside_ms=own_options.request_outside_ms)
    return replace(found, **_kernels(settings)) if found.cost == "fitted" else found


def _kernels(settings: Settings) -> dict[str, Any]:
    """The fields of ``Evidence`` that name kernels of GEMMs and experts; none where the profile is the user's."""
    shape, card = model(settings.model), gpu(settings.gpu)
    if card.profile is not None or card.name not in profile_names():
        return {}
    deployment, operations = deployment_of(settings, shape, card), profile(card.name)
    given = shape, card, deployment
    ranks = settings.tensor_parallel_size
    has_table = experts_model(operations, shape, deployment.quantization) is not None
    return {
        "gemms": model_gemm_kernels(*given, ranks, operations.ops),
        "expert_kernels": experts_kernels(*given, ranks, operations.ops) if has_table else None,
    }


def _evidence(settings: Settings, served: Served) -> Evidence:
    shape, card, load = model(settings.model), gpu(settings.gpu), served.load
    server = None if settings.server is None else read_server(settings.server)
    name = settings.cost or (server.cost if server else default_cost(shape, card, settings.quantization))
    if server is not None:
        return _of_server(name, card.name, load, server)
    if name not in COST_NAMES:
        return Evidence(name, *_of_file(name), load)
    if name == "paper":
        return Evidence(name, "the paper", "measurements of OPT-13B on an A100 40 GB in the paper of 2023", load)
    if name == "roofline":
        like = data_sheet_like(settings, served)
        return Evidence(name, "a data sheet", f"a roofline from the data sheet of {card.name}", load, like)
    if card.profile is not None:
        basis, origin = _of_file(card.profile)
        return Evidence(name, basis, f"{origin} of {card.name}", load)
    scaled = _scaled_from(card.name)
    origin = f"kernel times of {card.name} from published tables"
    if scaled:
        origin = f"kernel times of {scaled} from published tables, longer where the memory of {card.name} bounds them"
    experts = _unknown_experts(settings)
    tabulated = state_operations(profile(card.name), shape)
    from_sheet = shape.mixer is not None and len(tabulated) < len(GDN_OPERATIONS)
    attention: tuple[str | None, str | None] = None, None
    if not shape.has_vectors:
        own = deployment_of(settings, shape, card)
        run, table = attention_backend(shape, card, own, settings.tensor_parallel_size), table_backend(card)
        attention = run.name, table.name
    like = servers_like(settings, served)
    # What has no table is not known better than from a data sheet.
    if not like.predicted and (from_sheet or (attention[0] != attention[1] and not like.lacking)):
        like = data_sheet_like(settings, served)
    return Evidence(
        name,
        basis_of(card),
        origin,
        load,
        like,
        experts,
        attention_backend=attention[0],
        attention_table=attention[1],
        states_from_sheet=from_sheet,
        state_decodes=bool(tabulated) and from_sheet,
    )


def recorded_text(settings: Mapping[str, Any], cost: object = None) -> str:
    """The line of a finished run over all loads, from its recorded settings.

    Files that they name may be gone, and another version may have had other settings: then it has the cost model alone.

    Args:
        settings: As ``run.json`` has them; null stands for the default.
        cost: The description of the cost model in ``run.json``, if there is one.
    """
    found = {name: settings[name] for name in READ if settings.get(name) is not None}
    if found.get("policy") not in POLICIES:
        # Other packages are not imported, so their policies are not named.
        found["policy"] = MEASURED_POLICIES[0]
    # Of a run before the setting, and of another package's policy, which has none.
    found.setdefault("outside_ms", 0.0)
    try:
        return evidence(settings_of(**found)).text()
    except (UserError, OSError, ValueError):
        named = cost.get("name") if isinstance(cost, Mapping) else found.get("cost", "by default")
        return f"Step times: --cost {named}. The files that the settings name cannot be read, so their evidence is not known."


def _of_server(cost: str, card: str, load: LoadClass | None, server: Server) -> Evidence:
    origin = f"operations of {card}, and constants of the server {server.name}"
    return Evidence(cost, "a measured server", origin, load, fit=server.fit)


def _fit_text(fit: ServerFit | None) -> str:
    """The errors of a server's constants on their own benchmark."""
    if fit is None:
        return (
            "This server calibrated; its file does not record the errors of the fit: write it anew with fragmeter validate"
            " --against FILE --save-server FILE."
        )
    rate = "" if fit.request_rate is None else f" at {fit.request_rate:.3g} requests/s"
    clients = "" if fit.max_concurrency is None else f" from {fit.max_concurrency} clients"
    sent = rate + clients or " at once"
    after, before = (
        ", ".join(f"{label} {errors[name]:+.1%}" for name, label in _OF_FIT.items() if name in errors)
        for errors in (fit.errors, fit.errors_before)
    )
    return f"This server calibrated: fitted to {fit.requests:,} requests{sent}, there mean {after} (before: {before}). Another rate was not measured."


def _unknown_experts(settings: Settings) -> UnknownExperts | None:
    shape, card = model(settings.model), gpu(settings.gpu)
    if shape.experts is None:
        return None
    operations, deployment = profile(card.name), deployment_of(settings, shape, card)
    kernels = experts_kernels(shape, card, deployment, settings.tensor_parallel_size, operations.ops)
    found = experts_model(operations, shape, deployment.quantization, kernels)
    if found is None:
        return UnknownExperts(None)
    operation, fitted = found
    if fitted is not operations.ops[operation]:
        return None
    held_out = fitted.fit.get("held_out_shapes", {}).values()
    return UnknownExperts(
        operation,
        *(max((each[name] for each in held_out), default=None) for name in ("median_error", "p90")),
    )


def _of_file(path: str) -> tuple[str, str]:
    """Basis and origin of step times from a file: a profile is fitted to tables, a calibration is measured."""
    content = json_value(content_of(path, "cost"))
    if content.get("kind") == "profile":
        return "kernel tables", f"kernel times from tables, the profile {Path(path).name}"
    return "a measured device", f"kernels measured on a device, the calibration {Path(path).name}"


def basis_of(card: GpuSpec) -> str:
    """What step times on a card rest on by default, with a model that its profile covers, as ``Evidence.basis`` has it."""
    if card.profile is not None:
        return _of_file(card.profile)[0]
    if card.name not in profile_names():
        return "a data sheet"
    scaled = _scaled_from(card.name)
    return f"kernel tables of {scaled}, scaled" if scaled else "kernel tables"


def _scaled_from(card: str) -> str | None:
    """The card with the tables, if the profile of this one is scaled from it (``tools.profiles.fit_profiles``)."""
    found = _SCALED.search(profile(card).source)
    return found and found[1]


def evidence_lines(runs: Iterable[Settings | tuple[Settings, LoadClass | None]]) -> list[str]:
    """The distinct lines of several runs; of more than a few, their number.

    Args:
        runs: Settings of each run, and the class of its load, if it is known.
    """
    each = dict.fromkeys(run if isinstance(run, tuple) else (run, None) for run in runs)
    return distinct(evidence(settings, Served(load)).text() for settings, load in each)


def distinct(texts: Iterable[str]) -> list[str]:
    """The distinct lines; of more than a few, their number."""
    lines = list(dict.fromkeys(texts))
    if len(lines) <= _MOST_LINES:
        return lines
    return [*lines[:_MOST_LINES], f"There are {len(lines) - _MOST_LINES} other kinds of step times."]


def engines_lines(settings: Settings, planned: bool = False) -> list[str]:
    """The assumption about engines that share experts; empty for one engine.

    Args:
        planned: Whether the rate of one engine is found, too, as a plan does before it simulates fleets.
    """
    engines = settings.data_parallel_size
    if engines == 1:
        return []
    lock_step = f"The {engines} engines that share experts run in lock step"
    if planned:
        return [f"{lock_step} in fleets; the highest rate of one is found as if the others computed as many tokens."]
    return [f"{lock_step}: a step takes as long as that of the slowest engine."]


def drafts_lines(settings: Settings) -> list[str]:
    """The assumption about drafts; empty without speculative decoding."""
    if settings.value("speculative_config") is None:
        return []
    return [
        "Steps with drafts are predicted, as a step of the target over all tokens and those of the drafter; no measured run has"
        " drafts. How many are accepted is an input (--speculative-config)."
    ]
