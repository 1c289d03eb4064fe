"""Buffers of LoRA adapters, which vLLM allocates for ``--max-loras`` adapters of ``--max-lora-rank`` as it loads a model.

Every linear layer of the text model has a matrix of rank x inputs and one of outputs x rank for each adapter, in 16 bits: the first
is whole on every rank where ranks divide the outputs, the second where they divide the inputs. Experts have them as well.
``--lora-target-modules`` leaves out layers that it does not name; a name of a part, as ``q_proj``, takes the layer that packs it. Routed
experts are one module, "experts". Sources: ``create_lora_weights`` of vLLM's ``lora/layers``, of the wheel of 0.28;
``is_in_target_modules`` in those of 0.19 to 0.32. ``--fully-sharded-loras`` is not simulated.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from ..deployment import ExpertRanks
from ..matrix import WEIGHT_BITS, Matrix
from ..shape import ModelSpec
from ..weights import layer_matrices, mixer_matrices

#: vLLM's defaults.
MAX_LORAS, MAX_LORA_RANK = 1, 16
#: Model types of which adapters may change the embedding and the output head (``embedding_modules``).
_EMBEDDINGS = frozenset(
    {"llama", "mistral", "mixtral", "qwen3", "qwen3_moe", "granite", "nemotron_h", "lfm2", "exaone4"}
)
#: Parts of a layer that are no linear layers.
_OTHERS = ("convolution", "indexer")
#: Names of modules: of what attention and states take in and put out, of MLPs the same, routed experts, routers, embedding and head.
_MIXER = (
    frozenset(
        {"q_proj", "k_proj", "v_proj", "qkv_proj", "in_proj", "in_proj_qkvz", "in_proj_qkv", "in_proj_z", "in_proj_ba"}
    ),
    frozenset({"o_proj", "out_proj"}),
)
_MLP = frozenset({"gate_proj", "up_proj", "gate_up_proj"}), frozenset({"down_proj"})
_EXPERTS, _ROUTER = frozenset({"experts"}), frozenset({"gate"})
_ENDS = "embed_tokens", "lm_head"
_KNOWN = frozenset().union(*_MIXER, *_MLP, _EXPERTS, _ROUTER, _ENDS)


class Lora(NamedTuple):
    """Adapters on a GPU at once, their highest rank, and those that the host keeps, if the user says how many.

    Attributes:
        target_modules: Names of the modules that may have adapters; None is all.
    """

    max_loras: int = MAX_LORAS
    max_lora_rank: int = MAX_LORA_RANK
    max_cpu_loras: int | None = None
    target_modules: frozenset[str] | None = None

    def stage_bytes(
        self, model: ModelSpec, layers: range, tensor_parallel: int = 1, expert_ranks: ExpertRanks | None = None
    ) -> int:
        """Bytes on each rank of the pipeline stage with these layers."""
        sides = sum(
            _sides(matrix)
            for layer in layers
            if not model.shares_weights(layer)
            for matrix, names in _named(model, layer, layer_matrices(model, layer, tensor_parallel, expert_ranks))
            if matrix.part not in _OTHERS and self._takes(names)
        )
        if model.model_type in _EMBEDDINGS:
            held = (0 in layers, model.num_layers - 1 in layers)
            ends = sum(is_held and self._takes({name}) for is_held, name in zip(held, _ENDS, strict=True))
            sides += ends * (model.vocab_size + model.hidden_size)
        return self.max_loras * self.max_lora_rank * sides * WEIGHT_BITS // 8

    def _takes(self, names: AbstractSet[str]) -> bool:
        return self.target_modules is None or not self.target_modules.isdisjoint(names)


def are_known(model: ModelSpec, target_modules: AbstractSet[str]) -> bool:
    """Whether the matrices of the modules with these names are known."""
    return target_modules <= _KNOWN and model.latent is None


def _named(model: ModelSpec, layer: int, matrices: Sequence[Matrix]) -> Iterator[tuple[Matrix, AbstractSet[str]]]:
    """Each matrix of a layer with the names of its module; the last one of a mixer that gives hidden states is its output."""
    mixers = len(mixer_matrices(model, layer))
    output = max((place for place in range(mixers) if matrices[place].outputs == model.hidden_size), default=None)
    of_part = {"expert": _EXPERTS, "router": _ROUTER}
    for place, matrix in enumerate(matrices):
        name = _MIXER[place == output] if place < mixers else of_part.get(matrix.part, _MLP[matrix.by_inputs])
        yield matrix, name


def _sides(matrix: Matrix) -> int:
    """Inputs and outputs of a matrix on each rank."""
    inputs = matrix.inputs // matrix.ranks if matrix.by_inputs else matrix.inputs
    return matrix.copies * (inputs + matrix.outputs_on_rank)
