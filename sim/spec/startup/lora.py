"""Buffers of LoRA adapters, which vLLM allocates for ``--max-loras`` adapters of ``--max-lora-rank`` as it loads a model.

Every linear layer of the text model has a matrix of rank x inputs and one of outputs x rank for each adapter, in 16 bits: the first
is whole on every rank where ranks divide the outputs, the second where they divide the inputs. Experts have them as well. Source:
``create_lora_weights`` of vLLM's ``lora/layers``, of the wheel of 0.28; ``--fully-sharded-loras`` is not simulated.
"""

from __future__ import annotations

from typing import NamedTuple

from ..deployment import ExpertRanks
from ..matrix import WEIGHT_BITS, Matrix
from ..shape import ModelSpec
from ..weights import layer_matrices

#: vLLM's defaults.
MAX_LORAS, MAX_LORA_RANK = 1, 16
#: Model types of which adapters may change the embedding and the output head (``embedding_modules``).
_EMBEDDINGS = frozenset(
    {"llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "granite", "nemotron_h", "lfm2", "exaone4"}
)
#: Parts of a layer that are no linear layers.
_OTHERS = ("convolution", "indexer")


class Lora(NamedTuple):
    """Adapters on a GPU at once, their highest rank, and those that the host keeps, if the user says how many."""

    max_loras: int = MAX_LORAS
    max_lora_rank: int = MAX_LORA_RANK
    max_cpu_loras: int | None = None

    def stage_bytes(
        self, model: ModelSpec, layers: range, tensor_parallel: int = 1, expert_ranks: ExpertRanks | None = None
    ) -> int:
        """Bytes on each rank of the pipeline stage with these layers."""
        sides = sum(
            _sides(matrix)
            for layer in layers
            if not model.shares_weights(layer)
            for matrix in layer_matrices(model, layer, tensor_parallel, expert_ranks)
            if matrix.part not in _OTHERS
        )
        if model.model_type in _EMBEDDINGS:
            ends = (0 in layers) + (model.num_layers - 1 in layers)
            sides += ends * (model.vocab_size + model.hidden_size)
        return self.max_loras * self.max_lora_rank * sides * WEIGHT_BITS // 8


def _sides(matrix: Matrix) -> int:
    """Inputs and outputs of a matrix on each rank."""
    inputs = matrix.inputs // matrix.ranks if matrix.by_inputs else matrix.inputs
    return matrix.copies * (inputs + matrix.outputs_on_rank)
