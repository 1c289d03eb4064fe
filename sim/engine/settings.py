"""Every setting of a run, checked once; the names are vLLM's wherever vLLM has one."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated, Any, Literal

from pydantic import ConfigDict, Field, ValidationError, model_validator
from pydantic.dataclasses import dataclass

from ..policy import CACHING_POLICIES, POLICIES
from ..types.errors import SettingError

# Bounds lie far beyond any machine there is, and within what int64 ticks and tables hold.
Count = Annotated[int, Field(ge=1, le=2**31)]
Blocks = Annotated[int, Field(ge=1, le=2**26)]
BlockSize = Annotated[int, Field(ge=1, le=65_536)]
Gibibytes = Annotated[float, Field(ge=0, le=65_536)]
Scale = Annotated[float, Field(ge=1e-3, le=1e3)]
Seconds = Annotated[float, Field(ge=0, le=8.0e6)]
#: Fitted on beam search with two beams in SOSP'23's Fig 15 (`fragmeter reproduce fig15`).
FITTED_BEAM_SURVIVAL = 0.92
#: Pages that vAttention maps, in KiB: those of its driver, and CUDA's own.
PAGE_SIZES = (64, 128, 256, 2048)


@dataclass(frozen=True, kw_only=True, config=ConfigDict(extra="forbid"))
class Settings:
    """One replica: its policy, its memory, its model and GPUs, and how it is simulated.

    Attributes:
        policy: Scheduler and allocator, by the name of a system; ``fragmeter list policies`` lists them.
        model: Preset (``fragmeter list models``), or path to a Hugging Face ``config.json``. Layers with a sliding window shorter than
            ``max_model_len`` keep what it needs under vllm-sosp23, vllm-v0 and vllm-v1. Under the other policies,
            where sequences share blocks, and with chunked attention (Llama 4) all layers keep every token.
        gpu: Preset: a100-40gb, a100-80gb, h100-80gb or h200.
        tensor_parallel_size: GPUs that share the model and the pool.
        pipeline_parallel_size: Stages that the layers are divided into, each on ``tensor_parallel_size`` GPUs.
        quantization: Number format of the weights; None takes the checkpoint's, which for the presets is 16 bit
            but for deepseek-v3 (fp8) and gpt-oss-120b (mxfp4).
        kv_cache_dtype: Number format of the KV cache; "auto" is 16 bit.
        enforce_eager: Run without CUDA graphs, as the systems of SOSP'23 did. With them batches are padded up to
            captured sizes, and the graphs take memory from the pool.
        block_size: Tokens a KV block; None takes the policy's default, 16 for most.
        page_size: vAttention maps memory in pages of so many KiB (64, 128, 256 or 2048), one for K and one for V in
            every layer at once; the tokens they hold are its block, unless a block size is given.
        num_gpu_blocks_override: Blocks of the pool; None takes the paper's reckoning for model and GPU.
        enable_prefix_caching: Whether blocks that are freed keep their contents for prompts that begin alike; None
            does so where the requests say what they are made of and the policy can.
        max_model_len: Longest prompt + output in tokens; None takes the model's.
        max_num_seqs: Most sequences in a step, or the static batch size; None takes the policy's default.
        max_num_batched_tokens: Most tokens in a step, a decode counting 1; None takes the policy's default.
        watermark: Share of the pool that an admission must leave free.
        arena: How the Orca policies with chunks place them: "buddy" rounds to powers of two, "first-fit" takes the
            lowest free run that is long enough, "best-fit" the shortest.
        preemption_mode: Whether a preempted sequence is computed again or swapped to the host.
        waiting_served_ratio: TGI takes a new batch where so many times as many wait as run,
        max_waiting_tokens: or where it took none for so many decode steps.
        output_estimate: Share of ``max_tokens`` that LightLLM takes an output to have.
        schedule_policy: SGLang's queue: "lpm" puts the longest cached prefix first, "fcfs" leaves it as it came.
        use_beam_search: Whether a request's n sequences are beams, of which in every step some die and others fork;
            else they are samples, which all live to the end.
        beam_survival: Probability that a beam lives on for a step.
        shared_prefix_tokens: Tokens that every prompt begins with; their full blocks are computed once and kept.
        swap_space: Host memory for swapped blocks, in GiB a GPU.
        cost: Step time: "paper" (fitted to OPT-13B on an A100-40GB, 16 bit, without graphs), "roofline", "fitted" (the
            profile of the GPU that comes with the package) or the path of a calibration file; None takes the paper's
            where it applies, else the roofline.
        step_scale: Factor on the step time; None takes 1, and for the paper's the one fitted to its Fig 13a.
        disable_hybrid_kv_cache_manager: Keep every token in all layers, also in those with a window.
        window: Start and end, in simulated seconds, of the span that is measured; None is all of it.
        leap: Whether to leap over steps that decide nothing. The results are the same bits.
        ids: Whether to hand out physical block ids. Decisions are the same; beams always have them.
        seed: Seed of whatever is drawn.
    """

    policy: str = "vllm-sosp23"
    model: str = "opt-13b"
    gpu: str = "a100-40gb"
    tensor_parallel_size: Count = 1
    pipeline_parallel_size: Count = 1
    quantization: Literal["awq", "gptq", "int8", "fp8"] | None = None
    kv_cache_dtype: Literal["auto", "fp16", "bf16", "fp8", "int8", "int4"] = "auto"
    enforce_eager: bool = True
    block_size: BlockSize | None = None
    page_size: Count = 2048
    num_gpu_blocks_override: Blocks | None = None
    enable_prefix_caching: bool | None = None
    max_model_len: Count | None = None
    max_num_seqs: Count | None = None
    max_num_batched_tokens: Count | None = None
    watermark: Annotated[float, Field(ge=0, lt=1)] = 0.01
    arena: Literal["buddy", "first-fit", "best-fit"] = "buddy"
    preemption_mode: Literal["recompute", "swap"] = "recompute"
    waiting_served_ratio: Annotated[float, Field(ge=0, le=1e6)] = 0.3
    max_waiting_tokens: Count = 20
    output_estimate: Annotated[float, Field(gt=0, le=1e3)] = 1.0
    schedule_policy: Literal["lpm", "fcfs"] = "lpm"
    use_beam_search: bool = False
    beam_survival: Annotated[float, Field(ge=0, le=1)] = FITTED_BEAM_SURVIVAL
    shared_prefix_tokens: Annotated[int, Field(ge=0, le=2**31)] = 0
    swap_space: Gibibytes = 20.0
    cost: str | None = None
    step_scale: Scale | None = None
    disable_hybrid_kv_cache_manager: bool = False
    window: tuple[Seconds, Seconds] | None = None
    leap: bool = True
    ids: bool = False
    seed: Annotated[int, Field(le=2**63)] = 0

    @model_validator(mode="after")
    def _check(self) -> Settings:
        if self.policy not in POLICIES:
            raise SettingError("policy", self.policy, f"one of {', '.join(POLICIES)}")
        if self.seed < 0:
            # Also where nothing is drawn: results say by which seed they came.
            raise SettingError("seed", self.seed, "must be 0 or more")
        if self.enable_prefix_caching and self.policy not in CACHING_POLICIES:
            remedy = f"{self.policy} keeps no prefixes; of the policies {', '.join(CACHING_POLICIES)} can"
            raise SettingError("enable_prefix_caching", True, remedy)
        if self.page_size not in PAGE_SIZES:
            raise SettingError("page_size", self.page_size, f"one of {', '.join(map(str, PAGE_SIZES))} (KiB)")
        if self.window and self.window[0] >= self.window[1]:
            raise SettingError("window", self.window, "must end after it starts")
        return self

    def as_dict(self) -> dict[str, Any]:
        """Every setting, for ``run.json``."""
        return asdict(self)


def settings(**fields: Any) -> Settings:
    """Settings from plain values.

    Raises:
        SettingError: A field is unknown or its value cannot be; the text names it.
    """
    try:
        return Settings(**fields)
    except ValidationError as error:
        raise setting_error(error) from None


def setting_error(error: ValidationError) -> SettingError:
    """The first complaint of pydantic's, as one line of ours."""
    first = error.errors()[0]
    name = ".".join(str(part) for part in first["loc"][:1])
    return SettingError(name, first["input"], first["msg"])
