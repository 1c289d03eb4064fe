"""Options of policies: each is declared once, with its type, default, bounds and help.

A policy declares its options in one dataclass, ``Policy.options_type``. The command line's flags and their help,
validation, the axes of a sweep, ``run.json`` and the refusal of options that a run does not read all follow from that
declaration.

A number or a text says with ``Tried`` which value shows in a small run.

Policies with an option of the same name share the dataclass that declares it, or at least its type.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from functools import cache
from typing import Annotated, ClassVar, Literal, Protocol, Self, get_args, get_origin, get_type_hints

from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field
from pydantic.dataclasses import dataclass
from pydantic.fields import FieldInfo

from ..memory.prefix.tiers import Offloaded
from ..spec import Deployment, HybridLayout, host_blocks, hybrid_layout, model
from ..spec.attention_backends import NAMED, named_backend, refused_nvfp4
from ..spec.deployment import NVFP4, Sampling
from ..spec.gpu import GIB, GpuSpec
from ..spec.kernels import NAMED_EXPERTS, named_experts
from ..spec.pool import MOST_HOST_BLOCKS, offloaded_bytes
from ..spec.releases import FIRST_ORDERED, LAST_ORDERED, LATEST
from ..spec.shape import ModelSpec
from ..spec.speculative import SpeculativeConfig, parse_speculative
from ..spec.startup.sglang_states import StatePool
from ..spec.tiers import OffloadSpec, parse_offloading, transfer_config
from ..types.bounds import AlwaysTaken, Count, Gibibytes, Tried
from ..types.errors import NotSimulated, SettingError
from ..types.ticks import PER_MS
from ..workload.workload import Workload
from .api_times import api_server_us
from .server import Server, WindowPool

#: Fitted on beam search with two beams in SOSP'23's Fig 15 (`fragmeter reproduce fig15`).
FITTED_BEAM_SURVIVAL = 0.92
#: Pages that vAttention maps, in KiB: those of its driver, and CUDA's own.
PAGE_SIZES = (64, 128, 256, 2048)
LEAVE_OUT = "or leave it out"


class Replica(Protocol):
    """The settings of a replica that the use of an option may depend on; see ``Settings``."""

    @property
    def policy(self) -> str: ...
    @property
    def model(self) -> str: ...
    @property
    def pipeline_parallel_size(self) -> int: ...
    @property
    def data_parallel_size(self) -> int: ...
    @property
    def enable_prefix_caching(self) -> bool | None: ...
    @property
    def max_model_len(self) -> int | None: ...
    @property
    def block_size(self) -> int | None: ...
    @property
    def num_gpu_blocks_override(self) -> int | None: ...
    @property
    def allocator(self) -> str | None: ...
    @property
    def cost(self) -> str | None: ...
    @property
    def server(self) -> str | None: ...
    @property
    def ids(self) -> bool: ...


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Options:
    """Base class of policy options; a policy without options uses it as it is.

    The methods answer what the engine asks of any policy when it builds a replica. The bodies here are the answers of
    a policy without options.
    """

    #: Values besides the default that ask for nothing, so that they may be given to any policy.
    no_effect: ClassVar[Mapping[str, object]] = {}
    #: Options that change what requests ask for: a run under a policy that lacks them is refused, also in a sweep.
    required: ClassVar[frozenset[str]] = frozenset()

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        """Why a run of this policy does not read the option ``name``, with the remedy; None if it reads it.

        Args:
            name: The option.
            replica: Settings that the use of the option may depend on.
            workload: The requests; None asks for any workload on which the option has an effect.
        """
        return None

    def deployed(self, deployment: Deployment) -> Deployment:
        """The deployment of a replica, changed by these options."""
        return deployment

    def require_kv_dtype(self, shape: ModelSpec, card: GpuSpec, kv_dtype: str) -> None:
        """Raise SettingError for a number format of the KV cache that only vLLM has (nvfp4)."""
        if kv_dtype == NVFP4:
            raise SettingError("kv_cache_dtype", kv_dtype, "is vLLM's; use --policy vllm-v1, or fp8")

    @property
    def groups_layers(self) -> bool:
        """Whether layers with a sliding window are KV groups of their own, which keep only the tokens of the window."""
        return False

    @property
    def free_share(self) -> float:
        """Share of the pool that an admission must leave free, 0 to 1."""
        return 0.0

    def host_blocks(self, server: Server, block_size: int) -> int:
        """Blocks of host memory for swapping.

        Args:
            server: The model and the GPUs.
            block_size: Tokens per block.
        """
        return 0

    @property
    def offloading(self) -> OffloadSpec | None:
        """What is behind the GPU as tiers of the prefix cache; None without any."""
        return None

    def offloaded(
        self, server: Server, num_blocks: int, block_size: int, beside: WindowPool | StatePool | None
    ) -> Offloaded | None:
        """The same in chunks, beside a pool of so many blocks, and a second one of windows or states. See ``host_blocks``."""
        return None

    def for_server(self, server: Server) -> Self:
        """The options as they are served: some systems change them for a model."""
        return self

    @property
    def schedules_ahead(self) -> bool:
        """Whether a step is decided while the step before it runs (asynchronous scheduling)."""
        return False

    @property
    def speculative(self) -> SpeculativeConfig | None:
        """The drafter; None without speculative decoding."""
        return None

    @property
    def pinned_tokens(self) -> int:
        """Tokens of a prefix that every prompt starts with; its full blocks are in the pool from the start."""
        return 0

    @property
    def survival_of_beams(self) -> float | None:
        """Probability that a beam survives a step; None without beam search."""
        return None

    @property
    def queue_limits(self) -> tuple[int | None, int | None]:
        """Limits beyond which the API server rejects requests; None is no limit.

        Returns:
            Most unfinished requests, and most prompt tokens of requests without a first token.
        """
        return None, None

    @property
    def event_loops(self) -> tuple[int, Mapping[str, float]] | None:
        """Number of event loops of the API server, and their microseconds by kind of work; None if they take no time."""
        return None

    def outside_ticks(self, known: int | None) -> int:
        """Ticks that a request spends outside the engine. 0 for systems whose API server was not measured.

        Args:
            known: The time of the server that the cost model was measured on, if it has one.

        Raises:
            SettingError: The user gives another time than ``known``.
        """
        return known or 0

    def refused_combinations(
        self, replica: Replica, grouped: bool, layout: HybridLayout | None
    ) -> dict[str, dict[str, bool]]:
        """Options in use that are not simulated together with some others, with the refused combinations of each.

        Args:
            replica: Settings of the replica.
            grouped: Whether sequences share blocks.
            layout: KV groups; None if all layers keep every token.

        Returns:
            For each option in use: a text for each unsupported combination, and whether this run has it.
        """
        return {}


#: Time of a request outside of the engine at the completions endpoint: Llama 2 7B on an H100 (docs/results/servers.md).
OUTSIDE_MS = 7.0
#: The same at the chat endpoint: the least of 47 to 60 ms, measured on servers of others.
CHAT_OUTSIDE_MS = 47.0


@dataclass(frozen=True, kw_only=True)
class WatermarkOptions(Options):
    """Options of schedulers that keep a share of the pool free."""

    no_effect = {"watermark": 0}

    watermark: Annotated[
        float, Field(ge=0, lt=1, description="Share of the pool that an admission must leave free."), Tried(0.5)
    ] = 0.01

    @property
    def free_share(self) -> float:
        return self.watermark


@dataclass(frozen=True, kw_only=True)
class BeamOptions(Options):
    """Options of policies that serve beam search."""

    required = frozenset({"use_beam_search"})

    use_beam_search: Annotated[
        bool,
        Field(
            description="Treat the n sequences of a request as beams: in every step some die and others fork."
            " Without it they are samples, which all run to the end."
        ),
    ] = False
    beam_survival: Annotated[
        float, Field(ge=0, le=1, description="Probability that a beam survives a step."), Tried(0.3)
    ] = FITTED_BEAM_SURVIVAL

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        if name == "beam_survival" and not self.use_beam_search:
            return f"applies only to beams; use --use-beam-search, {LEAVE_OUT}"
        if name in ("use_beam_search", "beam_survival") and workload is not None and not workload.shares:
            return f"every request asks for one sequence; use --n, {LEAVE_OUT}"
        return super().why_unread(name, replica, workload)

    @property
    def survival_of_beams(self) -> float | None:
        return self.beam_survival if self.use_beam_search else None


@dataclass(frozen=True, kw_only=True)
class ArenaOptions(BeamOptions):
    """Options of policies with contiguous reservations in one address space."""

    arena: Annotated[
        Literal["buddy", "first-fit", "best-fit"],
        Field(
            description='Placement of reservations: "buddy" rounds them up to powers of two, "first-fit" takes the'
            ' lowest free run that is long enough, "best-fit" the shortest.'
        ),
    ] = "buddy"


@dataclass(frozen=True, kw_only=True)
class KvGroupOptions(Options):
    """Options of policies with KV cache groups. Layers with a sliding window free the blocks before it."""

    disable_hybrid_kv_cache_manager: Annotated[
        bool, Field(description="Keep every token in all layers, also in those with a sliding window.")
    ] = False

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        """See ``Options``. The option has no effect on models without windows, nor where sequences share blocks."""
        if name != "disable_hybrid_kv_cache_manager":
            return super().why_unread(name, replica, workload)
        shape = model(replica.model)
        longest = replica.max_model_len or shape.max_model_len
        # Models with states refuse it by themselves.
        if shape.mixer is None and not shape.compressed and hybrid_layout(shape, longest) is None:
            return f"{shape.name} has no window shorter than {longest} tokens that is kept apart; leave it out"
        if self.shares_blocks(workload):
            return "where sequences share blocks every layer keeps every token; leave it out"
        return None

    @property
    def groups_layers(self) -> bool:
        return not self.disable_hybrid_kv_cache_manager

    def shares_blocks(self, workload: Workload | None) -> bool:
        """Whether sequences of the workload share blocks, so that all layers keep every token."""
        return False


def as_json(given: object) -> object:
    """A mapping as JSON with sorted keys, so that equal mappings give equal texts; other values unchanged."""
    return json.dumps(given, sort_keys=True) if isinstance(given, Mapping) else given


def _is_api_server(text: str | None) -> str | None:
    if text is not None:
        api_server_us(text, "completions")
    return text


@dataclass(frozen=True, kw_only=True)
class VllmServeOptions(WatermarkOptions, KvGroupOptions):
    """Options of policies with the pool and the API server of ``vllm serve``."""

    no_effect = {"watermark": 0, "outside_ms": 0}

    outside_ms: Annotated[
        float,
        Field(
            ge=0,
            le=60_000,
            allow_inf_nan=False,
            description="Time of a request outside of the engine, in ms: HTTP, tokenizer, detokenizer and network, part of TTFT and"
            " of the end-to-end latency. The default is that of the completions endpoint, fitted to five runs of Llama 2 7B, or with"
            f" --endpoint chat {CHAT_OUTSIDE_MS:g} ms, the least of 47 to 60 that were measured there. A server's own constants (--server)"
            " replace it.",
        ),
        Tried(53.0),
    ] = OUTSIDE_MS
    endpoint: Annotated[
        Literal["completions", "chat"],
        Field(
            description="Endpoint of vLLM's API server that clients call: decides the default of outside_ms, and the times that"
            " api_server measured has."
        ),
    ] = "completions"
    api_server: Annotated[
        str | None,
        BeforeValidator(as_json),
        AfterValidator(_is_api_server),
        Field(
            description="Time that the event loop of the API server works, beside outside_ms: microseconds of a request, of each"
            " prompt_token, of each step with outputs, and of each output token and chunk of it, as JSON; or measured, for those of"
            " vLLM 0.33 on one machine's CPU. Requests and outputs wait for the loop; default: it takes no time.",
            examples=["measured"],
        ),
        Tried('{"request": 3000}'),
    ] = None
    api_server_count: Annotated[
        Count,
        Field(description="Processes of the API server, with an event loop each, that share the requests."),
        Tried(2),
    ] = 1
    watermark: Annotated[
        float, Field(ge=0, lt=1, description="Share of the pool that an admission must leave free."), Tried(0.5)
    ] = 0.0
    gpu_memory_utilization: Annotated[
        float,
        Field(
            gt=0,
            le=1,
            description="Share of the GPU memory for weights, activations, CUDA graphs and KV cache, from which the pool is"
            " computed as vLLM does at its start.",
        ),
        Tried(0.5),
    ] = LATEST.gpu_memory_utilization
    async_scheduling: Annotated[bool, Field(description="Decide a step while the step before it runs.")] = True

    def require_kv_dtype(self, shape: ModelSpec, card: GpuSpec, kv_dtype: str) -> None:
        """See ``Options``; vLLM's backends have kernels for some cards and models."""
        message = refused_nvfp4(shape, card) if kv_dtype == NVFP4 else None
        if message is not None:
            remedy = f"vLLM refuses it for {shape.name} on {card.name} ({message.rstrip('.')}); take fp8"
            raise SettingError("kv_cache_dtype", kv_dtype, remedy)

    @property
    def schedules_ahead(self) -> bool:
        return self.async_scheduling

    @property
    def event_loops(self) -> tuple[int, Mapping[str, float]] | None:
        return (
            None if self.api_server is None else (self.api_server_count, api_server_us(self.api_server, self.endpoint))
        )

    def outside_ticks(self, known: int | None) -> int:
        """See ``Options``; that of the API server of ``vllm serve``, where no other is known."""
        if known is None:
            return round(self.request_outside_ms * PER_MS)
        if self.outside_ms not in (0.0, OUTSIDE_MS):
            remedy = f"the server's constants have {known / PER_MS:g} ms; leave one of them out"
            raise SettingError("outside_ms", self.outside_ms, remedy)
        return known

    @property
    def request_outside_ms(self) -> float:
        """Milliseconds of a request outside the engine: the user's value, else the endpoint's default."""
        return CHAT_OUTSIDE_MS if self.endpoint == "chat" and self.outside_ms == OUTSIDE_MS else self.outside_ms

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        """See ``Options``; a pool that is given leaves the memory unread."""
        if name == "api_server_count" and self.api_server is None:
            return f"the API server takes no time; use --api-server measured, {LEAVE_OUT}"
        if name == "gpu_memory_utilization" and replica.num_gpu_blocks_override is not None:
            return "--num-gpu-blocks-override sets the pool, whatever the memory; leave out one of them"
        return super().why_unread(name, replica, workload)


def minor_version(release: str) -> int:
    """Minor version of a vLLM release, such as 33 for "0.33".

    Raises:
        SettingError: The order of that release's free queue is not known.
    """
    minors = {f"0.{minor}": minor for minor in range(FIRST_ORDERED, LAST_ORDERED + 1)}
    if release not in minors:
        raise SettingError("vllm_release", release, f"must be from 0.{FIRST_ORDERED} to 0.{LAST_ORDERED}")
    return minors[release]


def _is_release(text: str) -> str:
    minor_version(text)
    return text


def _is_speculative(text: str | None) -> str | None:
    if text is not None:
        parse_speculative(text)
    return text


def _is_offloading(text: str | None) -> str | None:
    if text is not None:
        transfer_config(text)
    return text


@dataclass(frozen=True, kw_only=True)
class VllmV1Options(VllmServeOptions):
    """Options of vLLM V1."""

    long_prefill_token_threshold: Annotated[
        int,
        Field(
            ge=0,
            le=2**31,
            description="Most tokens of one sequence in a step, unless it is alone, so that a long prompt does not use the"
            " whole budget; 0 for no such bound.",
        ),
        Tried(32),
    ] = 0
    long_prefill_token_threshold_adaptive: Annotated[
        bool,
        Field(
            description="Raise long_prefill_token_threshold to an equal share of max_num_batched_tokens for each running and"
            " waiting sequence."
        ),
    ] = False
    max_num_active_seqs: Annotated[
        Count | None,
        Field(
            description="Sequences that may run at once, at most max_num_seqs, which sizes the CUDA graphs; default:"
            " max_num_seqs."
        ),
        Tried(2),
    ] = None
    scheduler_reserve_full_isl: Annotated[
        bool,
        Field(
            description="Admit a sequence only if the blocks of all its known tokens are free, not only those of its first chunk."
        ),
    ] = True
    prefix_cache_retention_interval: Annotated[
        int,
        Field(
            ge=0,
            le=2**31,
            description="Tokens between the checkpoints of windows and states within a prompt that stay cached; 0 keeps only those at"
            " its end, and where other requests continue it.",
        ),
        Tried(64),
    ] = 0
    prefill_schedule_interval: Annotated[
        Count,
        Field(
            description="Steps from one that computes prompts to the next that may, while sequences decode and none was left"
            " waiting; 1 for no such interval."
        ),
        Tried(4),
    ] = 1
    scheduling_policy: Annotated[
        Literal["fcfs", "priority"],
        Field(
            description='Order of the queue and of preemptions: "fcfs" is order of arrival, "priority" is the priority of'
            " requests, lower first, and then their arrival."
        ),
    ] = "fcfs"
    max_num_queued_reqs: Annotated[
        Count | None,
        Field(
            description="Unfinished requests, running or waiting, above which the API server rejects a new one; default: no"
            " limit."
        ),
        Tried(2),
    ] = None
    max_num_queued_tokens: Annotated[
        Count | None,
        Field(
            description="Prompt tokens of requests without a first token from which on the API server rejects a new request;"
            " default: no limit."
        ),
        Tried(100),
    ] = None
    kv_offloading_size: Annotated[
        Gibibytes,
        Field(
            description="Host memory for blocks of the prefix cache, in GiB over all tensor-parallel ranks, as vLLM's native"
            " offloading uses it; 0 for none."
        ),
        Tried(0.5),
    ] = 0.0
    kv_offloading_backend: Annotated[
        Literal["native", "lmcache"],
        Field(description="What keeps the blocks of --kv-offloading-size: vLLM, or LMCache, in chunks of 256 tokens."),
    ] = "native"
    kv_transfer_config: Annotated[
        str | None,
        BeforeValidator(as_json),
        AfterValidator(_is_offloading),
        Field(
            description="Tiers of the prefix cache behind the GPU, as vLLM's JSON: kv_connector (OffloadingConnector,"
            " LMCacheConnectorV1) and kv_connector_extra_config (cpu_bytes_to_use, block_size, spec_name TieringOffloadingSpec with"
            " secondary_tiers of type fs, obj or mooncake, and their size_gib, read_gb_s, write_gb_s, latency_us, shared).",
            examples=[
                '{"kv_connector_extra_config": {"spec_name": "TieringOffloadingSpec",'
                ' "secondary_tiers": [{"type": "fs", "size_gib": 1000}]}}'
            ],
        ),
        Tried('{"kv_connector": "OffloadingConnector", "kv_connector_extra_config": {"cpu_bytes_to_use": 536870912}}'),
    ] = None
    speculative_config: Annotated[
        str | None,
        BeforeValidator(as_json),
        AfterValidator(_is_speculative),
        Field(
            description="Speculative decoding, as vLLM's JSON: method (draft_model, eagle, eagle3, mtp or ngram), model,"
            " num_speculative_tokens, and how many drafts are accepted: rejection_sample_method synthetic with"
            " synthetic_acceptance_rates or synthetic_acceptance_length.",
            examples=[
                '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",'
                ' "synthetic_acceptance_rates": [0.8, 0.5]}'
            ],
        ),
        Tried(
            '{"method": "ngram", "num_speculative_tokens": 2, "rejection_sample_method": "synthetic",'
            ' "synthetic_acceptance_length": 2}'
        ),
    ] = None
    decode_context_parallel_size: Annotated[
        Count,
        Field(
            description="Tensor-parallel ranks that divide the tokens of every sequence among them, where they would hold copies of"
            " the same KV heads; a block has block_size tokens on each.",
            examples=[2, 4],
        ),
        Tried(2),
    ] = 1
    vllm_release: Annotated[
        str,
        AfterValidator(_is_release),
        Field(
            description=f"Release, 0.{FIRST_ORDERED} to 0.{LAST_ORDERED}, that orders the free queue; until 0.23 blocks without a"
            " hash are freed to its tail, not to its head. It also decides whether prefills export states for prefix hits."
            " The attention backend is the release's. Everything else is as in the latest.",
            examples=[f"0.{FIRST_ORDERED}", f"0.{LAST_ORDERED}"],
        ),
        Tried("0.22"),
    ] = f"0.{LAST_ORDERED}"
    attention_backend: Annotated[
        str | None,
        AfterValidator(lambda name: None if name is None else named_backend(name)),
        Field(
            description=f"Backend of attention, as vLLM's flag of this name: {', '.join(NAMED)}. The default is the one that the release"
            " chooses for the GPU, the model and the KV cache. It decides the time of steps that prefill and decode.",
            examples=[*NAMED],
        ),
        Tried("FLASHINFER"),
    ] = None
    moe_backend: Annotated[
        str | None,
        AfterValidator(lambda name: None if name is None else named_experts(name)),
        Field(
            description=f"Kernels of experts, as vLLM's flag of this name: {', '.join(NAMED_EXPERTS)}. The default are those that the release"
            " chooses for the GPU and the number format. Step times are those of the tables, whatever runs: it decides which measured servers"
            " are like this one.",
            examples=["marlin"],
        ),
        Tried("triton"),
        AlwaysTaken("names the kernels that run; refused where vLLM has none"),
    ] = None
    sampling: Annotated[
        Sampling,
        Field(
            description="How the server chooses tokens: as the client asks for, and else by generation_config.json of the model (Llama: top-p;"
            " Qwen3: top-k-top-p). The release's sampler takes time for each logit; that of greedy is left out.",
            examples=["top-p"],
        ),
    ] = "greedy"

    @staticmethod
    def _why_nothing_to_retain(replica: Replica) -> str | None:
        shape = model(replica.model)
        longest = replica.max_model_len or shape.max_model_len
        if not shape.compressed and not shape.mixer and hybrid_layout(shape, longest) is None:
            return f"{shape.name} has neither windows nor states that are kept apart, and vLLM refuses it; leave it out"
        return None

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        """See ``Options``; without priorities, in closed loops, and without the threshold that another option raises."""
        if name == "prefix_cache_retention_interval":
            return self._why_nothing_to_retain(replica)
        if name == "scheduling_policy" and workload is not None and workload.priority is None:
            return f"no request has a priority; use a trace with a column priority, {LEAVE_OUT}"
        if (
            name in ("max_num_queued_reqs", "max_num_queued_tokens")
            and workload is not None
            and workload.users is not None
        ):
            return (
                "what users do after a rejection is not known; use requests with arrivals of their own, or leave it out"
            )
        if name == "long_prefill_token_threshold_adaptive" and not self.long_prefill_token_threshold:
            return f"raises long_prefill_token_threshold, which is 0; give that, {LEAVE_OUT}"
        return super().why_unread(name, replica, workload)

    def deployed(self, deployment: Deployment) -> Deployment:
        return replace(
            deployment,
            decode_context_parallel=self.decode_context_parallel_size,
            vllm_minor=minor_version(self.vllm_release),
            attention_backend=self.attention_backend,
            moe_backend=self.moe_backend,
            sampling=self.sampling,
        )

    @property
    def speculative(self) -> SpeculativeConfig | None:
        return None if self.speculative_config is None else parse_speculative(self.speculative_config)

    @property
    def queue_limits(self) -> tuple[int | None, int | None]:
        return self.max_num_queued_reqs, self.max_num_queued_tokens

    @property
    def offloading(self) -> OffloadSpec | None:
        return parse_offloading(self.kv_transfer_config, self.kv_offloading_size, self.kv_offloading_backend)

    def offloaded(
        self, server: Server, num_blocks: int, block_size: int, beside: WindowPool | StatePool | None
    ) -> Offloaded | None:
        """See ``Options``; those of KV offloading.

        Raises:
            SettingError: The given memory holds no block.
        """
        spec = self.offloading
        if spec is None:
            return None
        drafts, ranks = self.speculative, server.tensor_parallel
        of_drafter = 0 if drafts is None else drafts.drafter_slot_bytes(server.model, ranks, server.deployment)
        # Ranks that divide a sequence keep a part of each block.
        block_size //= self.decode_context_parallel_size
        chunk_blocks = spec.chunk_blocks(block_size)
        if chunk_blocks > 1 and server.layout is not None:
            raise NotSimulated(spec.chunk_field, spec.chunk_value, "is not simulated over several KV groups")
        parts = server.deployment, server.layout, of_drafter * block_size
        chunk_bytes = offloaded_bytes(server.model, ranks, block_size, chunk_blocks, *parts)
        host_bytes = spec.host_bytes * (ranks if spec.of_each_rank else 1)
        chunks = host_bytes // chunk_bytes
        if not 0 < chunks <= MOST_HOST_BLOCKS:
            remedy = "holds no block; give more GiB" if not chunks else f"comes to {chunks:,} blocks; lower it"
            name = "kv_offloading_size" if self.kv_offloading_size else "kv_transfer_config"
            raise SettingError(name, self.kv_offloading_size or f"{host_bytes / GIB:g} GiB", remedy)
        return Offloaded(chunks, chunk_bytes, chunk_blocks, spec.tiers)

    def refused_combinations(
        self, replica: Replica, grouped: bool, layout: HybridLayout | None
    ) -> dict[str, dict[str, bool]]:
        both = {"requests that share memory": grouped}
        drafts = self.speculative_config is not None
        of_a_server = {"constants of a server": replica.server is not None}
        others: dict[str, dict[str, bool]] = {}
        if drafts:
            others["speculative_config"] = {
                "pipeline parallelism without asynchronous scheduling, where vLLM computes drafts in place of the token before them": (
                    replica.pipeline_parallel_size > 1 and not self.schedules_ahead
                ),
                **both,
                "--cost paper": replica.cost == "paper",
                "an allocator": replica.allocator is not None,
                **of_a_server,
            }
        if self.decode_context_parallel_size > 1:
            others["decode_context_parallel_size"] = {
                "a draft model": self.speculative is not None and self.speculative.method == "draft_model",
                **of_a_server,
            }
        if self.offloading is not None and self.offloading.tiers:
            # No other flag has them.
            others["kv_transfer_config"] = {"pipeline parallelism": replica.pipeline_parallel_size > 1}
        if self.offloading is not None:
            name = "kv_offloading_size" if self.kv_offloading_size else "kv_transfer_config"
            others[name] = others.get(name, {}) | {
                **both,
                "enable_prefix_caching = False": replica.enable_prefix_caching is False,
                "block ids, which recordings need": replica.ids,
            }
        if self.api_server is not None:
            others["api_server"] = {"speculative_config": drafts}
        return others


@dataclass(frozen=True, kw_only=True)
class VllmV0Options(WatermarkOptions, BeamOptions, KvGroupOptions):
    """Options of vLLM up to 0.6."""

    no_effect = {"watermark": 0, "swap_space": 0}
    required = frozenset({"use_beam_search", "shared_prefix_tokens"})

    preemption_mode: Annotated[
        Literal["recompute", "swap"],
        Field(description="Recompute preempted sequences, or swap them to the host."),
    ] = "recompute"
    swap_space: Annotated[
        Gibibytes, Field(description="Host memory for swapped blocks, in GiB per GPU."), Tried(0.03)
    ] = 20.0
    shared_prefix_tokens: Annotated[
        int,
        Field(
            ge=0,
            le=2**31,
            description="Tokens at the start of every prompt; their full blocks are in the pool from the start.",
        ),
        Tried(16),
    ] = 0

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        # Requests of several sequences are swapped in any case, which is what "swap" asks for.
        if name in ("preemption_mode", "swap_space") and workload is not None and workload.dialogue is not None:
            return "where requests have parents nothing is swapped; leave it out"
        if name == "swap_space" and self.preemption_mode != "swap" and workload is not None and not workload.shares:
            return f"nothing is swapped; use --preemption-mode swap, {LEAVE_OUT}"
        return super().why_unread(name, replica, workload)

    @property
    def pinned_tokens(self) -> int:
        return self.shared_prefix_tokens

    def host_blocks(self, server: Server, block_size: int) -> int:
        """See ``Options``; those of the swap space, also where only requests of several sequences are swapped."""
        if server.layout is not None and self.preemption_mode != "swap":
            return 0
        swap_bytes = int(self.swap_space * GIB)
        return host_blocks(
            server.model, server.tensor_parallel, block_size, swap_bytes, server.deployment, server.layout
        )

    def shares_blocks(self, workload: Workload | None) -> bool:
        grouped = workload is not None and (workload.shares or workload.dialogue is not None)
        return grouped or bool(self.shared_prefix_tokens)


def _is_page_size(kib: int) -> int:
    if kib not in PAGE_SIZES:
        raise SettingError("page_size", kib, f"one of {', '.join(map(str, PAGE_SIZES))} (KiB)")
    return kib


@dataclass(frozen=True, kw_only=True)
class VAttentionOptions(WatermarkOptions):
    """Options of vAttention."""

    page_size: Annotated[
        Count,
        AfterValidator(_is_page_size),
        Field(
            description="Size in KiB of the pages that vAttention maps, one each for K and V in every layer."
            " The tokens of such a page group are the block, unless a block size is given.",
            examples=list(PAGE_SIZES),
        ),
        Tried(128),
    ] = 2048

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        if name == "page_size" and replica.block_size is not None:
            return f"block_size = {replica.block_size} says what a page holds; leave out one of the two"
        return super().why_unread(name, replica, workload)


@dataclass(frozen=True, kw_only=True)
class TgiOptions(Options):
    """Options of Text Generation Inference."""

    waiting_served_ratio: Annotated[
        float,
        Field(ge=0, le=1e6, description="Decoding pauses for a prefill if this many requests wait per running one."),
        Tried(4.0),
    ] = 0.3
    max_waiting_tokens: Annotated[
        Count,
        Field(description="Decode steps after which waiting requests are admitted even below waiting_served_ratio."),
        Tried(1),
    ] = 20

    def why_unread(self, name: str, replica: Replica, workload: Workload | None) -> str | None:
        if name == "max_waiting_tokens" and not self.waiting_served_ratio:
            return f"with waiting_served_ratio = 0 no request waits for a larger batch; raise that, {LEAVE_OUT}"
        return super().why_unread(name, replica, workload)


@dataclass(frozen=True, kw_only=True)
class LightLLMOptions(Options):
    """Options of LightLLM."""

    output_estimate: Annotated[
        float, Field(gt=0, le=1e3, description="Estimated output length, as a share of max_tokens."), Tried(0.2)
    ] = 1.0


@dataclass(frozen=True, kw_only=True)
class LlamaCppOptions(Options):
    """Options of llama.cpp's server."""

    kv_unified: Annotated[
        bool,
        Field(
            description="One KV cache that all slots share, as llama.cpp has it where --parallel is not given (then with 4"
            " slots). Without it, each slot has an equal part of the cache."
        ),
    ] = False


def help_of(declared: type, name: str) -> str:
    """The help text of an option; empty if its declaration has none."""
    hint = _hints(declared)[name]
    found = [part for part in get_args(hint) if isinstance(part, FieldInfo)] if get_origin(hint) is Annotated else []
    return next((part.description for part in reversed(found) if part.description), "")


def type_of(declared: type, name: str) -> object:
    """The type of an option, without its help and its bounds."""
    hint = _hints(declared)[name]
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


@cache
def _hints(declared: type) -> dict[str, object]:
    return get_type_hints(declared, include_extras=True)


def option_names(declared: type) -> tuple[str, ...]:
    """Names of the options, in the order of their declaration."""
    return _names(declared)


# Every simulation asks for them dozens of times. A cached function takes no abstract class, by mypy's rules.
@cache
def _names(declared: type) -> tuple[str, ...]:
    return tuple(field.name for field in fields(declared))


def either(names: Iterable[str]) -> str:
    """Names as a list in words: "a, b or c"."""
    *most, last = names
    return f"{', '.join(most)} or {last}" if most else last
