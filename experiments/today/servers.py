"""Today's models on today's cards, and the memory of one GPU of each when ``vllm serve`` has started."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import fsum

from ...sim import Run, Settings, settings
from ...sim.spec import Deployment, cache_layers, gpu, model
from ...sim.spec.gpu import GIB
from ...sim.spec.startup.capacity import StageMemory, stage_memories
from ...sim.spec.startup.launch import BLOCK_SIZE, Launch, checked_block_size, resolved_kv_dtype
from .pools import PageKind, page_kinds


@dataclass(frozen=True)
class Server:
    """A model and the GPUs that serve one engine of it.

    Attributes:
        label: Name in pictures.
        model, gpu, tensor_parallel_size, max_num_seqs: As in settings.
    """

    label: str
    model: str
    gpu: str
    tensor_parallel_size: int = 1
    max_num_seqs: int | None = None

    @property
    def name(self) -> str:
        """Label and cards."""
        return f"{self.label}, {self.tensor_parallel_size} x {self.gpu}"

    @property
    def max_model_len(self) -> int:
        """The maximum sequence length of the model, in tokens."""
        return model(self.model).max_model_len

    def settings(self) -> Settings:
        """The defaults of ``vllm serve``, unless it starts with fewer sequences alone; every step is an event, so that the ledger has
        a row for each.
        """
        return settings(
            policy="vllm-v1",
            model=self.model,
            gpu=self.gpu,
            tensor_parallel_size=self.tensor_parallel_size,
            max_num_seqs=self.max_num_seqs,
            leap=False,
        )

    def kinds(self) -> tuple[PageKind, ...]:
        """The kinds of the model's layers on one rank; none of compressed attention, which is not replayed: its caches have windows of
        three lengths, and a record of the sequences has the passed blocks of one.
        """
        shape = model(self.model)
        if shape.compressed:
            return ()
        kv_dtype = resolved_kv_dtype(shape, gpu(self.gpu), "auto")
        return page_kinds(cache_layers(shape, kv_dtype, self.tensor_parallel_size))

    def memory(self, run: Run) -> StageMemory:
        """Memory of one GPU at the start of the run's engine."""
        shape, limits = model(self.model), run.replica.policy.limits
        launch = Launch(
            model=shape,
            gpu=gpu(self.gpu),
            max_model_len=limits.max_model_len,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
            tensor_parallel=self.tensor_parallel_size,
            block_size=checked_block_size(shape, None) or BLOCK_SIZE,
            enable_prefix_caching=run.replica.caches_prefixes,
            deployment=Deployment(
                quantization=shape.quantization,
                kv_dtype=resolved_kv_dtype(shape, gpu(self.gpu), "auto"),
                cuda_graphs=True,
            ),
        )
        return stage_memories(launch)[0]


SERVERS = (
    Server("Llama 3.1 8B", "llama-3.1-8b", "h100-80gb"),
    Server("Qwen3 32B", "qwen3-32b", "h100-80gb", 2),
    Server("gpt-oss 120B", "gpt-oss-120b", "b200"),
    Server("Gemma 3 27B", "gemma-3-27b", "h100-80gb", 2),
    Server("Gemma 4 31B", "gemma-4-31b", "h100-80gb", 2),
    Server("DeepSeek V4 Flash", "deepseek-ai/DeepSeek-V4-Flash", "h200", 2),
    Server("Qwen3-Next 80B", "qwen3-next-80b-a3b", "h200", 2),
    Server("Nemotron-H 8B", "nemotron-h-8b", "h100-80gb"),
    Server("Nemotron 3 Nano", "nemotron-3-nano-30b-a3b", "h200"),
    Server("Jamba 1.5 Mini", "jamba-1.5-mini", "h100-80gb", 2),
    Server("Zamba2 7B", "zamba2-7b", "h100-80gb"),
    Server("Kimi Linear 48B", "kimi-linear-48b-a3b", "b200"),
    Server("DeepSeek V3.2", "deepseek-v3.2", "h200", 8),
    # With the default of 1,024 vLLM refuses it: more sequences than blocks for their states.
    Server("Nemotron 3 Super", "nemotron-3-super", "h200", 2, max_num_seqs=512),
    Server("GLM-5.3-Flash", "glm-5.3-flash", "h200", 4),
)


def hbm_gib(memory: StageMemory, buckets: Mapping[str, float]) -> dict[str, float]:
    """The memory of one GPU in GiB: what the engine takes beside the KV cache, the KV cache by bucket, and the rest.

    Args:
        buckets: Bytes of the KV cache by bucket. What is left of the engine's share, a part of a block and the null
            block, counts as free.
    """
    parts = {
        "weights": memory.weights.likely,
        "activations": memory.activations.likely,
        "cuda_graphs": memory.cuda_graphs.likely,
        "outside_torch": memory.non_torch.likely,
    }
    left = memory.requested_bytes - fsum((*parts.values(), *buckets.values()))
    kv_cache = dict(buckets) | {"free": buckets["free"] + left}
    never = {"never_used": memory.total_bytes - memory.requested_bytes}
    return {name: value / GIB for name, value in (parts | kv_cache | never).items()}
