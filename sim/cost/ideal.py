"""The least time that the GPUs of a replica need for requests: by the data sheet alone, so no schedule and no kernel takes less.

    reading     the weights once a step, for all sequences of the step together; and for every decode the keys and values of
                its context
    computing   every token with the weights that it is multiplied with

A step takes at least as long as either takes at the full rate of the data sheet, so the larger of the two sums over all requests is a
bound. Whatever may cost nothing is left out: attention's flops, experts that are read, states, activations, collectives, launches
and the host.
"""

from __future__ import annotations

from collections import Counter
from math import fsum
from typing import NamedTuple

import numpy as np

from ..spec.attention import Span
from ..spec.deployment import Deployment
from ..spec.gpu import GpuSpec
from ..spec.matrix import format_of, matrix_bytes
from ..spec.shape import ModelSpec
from ..spec.weights import head_bytes, layer_matrices
from ..workload.workload import Workload


class IdealReplica(NamedTuple):
    """What bounds the rate of a replica.

    Attributes:
        model, gpu, tensor_parallel, deployment: As of ``RooflineCost``.
        max_num_seqs: Most sequences that a step computes.
        step_tokens: Most tokens that a sequence gains in a step: 1, and the drafts that the step verifies.
    """

    model: ModelSpec
    gpu: GpuSpec
    tensor_parallel: int
    deployment: Deployment
    max_num_seqs: int
    step_tokens: int = 1

    def seconds(self, work: Workload) -> tuple[np.ndarray, np.ndarray]:
        """Seconds for reading and for computing each request, float64 [n] each; of pipeline stages, on each of them.

        Of requests that may share memory the prompts count for nothing: a cache may have them, and one read may serve several.
        """
        shares = work.content is not None or work.dialogue is not None or int(work.num_sequences.max(initial=1)) > 1
        prompts = np.where(shares, 0, work.prompt_tokens).astype(np.float64)
        decodes = np.maximum(work.output_tokens - 1, 0).astype(np.float64)
        samples, stages = work.num_sequences, self.deployment.pipeline_parallel
        of_weights = decodes * self._weight_bytes / self.max_num_seqs
        read_bytes = samples * (of_weights + self._context_bytes(prompts, decodes)) / self.step_tokens
        flops = self._token_flops * (prompts + samples * decodes)
        return (
            read_bytes / self.gpu.memory_bytes_per_s / stages,
            flops / self.gpu.fp16_flops_per_s / stages,
        )

    @property
    def _weight_bytes(self) -> int:
        """Bytes on a rank that every step reads, over all stages."""
        ranks, form = self.tensor_parallel, self.deployment.quantization
        matrices = (each for layer in range(self.model.num_layers) for each in layer_matrices(self.model, layer, ranks))
        dense = sum(matrix_bytes(each, form) for each in matrices if each.part != "expert")
        return dense + head_bytes(self.model, ranks, form)

    def _context_bytes(self, prompts: np.ndarray, decodes: np.ndarray) -> np.ndarray:
        """Bytes on a rank of the contexts of all decodes of a sequence, float64 [n]; none where an indexer chooses tokens."""
        model, deployment = self.model, self.deployment
        found = np.zeros(len(prompts))
        for group in () if model.indexer else model.kv_groups():
            slot_bytes = model.group_slot_bytes(group, deployment.kv_dtype, self.tensor_parallel)
            found += slot_bytes * _attended(group.span, prompts, decodes)
        return found / deployment.decode_context_parallel

    @property
    def _token_flops(self) -> float:
        """Flops on a rank for a token, over all stages; of faster formats as many in 16 bits as take the same time."""
        form, params = self.deployment.quantization, Counter[str | None]()
        for layer in range(self.model.num_layers):
            for matrix in layer_matrices(self.model, layer, self.tensor_parallel):
                params[format_of(matrix, form)] += matrix.used_params
        fastest = self.gpu.fp16_flops_per_s
        return 2 * fsum(
            count * fastest / max(fastest, self.gpu.quantized_flops_per_s(name or "") or 0)
            for name, count in sorted(params.items(), key=str)
        )


def _attended(span: Span, prompts: np.ndarray, decodes: np.ndarray) -> np.ndarray:
    """Tokens that the decodes after a prompt attend to, at least, summed over them; float64 [n]."""
    every = prompts * decodes + decodes * (decodes + 1) / 2
    if span.kind == "full":
        return every
    if span.kind != "sliding":
        return np.zeros(len(prompts))
    # Of the decodes up to a full window, and of those after it.
    growing = np.clip(span.tokens - prompts, 0, decodes)
    return prompts * growing + growing * (growing + 1) / 2 + (decodes - growing) * span.tokens
