"""Peak of the step that vLLM profiles at its start (``profile_run`` of its model runners), as tensors on one GPU.

    max(compilation, cuBLAS + max(encoder, outputs of the encoder + workspace + max(forward, sampler, balancing)))

All are bytes in torch's allocator at the moment when most are allocated; the phases follow one another. Terms, of a model in 16 bits (in float32
elements have 4 bytes, and the first model runner makes no copy of logits):

    forward      2 bytes * tokens * (3.75 hidden states + the widest of: tensors of the MLP, of attention, of a state's projections)
    sampler      bytes a logit of the release * sequences * vocabulary, hidden states of all tokens, those of the sampled tokens twice,
                 and since 0.17 a row of logits in fp32 for each multiprocessor. Of 14 bytes a logit 2 are the model's, 4 a copy in fp32,
                 4 probabilities, 4 noise. Ranks gather logits: 2 bytes * (2 + 1 / ranks). FlashInfer's sampler, which vLLM takes up to 0.10 where it
                 is installed and later if VLLM_USE_FLASHINFER_SAMPLER says so, holds 14 bytes. Of 0.10.1 two servers on A100s log it, of 0.10.2
                 and 0.11 none of five
    encoder      2 bytes * patches * (pixels, positions, three hidden states and, divided by ranks, eight: Q, K and V, Q and K twice
                 more, the output), or the MLP's tensors where these are more; ranks hold what they reduced as well
    outputs      of the encoder, in V1 with the pixels; in its budget of max(tokens, those of the largest item)
    compilation  a second embedding and its output twice, with which Inductor runs the embedding's kernel to choose whether to combine it with
                 others (``benchmark_combo_kernel``, which vLLM sets since 0.11.2). Only for a text model on one rank, and only if no compile
                 cache is found. It is the high end since 0.12, and likely since 0.27, and since 0.19 below compute capability 9: of 0.19 to
                 0.26 four of five servers log it there, and none of six on later cards; those of 0.17 and 0.18 do not
    context      2 bytes * 65,536 rows * heads * (K and V without rotary part) of latent attention: ``MLAAttention.forward`` without
                 metadata, since 0.11; logs leave no room for it in sparse attention
    workspace    of experts, by their kernels (``workspace_shapes``), kept in logs since 0.17 but not in one of 0.13, else part of the
                 forward; and of an indexer. Weights in 4 bits had layers that called Marlin without it (``fused_marlin_moe``): gptq up to
                 0.19, awq up to 0.20, compressed-tensors up to 0.22 at least
    balancing    of experts (``eplb``), beside the hidden states of all tokens
    cuBLAS       32 MiB on compute capabilities 9, 10 and 12, else 8.1 MiB

A profile computes neither attention nor states (``attn_metadata`` is None), so that the tensors of their kernels are not in it.

Since 0.27 a log's "peak activation" is without cuBLAS and workspaces (they are in "consumed memory"), and with the estimated CUDA graphs.
It is not known whether cuBLAS's workspace counts in both since then: it stays allocated by torch's code, but of three records in which it decides two have
it in the peak (Qwen3 0.6B on an H100, 8B on two A100s) and one has not (Qwen3 32B AWQ on an RTX 5090). Without it the starts of docs/results/startups.md have the same
answers, and computed KV caches of 33 rows are 0.002 GiB nearer in the mean absolute error, 0.008 farther in the median.

Sources: the wheels of 0.8 to 0.33; starts of llm-d-planner with 0.19 on H100s (15 text models within 0.01 GiB); the allocator's history
of Qwen3.6 35B A3B under 0.30 on an H100 (mondegreens/apron, 2,056,258,048 bytes, all of them the encoder's; 512 less here); records of
text models there under 0.27 to 0.29. docs/results/start-up-logs.md has the errors.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

from ..compressed import KEY_BYTES, SPARSE
from ..encoders import Encoder, Item
from ..gpu import GpuSpec
from ..kernels import MARLIN
from ..matrix import Matrix, format_of
from ..shape import ModelSpec
from .eplb import profile_bytes
from .estimate import Estimate
from .launch import Launch

_MIB = 1 << 20
#: Hidden states of all tokens that are alive at the peak of a forward, in quarters: fewest, likely, most. 3.75 is the remainder of two
#: logs in which the MLP is at the peak (Code Llama 7B and Granite 3.1 8B under 0.19), two that of one with a compile cache (Qwen3 32B AWQ
#: under 0.28). Stages of a pipeline pass on two more.
_HIDDEN_QUARTERS, _PASSED_ON = (8, 15, 24), 2
#: Formats of weights with inputs of 8 bits or fewer.
_EIGHT_BIT = ("fp8", "mxfp8", "nvfp4")
#: From this release on, no log decides what the high end of an interval has of workspaces.
_FIRST_UNCERTAIN = (0, 14)
#: The first release that combines kernels, and the first in which logs of all cards show it.
_FIRST_COMBINED, _FIRST_ON_ALL = (0, 12), (0, 27)
#: Last minor version in which a layer with experts in 4 bits calls Marlin itself, by number format.
_LAST_OWN = {"gptq": 19, "awq": 20, "w4a16": 22, "w4a16-g32": 22}
_INDEXER_LOGITS_BYTES = 512 * _MIB
_CONTEXT_ROWS = 64 * 1024
_HOPPER = 9
#: Multiprocessors of a GPU if its file does not say: an H100's.
_OTHER_PROCESSORS = 132
#: Of an encoder that is not known: outputs for as many tokens as a step has are likely, and this is most.
_UNKNOWN_ENCODER_BYTES = 2048 * _MIB
#: What Triton clears between runs of a kernel that it tunes, while the tensors of a step are alive.
_TUNING_BYTES = 256 * _MIB


class Phases(NamedTuple):
    """Bytes of the phases of a profile, and of what is kept beside them: ``outputs`` and ``workspace`` from the forward on."""

    compilation: int
    cublas: int
    encoder: int
    outputs: int
    workspace: int
    forward: int
    sampler: int
    balancing: int = 0

    @property
    def peak(self) -> int:
        """The most that is allocated at once."""
        step = self.outputs + self.workspace + max(self.forward, self.sampler, self.balancing)
        return max(self.compilation, self.cublas + max(self.encoder, step))


def activation_bytes(launch: Launch, layers: range, last: bool) -> Estimate:
    """Peak of the profiled step on each GPU of a pipeline stage, in bytes; the module docstring has the terms."""
    low, likely, high = (phases(launch, layers, last, bound).peak for bound in range(3))
    return Estimate(low * 97 // 100, likely, high * 103 // 100 + _TUNING_BYTES)


def phases(launch: Launch, layers: range, last: bool, bound: int = 1) -> Phases:
    """The phases of a stage's profile.

    Args:
        last: Whether the stage samples.
        bound: 0 is the least that logs show, 1 what is likely, 2 the most.
    """
    first = layers.start == 0
    experts, encoder = _workspace_bytes(launch, layers, bound), launch.model.encoder if first else None
    kept = experts if _keeps_workspace(launch, bound) else 0
    return Phases(
        compilation=_compilation_bytes(launch, bound) if first else 0,
        cublas=cublas_bytes(launch.gpu),
        encoder=_encoder_bytes(encoder, launch, bound),
        outputs=_output_bytes(encoder, launch),
        workspace=kept + _indexer_bytes(launch, kept),
        forward=_forward_bytes(launch, layers, bound, experts - kept),
        sampler=_sampler_bytes(launch, bound) if last else 0,
        balancing=_balancing_bytes(launch, layers, bound),
    )


def cublas_bytes(gpu: GpuSpec) -> int:
    """PyTorch's workspace of cuBLAS (``parseChosenWorkspaceSize`` of its CublasHandlePool.cpp), which the first matrix product of a profile allocates."""
    return 32 * _MIB if gpu.major in (9, 10, 12) else 8_519_680


def _sampler_bytes(launch: Launch, bound: int) -> int:
    model, release, ranks = launch.model, launch.profiling, launch.tensor_parallel
    element = launch.element_bytes
    tokens, sampled = launch.max_num_batched_tokens, min(launch.max_num_seqs, launch.max_num_batched_tokens)
    a_logit = min(release.sampler_bytes, release.fewest_sampler_bytes) if bound == 0 else release.sampler_bytes
    logits = (a_logit + _wider_logit(launch)) * sampled * model.vocab_size
    if ranks > 1:
        logits = max(logits, element * sampled * model.vocab_size * (2 * ranks + 1) // ranks)
    processors = launch.gpu.multiprocessors or _OTHER_PROCESSORS
    rows = min(processors, sampled) if release.sampler_rows and not launch.second_runner else 0
    return logits + 4 * rows * model.vocab_size + element * (tokens + 2 * sampled) * model.hidden_size


def _wider_logit(launch: Launch) -> int:
    """Bytes that a logit takes more where the model's has four: the first model runner then makes no copy in fp32."""
    more = launch.element_bytes - 2
    return more if launch.second_runner or not more else more - 4


def warm_up_bytes(launch: Launch) -> int:
    """Tensors of the sampler when vLLM warms up.

    The first model runner samples as it does in the profile, the second one for requests that ask for all that they can
    (``SamplingParams.for_sampler_warmup``), of at most half the tokens of a step.
    """
    sequences, tokens = launch.max_num_seqs, launch.max_num_batched_tokens
    if not launch.second_runner:
        return _sampler_bytes(replace(launch, max_num_batched_tokens=min(sequences, tokens)), bound=1)
    drafts = 0 if launch.speculative is None else launch.speculative.num_speculative_tokens
    sampled = max(1, min(sequences, tokens // (2 + drafts)))
    element = launch.element_bytes
    a_logit = max(launch.release.v2_warm_up_bytes + _wider_logit(launch), element * (1 + drafts))
    return a_logit * sampled * launch.model.vocab_size + element * sampled * (2 + drafts) * launch.model.hidden_size


def _balancing_bytes(launch: Launch, layers: range, bound: int) -> int:
    moved = profile_bytes(launch, layers, bound)
    return moved and moved + launch.element_bytes * launch.max_num_batched_tokens * launch.model.hidden_size


def _compilation_bytes(launch: Launch, bound: int) -> int:
    """What Inductor allocates to choose a kernel for the embedding: a copy of it, and its output twice."""
    cold = not launch.is_compiled
    if launch.is_compiled is None:
        is_logged = launch.release.benchmarks_embedding and (
            launch.release.since >= _FIRST_ON_ALL or (launch.gpu.major or 0) < _HOPPER
        )
        cold = bound == 2 or (bound == 1 and is_logged)
    copied = copied_embedding_bytes(launch) if cold else 0
    outputs = 2 * launch.element_bytes * launch.max_num_batched_tokens * launch.model.hidden_size
    return copied + outputs if copied else 0


def copied_embedding_bytes(launch: Launch) -> int:
    """The copy of the embedding as Inductor tries kernels for it; none where the model gets embeddings, or ranks divide it."""
    alone = launch.tensor_parallel == 1 and launch.model.encoder is None
    if not (alone and launch.deployment.cuda_graphs and launch.release.since >= _FIRST_COMBINED):
        return 0
    return launch.element_bytes * launch.model.vocab_size * launch.model.hidden_size


def _forward_bytes(launch: Launch, layers: range, bound: int, workspace: int) -> int:
    """Tensors of a layer; ``workspace`` is what its experts allocate and free."""
    model, ranks, tokens = launch.model, launch.tensor_parallel, launch.max_num_batched_tokens
    quarters = _HIDDEN_QUARTERS[bound]
    if launch.deployment.pipeline_parallel > 1:
        quarters += 4 * _PASSED_ON
    # Of several hidden states both those that a part of a layer reads and those that it writes.
    more = model.residual_blocks(model.num_layers) + 2 * (model.residual_streams - 1)
    element = launch.element_bytes
    hidden = element * tokens * (quarters + 4 * more) * model.hidden_size // 4
    mlp = _mlp_bytes(launch, bound) * max(_dense_width(model, layer) for layer in layers) // ranks
    widest = max(workspace, tokens * max(mlp, element * _mixer_elements(model, layers, ranks)))
    if any(model.span(layer).keeps_tokens for layer in layers):
        widest = max(widest, _context_bytes(launch) + element * tokens * model.attention(ranks).gemm_elements)
        if model.compressed or (model.indexer and not model.indexer.block_tokens):
            widest = max(widest, _INDEXER_LOGITS_BYTES)
    return hidden + widest


def _mlp_bytes(launch: Launch, bound: int) -> int:
    """Bytes a token and unit of width: gate and up, and what the activation makes of them, which a fused kernel writes in 8 bits."""
    fused = bound < 2 and launch.model.gated_mlp and launch.deployment.quantization in _EIGHT_BIT
    return 5 if fused else launch.element_bytes * launch.model.mlp_matrices


def _mixer_elements(model: ModelSpec, layers: range, ranks: int) -> int:
    """Elements a token of the widest mixer's projections: of a state also its output and the gate, both once more."""
    widest = 0
    for span in {model.span(layer) for layer in layers}:
        if span.keeps_tokens:
            widest = max(widest, model.attention(ranks, span).gemm_elements)
    mixer = model.state_mixer(ranks)
    if mixer and set(layers) & set(model.state_layers):
        widest = max(widest, mixer.gemm_elements(ranks) + 2 * mixer.inner_size(ranks))
    return widest


def _context_bytes(launch: Launch) -> int:
    """Keys and values of a context, which latent attention allocates in place of computing them."""
    model, latent = launch.model, launch.model.latent
    if latent is None or model.indexer or not launch.release.profiles_context:
        return 0
    rows = max(8 * launch.max_model_len, 4 * launch.max_num_seqs * launch.block_size)
    heads = model.heads_per_rank(launch.tensor_parallel)
    return 2 * min(rows, _CONTEXT_ROWS) * heads * (latent.nope_dim + latent.v_dim)


def _dense_width(model: ModelSpec, layer: int) -> int:
    if model.experts and layer in model.experts.layers:
        return model.experts.shared_size
    return model.mlp_size(layer)


def _indexer_bytes(launch: Launch, workspace: int) -> int:
    """Buffers that sparse attention reserves: the chosen tokens, and keys in a workspace that it shares with experts."""
    indexer, tokens = launch.model.indexer, launch.max_num_batched_tokens
    factor = 40 if launch.max_model_len <= 1 << 18 else 16
    if compressed := launch.model.compressed:
        keys = factor * launch.max_model_len // SPARSE * KEY_BYTES
        reserved = max(compressed.prefill_bytes(tokens, launch.max_model_len), keys)
        return 4 * tokens * compressed.top_k + max(0, reserved - workspace)
    if indexer is None:
        return 0
    if indexer.block_tokens:
        return 4 * tokens * indexer.heads_on_rank(launch.tensor_parallel) * (indexer.top_k // indexer.block_tokens)
    return 4 * tokens * indexer.top_k + max(0, factor * launch.max_model_len * indexer.slot_bytes - workspace)


def _workspace_bytes(launch: Launch, layers: range, bound: int) -> int:
    """Tensors of the experts' kernels that all layers share, for the tokens of all engines.

    Triton, DeepGEMM and Marlin hold the outputs of both matrices for each expert of a token. FlashInfer's kernels for fp4, and on Blackwell
    for 16 and 8 bits, hold one hidden state of each token; Triton's for mxfp4 none up to 0.19.
    """
    model, experts = launch.model, launch.model.experts
    if not experts or not set(layers) & set(experts.layers):
        return 0
    ranks = launch.expert_ranks
    gathered = launch.max_num_batched_tokens * ranks.engines
    width, hidden = experts.intermediate_size // ranks.slices, experts.latent_size or model.hidden_size
    both = 2 * gathered * experts.used * (max(width, hidden) + max(2 * width, hidden))
    if _calls_marlin(launch):
        return 2 * gathered * experts.used * (width + max(2 * width, hidden))
    if not _holds_inside(launch):
        return both
    inside = 0 if launch.deployment.quantization == "mxfp4" else 2 * gathered * hidden
    return (0, inside, both)[bound]


def _keeps_workspace(launch: Launch, bound: int) -> bool:
    """Whether the workspace stays while other parts of a layer run."""
    if _calls_marlin(launch):
        return False
    return launch.release.since >= _FIRST_UNCERTAIN if bound == 2 else launch.release.keeps_workspace


def _calls_marlin(launch: Launch) -> bool:
    """Whether a layer allocates the tensors of its experts itself, and frees them."""
    form = format_of(Matrix(1, 1, part="expert"), launch.deployment.quantization)
    return form is not None and launch.release.since[1] <= _LAST_OWN.get(form, -1)


def _holds_inside(launch: Launch) -> bool:
    """Whether the kernels of the experts hold their tensors themselves, and free them."""
    quantization, gpu = launch.deployment.quantization, launch.gpu
    if quantization == "mxfp4":
        reorders = launch.release.mxfp4_triton > 0 and launch.experts_kernel != MARLIN
        return gpu.is_blackwell or (gpu.major == _HOPPER and reorders)
    if quantization == "nvfp4":
        return gpu.fp4_flops_per_s is not None
    return quantization in (None, "fp8") and gpu.is_blackwell


def _encoder_bytes(encoder: Encoder | None, launch: Launch, bound: int) -> int:
    if encoder is None:
        return 0
    if encoder.item is None:
        return _UNKNOWN_ENCODER_BYTES if bound == 2 else 0
    item, ranks = encoder.item, launch.tensor_parallel
    patches = item.patches * _item_tokens(item, launch)
    # The input of a block and its norm; of attention the output, and on each rank Q, K, V, Q and K twice more, and the result. Heads
    # of the rotary embedding are a sixteenth of the width.
    attention = (3 + (ranks > 1)) * item.hidden_size + 8 * item.hidden_size // ranks
    block = max(attention, 2 * item.hidden_size + item.mlp_width // ranks)
    beside = item.pixels + item.positions * item.hidden_size + item.hidden_size // 16
    return launch.element_bytes * (patches * (beside + block) + _item_tokens(item, launch) * item.stacked_size)


def _output_bytes(encoder: Encoder | None, launch: Launch) -> int:
    """Outputs of the encoder, which are kept during the forward; the first model runner keeps the pixels too."""
    if encoder is None:
        return 0
    if encoder.item is None:
        return launch.element_bytes * launch.max_num_batched_tokens * launch.model.hidden_size
    item, tokens = encoder.item, _item_tokens(encoder.item, launch)
    pixels = 0 if launch.second_runner else item.patches * item.pixels
    text = item.video[1] if item.video and launch.release.keeps_video_text else 0
    return launch.element_bytes * (tokens * (item.output_size + pixels) + text * item.output_size)


def _item_tokens(item: Item, launch: Launch) -> int:
    """Tokens of the items that fit the encoder's budget, one at least."""
    if item.video and launch.release.keeps_video_text:
        return item.video[0]
    return item.tokens * max(1, launch.max_num_batched_tokens // item.tokens)
