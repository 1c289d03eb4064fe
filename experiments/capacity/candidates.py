"""Candidates of a capacity plan: every combination of the GPUs and flags that a user leaves open.

A candidate is a line of vLLM's or SGLang's server with some flags changed, on one GPU. Number formats, ranks, memory and the
engine's start-up checks are computed as for a pasted line (``sglang_server.start``). Other policies get the same KV cache, divided
into their own blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Annotated

from cyclopts import Group, Parameter
from pydantic import BeforeValidator, ConfigDict
from pydantic.dataclasses import dataclass as checked_dataclass

from ...sim.cluster import Cluster, cluster
from ...sim.config.settings import Settings, settings
from ...sim.cost import default_cost, read_server
from ...sim.engine.replica import build
from ...sim.policy.options import as_json
from ...sim.spec.speculative import parse_speculative
from ...sim.types.errors import SettingError
from ..runs.grid import MOST_POINTS, NONE, axis_values
from ..sglang_server.start import started
from ..vllm_serve.line import ServeLine
from ..vllm_serve.log import StartupLog
from ..vllm_serve.start import Started, with_release
from .split import AUTO, fewest_replicas

_DRAFTS = "speculative_config"
#: Values of axes that are flags without a value.
_SWITCHES = {"true": True, "false": False}
#: Axes of number formats that may change what the model answers.
_LOSSY = ("quantization", "kv_cache_dtype")
_SWITCHED = ("enable_prefix_caching", "enable_expert_parallel")
#: Axes that are no flags of vllm serve.
_NO_FLAGS = ("gpu", "policy", "router", "prefill_replicas", "checkpoint")
#: The axis of checkpoints of a model in other number formats, which is open and never listed: a repository, or none for the model as named.
CHECKPOINT = "checkpoint"
#: The axis of the candidate that only decodes beside this one, which is open and never listed: its name, or none.
DECODE = "decode"
#: Values of open axes that names leave out.
_USUAL = ("1", NONE)


@checked_dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Choices:
    """Flags in which candidates differ: values separated by commas or spaces, or FIRST:LAST:STEP; none is vLLM's default.

    Attributes:
        tensor_parallel_size: GPUs that share each layer.
        pipeline_parallel_size: Pipeline stages.
        data_parallel_size: Replicas that share the experts of a model.
        decode_context_parallel_size: Ranks that divide the tokens of every sequence among them.
        enable_expert_parallel: Whether each GPU holds whole experts: true, false.
        quantization: Number format of the weights: fp8, awq, gptq, int8; none is the checkpoint's.
        kv_cache_dtype: Number format of the KV cache: auto, fp8.
        block_size: Tokens per KV block.
        max_num_seqs: Maximum number of sequences in a step.
        max_num_batched_tokens: Maximum number of tokens in a step.
        max_model_len: Longest prompt and output; by default the longest that fits.
        gpu_memory_utilization: Share of the GPU's memory.
        enable_prefix_caching: Whether prefixes are cached: true, false.
        kv_offloading_size: Host memory for blocks of the prefix cache, GiB.
        speculative_config: Speculative decoding, as JSON with acceptance rates as for simulate; none is without drafts.
        watermark: Share of the KV cache that stays free when a request is admitted.
        policy: Scheduler and its memory, by the name of a system; by default that of the line.
        router: Choice of the replica for a request, as for simulate; by default round-robin.
        prefill_replicas: Replicas of the fleet that only prefill, while the others only decode: a number, or auto for
            the best share. none: every replica does both.
    """

    tensor_parallel_size: list[str] | None = None
    pipeline_parallel_size: list[str] | None = None
    data_parallel_size: list[str] | None = None
    decode_context_parallel_size: list[str] | None = None
    enable_expert_parallel: list[str] | None = None
    quantization: list[str] | None = None
    kv_cache_dtype: list[str] | None = None
    block_size: list[str] | None = None
    max_num_seqs: list[str] | None = None
    max_num_batched_tokens: list[str] | None = None
    max_model_len: list[str] | None = None
    gpu_memory_utilization: list[str] | None = None
    enable_prefix_caching: list[str] | None = None
    kv_offloading_size: list[str] | None = None
    speculative_config: list[Annotated[str, BeforeValidator(as_json)]] | None = None
    watermark: list[str] | None = None
    policy: list[str] | None = None
    router: list[str] | None = None
    prefill_replicas: list[str] | None = None

    def axes(self) -> dict[str, list[str]]:
        """The listed values of each flag that a plan tries, by its name; flags without a list are left out."""
        choices = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: values_of(name, texts) for name, texts in choices.items() if texts}


CHOICES = Annotated[
    Choices, Parameter(name="*", consume_multiple=True, negative_iterable="", group=Group("Candidates", sort_key=0))
]


@dataclass(frozen=True)
class Candidate:
    """One candidate.

    Attributes:
        axis_values: Its value on each axis, the GPU first.
        settings: Settings of its simulation; None if it does not start, or is too short for the load.
        refused: The engine's refusal to start with a remedy, or the load's request that is too long.
        started: The line with every default that its engine fills in.
        name: The GPU, and the values in which the candidates differ.
        decode: The candidate that decodes what this one prefills (``pairs``); None where replicas do both, or are alike.
    """

    axis_values: dict[str, str]
    settings: Settings | None
    refused: str | None
    started: Started
    name: str = ""
    decode: Candidate | None = None

    @property
    def refused_in_short(self) -> str:
        """The kind of ``refused``."""
        return "does not start" if self.started.refusal() is not None else "too short for the load"

    @property
    def router(self) -> str:
        """The router of its fleet."""
        return self.axis_values.get("router", Cluster.router)

    @property
    def prefill_replicas(self) -> str:
        """Replicas of its fleet that only prefill: none, auto or a number."""
        return AUTO if self.decode is not None else self.axis_values.get("prefill_replicas", NONE)

    @property
    def engines(self) -> int:
        """Replicas that share experts: a fleet has a multiple of them."""
        return self.started.launch.deployment.data_parallel

    @property
    def num_gpus(self) -> int:
        """GPUs of one replica."""
        return self.started.launch.num_gpus

    @property
    def num_lossy(self) -> int:
        """Number of axes on which it has a number format that changes what the model answers."""
        if self.settings is None:
            return 0
        return (self.checkpoint is not None) + sum(
            name in self.axis_values and getattr(self.settings, name) not in (None, "auto") for name in _LOSSY
        )

    @property
    def checkpoint(self) -> str | None:
        """The repository with the model in another number format that it serves; None for the model as named."""
        value = self.axis_values.get(CHECKPOINT, NONE)
        return None if value == NONE else value

    def value_text(self, name: str) -> str:
        """The value on an axis, as the names of candidates and the table have it."""
        value = self.axis_values[name]
        if name != _DRAFTS or value == NONE:
            return value
        config = parse_speculative(value)
        rates = " ".join(f"{rate:.4g}" for rate in config.acceptance_rates)
        return " ".join(filter(None, (config.method, config.model, rates)))


def values_of(name: str, texts: Iterable[str]) -> list[str]:
    """The distinct values of an axis that is given once or several times."""
    return list(dict.fromkeys(value for text in texts for value in axis_values(text, name)))


def candidates(
    line: ServeLine,
    gpus: Sequence[str],
    axes: dict[str, list[str]],
    model_name: str | None = None,
    log: StartupLog | None = None,
    cost: str | None = None,
    server: str | None = None,
    unlisted: Sequence[str] = (),
) -> list[Candidate]:
    """Every combination; the last axis changes fastest. Of equal ones, as where a value is also the default, the first.

    Args:
        line: The line that every candidate starts from.
        model_name, log: As for ``started``.
        cost: Step time of all candidates. None takes each GPU's profile if it covers the candidate, else the roofline.
        server: File of a server's constants; None for none.
        unlisted: Axes that the user did not list (``unlisted``). Those that do not start have no remedy, as the other values are tried.

    Raises:
        SettingError: An invalid value, drafts that are not simulated, or more candidates than the limit.
    """
    whole = {"gpu": list(gpus), **axes}
    total = 1
    for values in whole.values():
        total *= len(values)
    if total > MOST_POINTS:
        raise SettingError("gpu", total, f"are more candidates than {MOST_POINTS}; leave some out")
    combinations = (dict(zip(whole, combination, strict=True)) for combination in product(*whole.values()))
    remedied = not any(len(whole[name]) > 1 for name in unlisted)
    found = [_candidate(line, axis_values, model_name, log, cost, server, remedied) for axis_values in combinations]
    distinct: dict[tuple[object, str, str], Candidate] = {}
    for each in found:
        same = each.settings or tuple(each.axis_values.values())
        distinct.setdefault((same, each.router, each.prefill_replicas), each)
    differ = [name for name, values in whole.items() if name != "gpu" and len(values) > 1]
    return [replace(each, name=_name(each, differ, unlisted)) for each in distinct.values()]


def _name(candidate: Candidate, differ: Sequence[str], unlisted: Sequence[str]) -> str:
    """The GPU, and the values in which candidates differ; of what is not listed those that are not one."""
    values = {name: candidate.value_text(name) for name in differ}
    named = (f"{name}={value}" for name, value in values.items() if name not in unlisted or value not in _USUAL)
    return ", ".join([candidate.started.launch.gpu.name, *named])


def _candidate(
    line: ServeLine,
    axis_values: dict[str, str],
    model_name: str | None,
    log: StartupLog | None,
    cost: str | None,
    server: str | None,
    remedied: bool,
) -> Candidate:
    cluster(router=axis_values.get("router", Cluster.router))
    fewest_replicas(axis_values.get("prefill_replicas", NONE))
    if (drafts := axis_values.get(_DRAFTS, NONE)) != NONE:
        # Without acceptance rates a line's drafter counts for the memory alone.
        parse_speculative(drafts)
    line = line.changed(
        {
            name.replace("_", "-"): None if value == NONE else _flag_value(name, value)
            for name, value in axis_values.items()
            if name not in _NO_FLAGS
        }
    )
    checkpoint = axis_values.get(CHECKPOINT, NONE)
    named = model_name if checkpoint == NONE else checkpoint
    found = started(line, axis_values["gpu"], named, log)
    if found.uncounted is not None:
        raise found.uncounted
    if found.launch.speculative is not None:
        found.launch.speculative.drafter(found.launch.model)
    found.require_simulated()
    refused = found.refusal()
    if refused is not None:
        return Candidate(axis_values, None, refused.text + (found.remedy() if remedied else ""), found)
    chosen = found.settings()
    policy = axis_values.get("policy", NONE)
    if policy in (chosen.policy, NONE):
        chosen = with_release(chosen, line) if server is not None else chosen
    else:
        chosen = _under(policy, found)
    if server is not None:
        chosen = replace(chosen, server=server)
        build(chosen)
    return Candidate(axis_values, _with_cost(chosen, found, cost), None, found)


def _flag_value(name: str, value: str) -> str | bool:
    if name not in _SWITCHED:
        return value
    if value not in _SWITCHES:
        raise SettingError(name, value, "must be true, false or none")
    return _SWITCHES[value]


def _under(policy: str, found: Started) -> Settings:
    """Another policy with the same KV cache, its own block size, and its own limits unless the line sets them."""
    flags = found.line.flags
    own = {} if "max-num-seqs" in flags else {"max_num_seqs": None}
    own |= {} if "max-num-batched-tokens" in flags else {"max_num_batched_tokens": None}
    own |= {} if "block-size" in flags else {"block_size": None}
    base = settings(**found.settings().as_dict() | own | {"policy": policy})
    slots = found.pool().num_blocks * found.launch.rank_block_tokens
    return replace(base, num_gpu_blocks_override=slots // build(base).block_size)


def _with_cost(chosen: Settings, started: Started, cost: str | None) -> Settings:
    """The settings with a step-time model that covers them."""
    if cost is None and chosen.server is not None:
        cost = read_server(chosen.server).cost
    elif cost is None:
        launch = started.launch
        cost = default_cost(launch.model, launch.gpu, launch.deployment.quantization)
    return replace(chosen, cost=cost)
