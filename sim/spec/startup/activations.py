"""Peak of the step that vLLM profiles at its start, as tensors on one GPU.

    expert workspace + max(forward, sampler)
    forward   = 2 bytes * tokens * ((5 + blocks of attention residuals + twice the further hidden states of hyper-connections) hidden
                + outputs of the widest MLP, or of the projections of a state if these are wider)
    sampler   = 14 bytes (38 up to 0.16) * sequences * vocabulary + two hidden states of all tokens
    workspace = 2 bytes * tokens of all engines that share the experts * experts per token * (max(2 width, hidden) + width),
                as fused_moe.py allocates it

Sparse latent attention adds its reserved buffers: 4 bytes * tokens * top_k, 512 MiB of logits in place of the MLP's outputs if these
are less, and as workspace, if more than that of experts, keys of 40 (16 above 262,144) * max_model_len tokens. An indexer of blocks
has 4 bytes for each token, query head and chosen block.

The 14 bytes are the slope between the peaks in logs of vLLM 0.19 with Llama 3.1 8B and Qwen2.5 7B on an H100. All other
terms are sizes of tensors. docs/serve.md has the errors.
"""

from __future__ import annotations

from ..shape import ModelSpec
from .estimate import Estimate, within
from .launch import Launch

_INDEXER_LOGITS_BYTES = 512 << 20
_ERROR = 0.1


def activation_bytes(launch: Launch, layers: range, last: bool) -> Estimate:
    """Peak of the step that vLLM profiles; the module docstring has the formula."""
    model, tokens = launch.model, launch.max_num_batched_tokens
    dense = max(_dense_width(model, layer) for layer in layers) // launch.tensor_parallel
    widest, mixer = model.mlp_matrices * dense, model.state_mixer(launch.tensor_parallel)
    if mixer and set(layers) & set(model.state_layers):
        widest = max(widest, mixer.gemm_elements(launch.tensor_parallel))
    # Of several hidden states both those that a part of a layer reads and those that it writes.
    streams = 2 * (model.residual_streams - 1)
    residuals = (model.residual_blocks(model.num_layers) + streams) * model.hidden_size
    forward = 2 * tokens * (5 * model.hidden_size + residuals + widest)
    sampled = min(launch.max_num_seqs, tokens)
    sampler = launch.profiling.sampler_bytes * sampled * model.vocab_size + 4 * tokens * model.hidden_size
    workspace = 0
    if model.experts and set(layers) & set(model.experts.layers):
        ranks = launch.deployment.expert_ranks(launch.tensor_parallel)
        width, gathered = model.experts.intermediate_size // ranks.slices, tokens * ranks.engines
        hidden = model.experts.latent_size or model.hidden_size
        workspace = 2 * gathered * model.experts.used * (max(2 * width, hidden) + width)
    if model.indexer and model.indexer.block_tokens:
        chosen = model.indexer.top_k // model.indexer.block_tokens
        workspace += 4 * tokens * model.indexer.heads_on_rank(launch.tensor_parallel) * chosen
    elif model.indexer:
        factor = 40 if launch.max_model_len <= 1 << 18 else 16
        workspace = max(workspace, factor * launch.max_model_len * model.indexer.slot_bytes)
        workspace += 4 * tokens * model.indexer.top_k
        forward = max(forward, 2 * tokens * 5 * model.hidden_size + _INDEXER_LOGITS_BYTES)
    return within(workspace + max(forward, last * sampler), _ERROR)


def _dense_width(model: ModelSpec, layer: int) -> int:
    if model.experts and layer in model.experts.layers:
        return model.experts.shared_size
    return model.mlp_size(layer)
