"""Settings of a run, validated once. Names are vLLM's where vLLM has the setting."""

from __future__ import annotations

from dataclasses import asdict, fields
from difflib import get_close_matches
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.dataclasses import dataclass
from pydantic_core import ArgsKwargs

from ..policy.base import AnyPolicy
from ..policy.options import Options, either, option_names
from ..policy.registry import POLICIES, declaring, options_by_policy, policy
from ..spec.deployment import require_counted
from ..types import ticks
from ..types.bounds import AlwaysTaken, Blocks, BlockSize, Count, Replicas, Scale, Seconds, Seed, Tokens, Tried
from ..types.errors import SettingError
from ..types.validation import requirement


def _counted(kv_cache_dtype: object) -> object:
    if isinstance(kv_cache_dtype, str):
        require_counted("kv_cache_dtype", kv_cache_dtype)
    return kv_cache_dtype


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """Settings of one replica: policy, memory, model, GPUs, and the simulation itself.

    Attributes:
        policy: Scheduler and its memory, by the name of a system; ``fragmeter list policies`` lists them.
        model: Preset (``fragmeter list models``), ``org/name`` of a repository on the Hugging Face hub, or path of a ``config.json``
            or of the folder with it. Under vllm-sosp23, vllm-v0 and vllm-v1, layers with a sliding window shorter than ``max_model_len`` keep only the tokens of
            the window. All layers keep every token under the other policies, with shared blocks, and with chunked
            attention (Llama 4).
        gpu: Preset (``fragmeter list gpus``), or a FILE.json that describes one.
        tensor_parallel_size: GPUs that share the model and the pool.
        pipeline_parallel_size: Pipeline stages, each on ``tensor_parallel_size`` GPUs.
        data_parallel_size: Engines that share the experts of a model: each holds all other weights, and serves requests of
            its own. A replica is one engine.
        enable_expert_parallel: Whether each GPU holds whole experts, instead of a slice of every expert.
        quantization: Number format of the weights; default: the checkpoint's (``fragmeter list models``).
        kv_cache_dtype: Number format of the KV cache; "auto" is 16 bit.
        enforce_eager: Run without CUDA graphs. With them, batches are padded to captured sizes, and the graphs take memory
            from the pool. Default: with CUDA graphs under vllm-v1, without them under the other policies, as the systems
            of SOSP'23 ran.
        block_size: Tokens per KV block; default: the policy's, 16 for most.
        num_gpu_blocks_override: Blocks of the pool; default: computed from model and GPU, under vllm-v1 as ``vllm serve``
            does at its start, else as in the paper.
        enable_prefix_caching: Keep the contents of freed blocks for prompts with the same prefix. Default: enabled under
            vllm-v1, where a preempted sequence at least finds its own blocks again, and under other policies with a
            prefix cache if the requests describe the contents of their prompts.
        max_model_len: Longest prompt + output in tokens; default: the model's. As for vllm serve, 16K is 16,384 and 16k is 16,000.
        max_num_seqs: Maximum number of sequences in a step, or the size of static batches; default: the policy's.
        max_num_batched_tokens: Maximum number of tokens in a step, where a decode counts 1; default: the policy's. 8K is 8,192 and
            8k is 8,000.
        allocator: Memory that replaces the policy's own, as ``package.module:ClassName`` or the name of an entry point
            of the group ``fragmeter.allocators``; docs/extending.md describes its interface.
        cost: Step time: "paper" (fitted to OPT-13B on an A100-40GB, 16 bit, without graphs), "roofline", "fitted" (the
            profile of the GPU in the package) or the path of a calibration file. Default: fitted where the GPU has a
            profile that covers the model, else roofline.
        server: Constants of a measured server: time outside of the engine, and of a step beside its operations. A file of
            ``fragmeter validate --against --save-server``, which is refused for another GPU, model, parallelism, release
            or cost.
        step_scale: Factor on the step time; default: 1, and for paper the factor fitted to Fig 13a.
        window: Start and end of the measurement in simulated seconds, of slots, hits of the prefix cache and the worth of what it keeps;
            what is served before warms the cache. Latencies are of all requests. Default: the whole run.
        leap: Simulate all steps between two decisions as one event. The results are the same bits.
        check_leaps: Serve the requests beside the run a second time, step by step, ask the policy before each step whether its
            decision stays the same, as the leap says, and compare both. Default: the first 200 leaps and one in 20 after them, of a
            policy or a memory of another package. No part of ``as_dict``.
        core: Use the compiled core for the runs that it serves (docs/scale.md). The results are the same bits, so it is no part
            of ``as_dict``.
        ids: Allocate physical block ids. Decisions are the same; beams always have ids.
        seed: Seed of all random draws.
        options: Options of policies, by name, as ``Policy.options_type`` declares them, without those at their
            default. Given as keywords, like all other settings: ``settings(policy="tgi", max_waiting_tokens=10)``.
    """

    policy: Annotated[str, AlwaysTaken("names what is simulated")] = "vllm-sosp23"
    model: Annotated[str, AlwaysTaken("names what is simulated")] = "opt-13b"
    gpu: Annotated[str, AlwaysTaken("names what is simulated")] = "a100-40gb"
    tensor_parallel_size: Annotated[Count, Tried(2)] = 1
    pipeline_parallel_size: Annotated[Count, Tried(2)] = 1
    data_parallel_size: Annotated[Replicas, Tried(2)] = 1
    enable_expert_parallel: bool = False
    quantization: Annotated[Literal["awq", "gptq", "int8", "fp8", "nvfp4"] | None, Tried("fp8")] = None
    kv_cache_dtype: Annotated[
        Literal["auto", "fp16", "bf16", "fp8", "int8", "int4", "nvfp4"], BeforeValidator(_counted), Tried("fp8")
    ] = "auto"
    enforce_eager: bool | None = None
    block_size: Annotated[BlockSize | None, Tried(8)] = None
    num_gpu_blocks_override: Annotated[Blocks | None, Tried(150)] = None
    enable_prefix_caching: bool | None = None
    max_model_len: Annotated[Tokens | None, Tried(130)] = None
    max_num_seqs: Annotated[Count | None, Tried(2)] = None
    max_num_batched_tokens: Annotated[Tokens | None, Tried(100)] = None
    allocator: Annotated[str | None, AlwaysTaken("names what is simulated")] = None
    cost: Annotated[str | None, Tried("fitted")] = None
    server: Annotated[str | None, AlwaysTaken("names what is simulated; refused where it is another server's")] = None
    step_scale: Annotated[Scale | None, Tried(2.0)] = None
    window: Annotated[tuple[Seconds, Seconds] | None, Tried((0.1, 0.5))] = None
    leap: Annotated[bool, AlwaysTaken("changes no result by design")] = True
    check_leaps: Annotated[bool | None, AlwaysTaken("changes no result by design")] = None
    core: Annotated[bool, AlwaysTaken("changes no result by design")] = True
    ids: Annotated[bool, AlwaysTaken("changes no result by design; recordings set it")] = False
    seed: Annotated[Seed, AlwaysTaken("results name their seed, even if nothing is drawn")] = 0
    options: tuple[tuple[str, Any], ...] = ()

    @model_validator(mode="before")
    @classmethod
    def _gather_options(cls, given: ArgsKwargs) -> ArgsKwargs:
        """Keywords that are no fields are options of policies."""
        found = dict(given.kwargs or {})
        options = dict(found.pop("options", ()))
        name = found.get("policy", cls.policy)
        # Of what is no text the field itself complains.
        chosen = policy(name if isinstance(name, str) else cls.policy)
        for name in [name for name in found if name not in SHARED]:
            options[name] = found.pop(name)
        checked = {name: _checked_option(name, value, chosen) for name, value in options.items()}
        given_options = ((name, value) for name, value in checked.items() if value != default_of(name, chosen))
        return ArgsKwargs(given.args, found | {"options": tuple(sorted(given_options))})

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.enable_prefix_caching and not self.kind.caches_prefixes:
            able = [name for name, kind in POLICIES.items() if kind.caches_prefixes]
            remedy = f"{self.policy} keeps no prefixes; use {either(able)}"
            raise SettingError("enable_prefix_caching", True, remedy)
        if self.window and self.window[0] >= self.window[1]:
            raise SettingError("window", self.window, "must end after it starts")
        return self

    @property
    def kind(self) -> type[AnyPolicy]:
        """The class of the policy."""
        return policy(self.policy)

    @property
    def edges(self) -> tuple[int, ...]:
        """Ticks at which the measured window begins and ends, if there is one."""
        return tuple(ticks.from_seconds(edge) for edge in self.window or ())

    @property
    def policy_options(self) -> Options:
        """The options that this policy declares: the given values, and the defaults of the others."""
        declared = self.kind.options_type
        names = option_names(declared)
        return declared(**{name: value for name, value in self.options if name in names})

    def value(self, name: str) -> Any:
        """The value of a setting or option by its name, also of an option of another policy.

        Raises:
            SettingError: There is none of that name.
        """
        if name in SHARED:
            return getattr(self, name)
        return dict(self.options).get(name, default_of(name, self.kind))

    def given(self) -> dict[str, Any]:
        """Settings with another value than the default, those of all policies included."""
        shared = {name: getattr(self, name) for name in SHARED}
        return {name: value for name, value in shared.items() if value != getattr(Settings, name)} | dict(self.options)

    def as_dict(self) -> dict[str, Any]:
        """Every setting of the run by its name, for ``run.json``: the shared ones and the policy's options."""
        shared = {name: value for name, value in asdict(self).items() if name not in ("options", *_UNRECORDED)}
        return shared | asdict(self.policy_options) | dict(self.options)


#: Settings that change no result and are not recorded.
_UNRECORDED = ("core", "check_leaps")
#: Settings that all policies share.
SHARED = tuple(field.name for field in fields(Settings) if field.name != "options")


def default_of(name: str, chosen: type[AnyPolicy] | None = None) -> Any:
    """The default of a setting, or of a policy's option.

    Raises:
        SettingError: There is none of that name.
    """
    if name in SHARED:
        return getattr(Settings, name)
    return getattr(_declaring(name, None, chosen), name)


def _declaring(name: str, value: Any, chosen: type[AnyPolicy] | None) -> type[Options]:
    declared = declaring(name, chosen)
    if declared is None:
        near = get_close_matches(name, [*SHARED, *options_by_policy()], n=1)
        raise SettingError(name, value, f"there is no such setting{f'; did you mean {near[0]}?' if near else ''}")
    return declared


def _checked_option(name: str, value: Any, chosen: type[AnyPolicy]) -> Any:
    """The value, as its declaration takes it; None stands for the default."""
    declared = _declaring(name, value, chosen)
    if value is None:
        return getattr(declared, name)
    try:
        return getattr(declared(**{name: value}), name)
    except ValidationError as error:
        raise setting_error(error) from None


def settings(**fields: Any) -> Settings:
    """Settings from plain values.

    Raises:
        SettingError: A field is unknown or its value cannot be; the text names it.
    """
    try:
        return Settings(**fields)
    except ValidationError as error:
        raise setting_error(error) from None


def setting_error(error: ValidationError, field: str = "") -> SettingError:
    """The first error of pydantic as one line: field, value, requirement.

    Args:
        field: Name of the field where the value was validated alone, so that pydantic does not know it.
    """
    first = error.errors()[0]
    name = str(first["loc"][0]) if first["loc"] else field
    return SettingError(name, first["input"], requirement(first))
