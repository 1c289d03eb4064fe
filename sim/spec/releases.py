"""Differences between releases of vLLM: the memory that they leave for the KV cache, their defaults, and their free queue.

Bytes are from start-up logs of H100s. Up to 0.16 the sampler of the profiled step holds 38 bytes per logit (Llama 3.1
8B: 4.76 GiB), since 0.17 14 bytes (1.89 GiB). Since 0.20 the memory of CUDA graphs is subtracted from the KV cache, and 0.92 of the GPU
memory is requested by default, before 0.9 (``envs.py`` and ``config/cache.py`` in the wheels of 0.17 to 0.21). Asynchronous
scheduling is the default since 0.14 (pull request 27614). The V1 engine is the default since 0.8 (pull request 15064), and the V0 engine is gone
since 0.11 (its release notes); for releases before the oldest entry below, that entry is taken.

vLLM has two model runners, and the second profiles its start in another way. Its sampler skips top-k and top-p while it
profiles, and holds 6 bytes a logit (the model's own and a copy in fp32), in 0.26 and from 0.28 to 0.32 the model's own 2. Up to 0.28 it
reports no memory of CUDA graphs (``profile_cudagraph_memory`` returns 0), so that none is subtracted; since 0.29 it estimates them. By default
it runs

    0.22    Qwen3                         unquantized, without experts
    0.23    Llama, Mistral, Qwen3         unquantized, without experts
    0.24    some with experts as well     quantized or not
    0.25    all without experts and states, some with experts
    0.29    all models

as the wheels of 0.21 to 0.33 say (``use_v2_model_runner``; that of 0.29 asks for no architecture). "Quantized" is a checkpoint with a
``quantization_config``: ``--quantization fp8`` of one in 16 bits is not. Some drafters keep the first one
(``_get_v2_model_runner_unsupported_features``): n-grams up to 0.31, a draft model up to 0.30. In 0.33 its sampler profiles top-k and top-p again; how
much that takes is not known from a log, and assumed to be the 14 bytes of the first one.

The order of the free queue is ``BlockPool.free_blocks`` in the wheels of 0.9, 0.10, 0.11, 0.14, 0.18 and 0.20 to 0.33. Up to
0.22 every freed block goes to the tail. 0.23 puts blocks without a hash first that leave a window, and other blocks last.
Since 0.24 (pull request 42656) blocks without a hash go to the head; with prefix caching off 0.27 put all blocks last
(pull request 48017), which 0.28 undid (pull request 51482). Releases before 0.9 free tables in another order.

Kernels export states from within a prefill (``StateMixer.export_tokens``) since 0.29 in Kimi K3, 0.32 in Mamba-2 and 0.33 in
gated delta nets, as the wheels of 0.28 to 0.33 say. Entries without a change are there for it, for the list of CUDA graphs
(``startup.cuda_graphs``), for the modes of states (``experiments.vllm_serve.states``), and for its models and formats (``experiments.vllm_serve.formats``).

A model with states does not start since 0.20 where max_num_seqs exceeds the blocks of the pool (pull request 38270): the wheels of 0.20
to 0.33 have the check, and those of 0.18 to 0.19.1 capture smaller graphs instead. Prefixes of such models are cached by default since
0.28 (``is_prefix_caching_supported`` in the wheels of 0.12 to 0.33, and in those of 0.26 and 0.27 ``not model_config.is_hybrid`` beside it). Defaults of a step are larger on GPUs from 160 GiB on since 0.28,
and those of an A100 are those of small GPUs since 0.9 (``get_batch_defaults`` in the wheels of 0.8 to 0.33).

Blocks of windows are freed on processed tokens since 0.26, so that each step in flight keeps its own (``max_in_flight_tokens`` in the wheels
of 0.25 and 0.26).

Of the check for one sequence of max_model_len (``get_kv_cache_configs`` in the wheels of 0.11 to 0.33): from 0.14 to 0.16 the least memory of
any worker is compared with the groups of all pipeline stages, before and after with those of the worker's own; since 0.20.1
``--num-gpu-blocks-override`` replaces the memory in it; since 0.29 the null block is taken off.

FlashInfer's kernels for mxfp4 experts on Blackwell take a rank's width in multiples of 256, and since 0.27 of 128
(``mxfp4_round_up_hidden_size_and_intermediate_size`` in the wheels of 0.19 to 0.30 and 0.33, ``create_weights`` before). On Hopper the
wheels up to 0.11 have no Triton kernels, so that Marlin's run (two logs of 0.11 have its weights, 65.97 GiB of gpt-oss 120B; an image
with kernels of its own logs 64.38). Those of 0.12 and later order values and scales anew (``HopperMXValueLayout``, which pads to 64 bytes
and 64 rows from 0.17 to 0.21, and ``HopperMXScaleLayout``), and up to 0.24 the checkpoint's scales stay beside theirs (``del
layer.w13_weight_scale`` since 0.25). So logged weights are those of the code within 0.02 GiB: gpt-oss 120B 64.38 GiB (0.14.1,
vllm-project/vllm#33155), 20B 13.64 and on two ranks 7.01 (0.19, llm-d-planner).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from .shape import ModelSpec

#: Multiples to which Marlin pads the hidden size and a rank's width of mxfp4 experts.
MARLIN_MXFP4 = (256, 128)
#: Bytes a logit of FlashInfer's top-k and top-p: 2 of the model, 4 in fp32, 4 masked and 4 of probabilities.
FLASHINFER_SAMPLER_BYTES = 14


@dataclass(frozen=True, slots=True)
class Release:
    """A release and the later ones up to the next entry. The defaults are those of the oldest.

    Attributes:
        since: Major and minor version.
        sampler_bytes: Bytes per sampled logit at the peak of the profiled step.
        fewest_sampler_bytes: The same with FlashInfer's sampler, where it may be installed: up to 0.10 vLLM takes it then.
        sampler_rows: Whether top-k of the first model runner keeps a row of logits in fp32 for each multiprocessor.
        v2_sampler_bytes: ``sampler_bytes`` of the second model runner.
        keeps_video_text: Whether outputs of the encoder are copied to a buffer for a video and the text between its frames.
        v2_warm_up_bytes: The same when it warms up with all that a request may ask for (``warmup_kernels``): since 0.23 by FlashInfer.
        v2_warms_up_first: Whether it does so before CUDA graphs are captured.
        profiles_context: Whether latent attention profiles the keys and values of a context.
        keeps_workspace: Whether the experts' workspace is kept from one layer to the next, and after the profile.
        benchmarks_embedding: Whether logs show that a start without a compile cache holds the embedding a second time.
        counts_graphs: Whether the memory of CUDA graphs is subtracted from the KV cache.
        gpu_memory_utilization: The default.
        async_scheduling: The default.
        v2_model_types: Model types that run on the second model runner.
        v2_quantized: Whether these do so if their weights are quantized.
        v2_dense: Whether so do all models with attention alone and without experts.
        v2_all: Whether so do all models.
        v2_counts_graphs: Whether the second model runner counts CUDA graphs.
        first_runner_drafts: Methods of drafts that the second model runner does not run.
        mxfp4_width: Multiple to which a rank's width of mxfp4 experts is padded for FlashInfer's kernels on Blackwell.
        mxfp4_triton: Multiple of bytes and rows to which Triton's kernels on Hopper pad values of mxfp4 experts; 0 is a wheel without these kernels.
        keeps_block_scales: Whether the checkpoint's scales stay beside those that these kernels order anew.
        checks_states: Whether max_num_seqs is compared with the blocks that hold states.
        caches_states: Whether prefixes of models with states and attention are cached by default.
        large_a100: Whether an A100 of 80 GB has the default batch of a large GPU.
        largest_batch: Whether GPUs from 160 GiB on have a larger default batch.
        keeps_in_flight: Whether a window keeps the tokens of all steps in flight, not of one.
        checks_all_stages: Whether each pipeline stage must hold the longest sequence's KV cache of all stages.
        checks_override: Whether ``--num-gpu-blocks-override`` must hold the longest sequence.
        reserves_null_block: Whether the null block is not available for the longest sequence.
    """

    since: tuple[int, int] = (0, 0)
    sampler_bytes: int = 38
    fewest_sampler_bytes: int = FLASHINFER_SAMPLER_BYTES
    sampler_rows: bool = False
    v2_sampler_bytes: int = 6
    keeps_video_text: bool = False
    v2_warm_up_bytes: int = 6
    v2_warms_up_first: bool = False
    profiles_context: bool = False
    keeps_workspace: bool = False
    benchmarks_embedding: bool = False
    counts_graphs: bool = False
    gpu_memory_utilization: float = 0.9
    async_scheduling: bool = False
    v2_model_types: frozenset[str] = frozenset()
    v2_quantized: bool = False
    v2_dense: bool = False
    v2_all: bool = False
    v2_counts_graphs: bool = False
    first_runner_drafts: frozenset[str] = frozenset({"ngram", "draft_model"})
    mxfp4_width: int = 256
    mxfp4_triton: int = 0
    keeps_block_scales: bool = True
    checks_states: bool = False
    caches_states: bool = False
    large_a100: bool = True
    largest_batch: bool = False
    keeps_in_flight: bool = False
    checks_all_stages: bool = False
    checks_override: bool = False
    reserves_null_block: bool = False

    def second_runner(self, model: ModelSpec, quantized: bool, drafts: str | None = None) -> bool:
        """Whether a model runs on the second model runner.

        Args:
            quantized: Whether the checkpoint's own weights are.
            drafts: Method of its drafter.
        """
        if drafts in self.first_runner_drafts:
            return False
        second = model.model_type in self.v2_model_types or (self.v2_dense and not (model.experts or model.mixer))
        return self.v2_all or (second and (self.v2_quantized or not quantized))

    def profiling(self, model: ModelSpec, quantized: bool, drafts: str | None = None) -> Release:
        """The release as it profiles a model, with the model runner that it takes for it."""
        if not self.second_runner(model, quantized, drafts):
            return self
        return replace(self, sampler_bytes=self.v2_sampler_bytes, counts_graphs=self.v2_counts_graphs)


_DENSE = frozenset({"llama", "mistral", "qwen3"})
_WITH_EXPERTS = _DENSE | {"deepseek_v2", "qwen2_moe", "granitemoe"}
#: What changed in a minor version of major version 0.
_CHANGES: tuple[tuple[int, dict[str, Any]], ...] = (
    (9, {"large_a100": False}),
    (10, {}),
    (11, {"profiles_context": True, "fewest_sampler_bytes": 38, "keeps_video_text": True}),
    (12, {"mxfp4_triton": 32}),
    (13, {"keeps_video_text": False}),
    (14, {"async_scheduling": True, "checks_all_stages": True}),
    (15, {}),
    (
        17,
        {
            "checks_all_stages": False,
            "sampler_bytes": 14,
            "fewest_sampler_bytes": 14,
            "sampler_rows": True,
            "keeps_workspace": True,
            "mxfp4_triton": 64,
        },
    ),
    (18, {}),
    (19, {"benchmarks_embedding": True}),
    (20, {"counts_graphs": True, "gpu_memory_utilization": 0.92, "checks_states": True, "checks_override": True}),
    (21, {}),
    (22, {"v2_model_types": frozenset({"qwen3"}), "mxfp4_triton": 32}),
    (23, {"v2_model_types": _DENSE, "v2_warm_up_bytes": FLASHINFER_SAMPLER_BYTES}),
    (24, {"v2_model_types": _WITH_EXPERTS, "v2_quantized": True}),
    (25, {"v2_dense": True, "keeps_block_scales": False}),
    (26, {"keeps_in_flight": True, "v2_sampler_bytes": 2}),
    (27, {"v2_sampler_bytes": 6, "mxfp4_width": 128}),
    (28, {"caches_states": True, "largest_batch": True, "v2_sampler_bytes": 2}),
    (
        29,
        {
            "v2_counts_graphs": True,
            "reserves_null_block": True,
            "v2_all": True,
            "v2_model_types": frozenset(),
            "v2_quantized": False,
            "v2_dense": False,
        },
    ),
    (30, {"v2_warms_up_first": True}),
    (31, {"first_runner_drafts": frozenset({"ngram"})}),
    (32, {"first_runner_drafts": frozenset()}),
    (33, {"v2_sampler_bytes": 14}),
)


def _releases() -> Iterator[Release]:
    found = Release()
    yield found
    for minor, changes in _CHANGES:
        found = replace(found, since=(0, minor), **changes)
        yield found


_RELEASES = tuple(_releases())
#: The release with the other changes of 0.20 that compares the memory before ``--num-gpu-blocks-override``.
_WITHOUT_OVERRIDE = (0, 20, 0)
LATEST = _RELEASES[-1]
#: The first release with the V1 engine by default, and the first one without the V0 engine.
FIRST_V1, FIRST_WITHOUT_V0 = (0, 8), (0, 11)
#: Minor versions of the first and the last release with a known order of the free queue.
FIRST_ORDERED, LAST_ORDERED = 9, 33


def all_releases() -> tuple[Release, ...]:
    """All entries, the oldest first."""
    return _RELEASES


def release(version: tuple[int, int], patch: int | None = None) -> Release:
    """The entry for a version; without its third number the last one of that minor version is taken."""
    found = max((found for found in _RELEASES if found.since <= version), key=lambda found: found.since)
    return replace(found, checks_override=False) if (*version, patch) == _WITHOUT_OVERRIDE else found


def free_queue(minor: int, caching: bool, by_token: bool) -> str | None:
    """Name of the order in which free blocks are taken, of ``FREE_QUEUES`` (``memory.prefix.block_pool``).

    Args:
        minor: Minor version, from ``FIRST_ORDERED`` to ``LAST_ORDERED``.
        caching: Whether prefix caching is on.
        by_token: Whether every layer keeps all tokens; otherwise some have a window or a state.

    Returns:
        None for a release in which that depends on the layer.
    """
    if minor == 23 and not by_token:
        return None
    return "unhashed-first" if minor >= 24 and (caching or minor != 27) else "least-recently-used"
