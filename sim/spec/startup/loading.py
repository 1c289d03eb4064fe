"""Weights of a pipeline stage as vLLM's loader keeps them, with what its kernels add."""

from __future__ import annotations

from ...types.errors import SettingError
from ..deployment import Deployment, stages
from ..shape import ModelSpec
from ..weights import stage_bytes
from .estimate import Estimate, within
from .launch import Launch

#: Multiples of the hidden size and of a rank's width of mxfp4 experts: of Marlin below compute capability 9, by
#: ``Mxfp4MoEMethod.create_weights`` of vLLM's ``mxfp4.py``. The Triton kernels of an H100 pad widths to 64, which gpt-oss has.
_PADDED = (256, 128)
_MARLIN = (7, 8)
_VOCAB_PADDING = 64
#: Largest error of the weights in logs (docs/serve.md).
_ERROR = 0.004


def loaded_bytes(launch: Launch) -> list[Estimate]:
    """Bytes of each pipeline stage on one GPU: matrices and vectors, the rotary table, padding of experts, the drafter.

    Raises:
        SettingError: The ranks or stages cannot divide the model.
    """
    require_divisible(launch.model, launch.tensor_parallel, launch.deployment)
    deployment, model = launch.deployment, launch.model
    ranks = deployment.expert_ranks(launch.tensor_parallel)
    stored = stage_bytes(model, launch.tensor_parallel, deployment.pipeline_parallel, deployment.quantization, ranks)
    common = _rotary_bytes(model)
    if launch.speculative is not None:
        common += launch.speculative.drafter_bytes(model, launch.tensor_parallel, deployment)
    parts = stages(model.num_layers, deployment.pipeline_parallel)
    return [
        within(weights + common + _padding_bytes(launch, layers), _ERROR)
        for layers, weights in zip(parts, stored, strict=True)
    ]


def _padding_bytes(launch: Launch, layers: range) -> int:
    """What vLLM adds to experts in mxfp4, so that its default kernels of a card can multiply them."""
    model, deployment, experts = launch.model, launch.deployment, launch.model.experts
    if experts is None or deployment.quantization != "mxfp4":
        return 0
    multiples = _PADDED
    # Experts on a latent vector (Kimi K3) run in later releases alone.
    if not experts.latent_size and launch.gpu.is_blackwell:
        multiples = (_PADDED[0], launch.release.mxfp4_width)
    elif not experts.latent_size and launch.gpu.major not in _MARLIN:
        return 0
    ranks = deployment.expert_ranks(launch.tensor_parallel)
    hidden_size, width = experts.latent_size or model.hidden_size, experts.intermediate_size // ranks.slices
    padded = (-(-size // multiple) * multiple for size, multiple in zip((hidden_size, width), multiples, strict=True))
    added = _expert_bytes(next(padded), next(padded), experts.bias) - _expert_bytes(hidden_size, width, experts.bias)
    return len(set(layers) & set(experts.layers)) * -(-experts.count // ranks.holders) * added


def _expert_bytes(hidden_size: int, width: int, bias: bool) -> int:
    """Gate, up and down in 4 bits with an exponent of 8 bits for 32 values, and their biases in 16 bits."""
    return 3 * hidden_size * width * 17 // 32 + (2 * (2 * width + hidden_size) if bias else 0)


def _rotary_bytes(model: ModelSpec) -> int:
    """Bytes of the table of sines and cosines for ``model.max_model_len`` positions, which all layers share."""
    width = model.latent.rope_dim if model.latent else model.head_dim
    return 0 if model.learned_positions else 2 * model.max_model_len * width


def require_divisible(model: ModelSpec, tensor_parallel: int, deployment: Deployment = Deployment()) -> None:
    """Raise SettingError if the ranks cannot divide heads, vocabulary (padded to 64) or MLP evenly, as vLLM requires."""
    model.kv_heads_per_rank(tensor_parallel)
    vocabulary = -(-model.vocab_size // _VOCAB_PADDING) * _VOCAB_PADDING
    widths = {"MLP width": model.intermediate_size, "vocabulary": vocabulary}
    slices = deployment.expert_ranks(tensor_parallel).slices
    if model.experts and model.experts.intermediate_size % slices:
        remedy = f"must divide the expert width {model.experts.intermediate_size} of {model.name}"
        if deployment.data_parallel > 1:
            remedy = f"times data_parallel_size {deployment.data_parallel} {remedy}, without --enable-expert-parallel"
        raise SettingError("tensor_parallel", tensor_parallel, remedy)
    for what, width in widths.items():
        if width % tensor_parallel:
            raise SettingError("tensor_parallel", tensor_parallel, f"must divide the {what} {width} of {model.name}")
