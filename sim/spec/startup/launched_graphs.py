"""What of a launch decides its CUDA graphs and their memory (``cuda_graphs``)."""

from __future__ import annotations

from ..attention_backends import FLASH, FLASHINFER, TRITON_FLASHINFER, chosen_attention, need_of
from ..states import GatedDelta
from .cuda_graphs import Captures, GraphBatch, GraphShape, Reduction, Support, captures, estimated_bytes
from .estimate import Estimate, exactly
from .launch import Launch

_FIRST_BLACKWELL = 10
_GPT_OSS = "gpt_oss"


def cuda_graph_bytes(launch: Launch, layers: range) -> Estimate:
    """What is subtracted for CUDA graphs before they are captured, on the GPUs of the stage with these layers.

    Raises:
        SettingError: vLLM refuses the sizes.
    """
    if not launch.profiling.counts_graphs:
        return exactly(0)
    return estimated_bytes(captures_of(launch), shape_of(launch, layers), launch.max_num_batched_tokens)


def captures_of(launch: Launch) -> Captures:
    """The CUDA graphs that are captured.

    Raises:
        SettingError: vLLM refuses their sizes.
    """
    return captures(launch.graphs, batch_of(launch)) if launch.deployment.cuda_graphs else Captures()


def batch_of(launch: Launch) -> GraphBatch:
    """What decides the graphs of a launch, beside ``launch.graphs``."""
    model, drafts, blackwell = launch.model, launch.speculative, launch.gpu.is_blackwell
    support = Support.SINGLE_TOKENS if _flashinfer(launch) and not blackwell else Support.DECODES
    if _split_output(launch) and not model.state_layers:
        support = Support.ALL
    return GraphBatch(
        max_num_seqs=launch.max_num_seqs,
        max_num_batched_tokens=launch.max_num_batched_tokens,
        minor=launch.release.since[1],
        query_tokens=1 if drafts is None else 1 + drafts.num_speculative_tokens,
        second_runner=launch.second_runner,
        support=support,
        data_center_blackwell=blackwell,
        gpt_oss=model.model_type == _GPT_OSS,
        states=bool(model.state_layers),
    )


def shape_of(launch: Launch, layers: range) -> GraphShape:
    """What decides the memory of its graphs on a rank of the stage with these layers."""
    model, ranks, mixer = launch.model, launch.tensor_parallel, launch.model.mixer
    heads = mixer.value_heads // ranks if isinstance(mixer, GatedDelta) and not launch.second_runner else 0
    drafts = launch.speculative if layers.stop == model.num_layers else None
    drafter = None if drafts is None else drafts.drafter(model)
    return GraphShape(
        minor=launch.release.since[1],
        num_layers=len(layers),
        reduction=_reduction(launch),
        experts=bool(model.experts and set(layers) & set(model.experts.layers)),
        blackwell=(launch.gpu.major or 0) >= _FIRST_BLACKWELL,
        output_bytes=_split_output(launch),
        flashinfer=_flashinfer(launch),
        transient_heads=heads if set(layers) & set(model.state_layers) else 0,
        second_runner=launch.second_runner,
        drafter_layers=0 if drafter is None else drafter.num_layers,
        drafter_passes=1 + (drafts.num_speculative_tokens > 1) if drafts and launch.second_runner else 0,
    )


def _reduction(launch: Launch) -> Reduction:
    gpu, ranks = launch.gpu, launch.tensor_parallel
    if ranks == 1:
        return Reduction.ALONE
    if not launch.graphs.custom_all_reduce or ranks > 8:
        return Reduction.NCCL
    if gpu.has_nvlink:
        return Reduction.CUSTOM
    # Two cards on PCIe may read each other's memory; of more vLLM does not ask it.
    return Reduction.UNKNOWN if ranks == 2 else Reduction.NCCL


def _attention(launch: Launch) -> str | None:
    """The backend of softmax or latent attention."""
    deployment = launch.deployment
    need = need_of(launch.model, launch.gpu, deployment.kv_dtype, launch.tensor_parallel)
    return need and chosen_attention(need, launch.release.since[1], deployment.attention_backend)


def _flashinfer(launch: Launch) -> bool:
    return _attention(launch) in (FLASHINFER, TRITON_FLASHINFER)


def _split_output(launch: Launch) -> int:
    """Bytes in fp32 of the output of attention of a token on a rank, where FlashAttention 3 computes it."""
    model = launch.model
    if _attention(launch) != f"{FLASH} 3":
        return 0
    return 4 * model.num_heads // launch.tensor_parallel * (model.v_head_dim or model.head_dim)
