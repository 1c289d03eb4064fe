"""A static batch of the same lengths through ``transformers``' ``generate``: a measured throughput of independent code.

The model is a Llama of the same config with random weights, on the same device and in the same dtype; nothing is
downloaded. Prompts are padded on the left to the longest one, and the batch generates as many tokens as its longest
output has, up to a limit. The cache of ``generate`` has no block tables.
"""

from __future__ import annotations

import importlib
from typing import Any, NamedTuple

import numpy as np
import torch

from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec
from ...sim.workload.workload import Workload
from ..devices import timing
from ..model.skeleton import DTYPES, Skeleton

#: Steps of the batch that are generated, at most. On an H200 a step of a model of 8 billion parameters took 117 ms.
MOST_STEPS = 128
#: New tokens of the first call, which is not timed.
WARM_UP_TOKENS = 2


class StaticBatch(NamedTuple):
    """The first steps of a static plan's first batch.

    Attributes:
        steps: Those steps of the plan: the prompts, and a step for each further token of the longest output.
        prompt_tokens: int64 [sequences].
        output_tokens: int64 [sequences], those of these steps.
    """

    steps: range
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray

    def us(self, plan: Plan, timed_steps: np.ndarray, us: np.ndarray) -> float:
        """Microseconds of all steps, from those of some steps of the plan; others are on a line between their neighbours.

        Args:
            plan: That of the batch.
            timed_steps: Ascending; the first one is the batch's first. Those with prompts of later batches stand for none.
            us: float [timed_steps].
        """
        decodes = plan.prefill_tokens[timed_steps] == 0
        return float(us[0] + np.interp(self.steps[1:], timed_steps[decodes], us[decodes]).sum())


def first_batch(plan: Plan, workload: Workload, most_steps: int = MOST_STEPS) -> StaticBatch:
    """The first batch of a static plan, or its first ``most_steps`` steps."""
    start, *later = np.flatnonzero(plan.prefill_tokens).tolist()
    steps = range(start, min([*later, plan.num_steps, start + most_steps]))
    rows = plan.step(start).sequence
    return StaticBatch(steps, workload.prompt_tokens[rows], np.minimum(workload.output_tokens[rows], len(steps)))


def generated_us(skeleton: Skeleton, batch: StaticBatch, seed: int) -> tuple[float, str]:
    """Microseconds of the batch by the stopwatch's clock, and the version of transformers.

    Raises:
        ImportError: transformers is not installed.
        torch.OutOfMemoryError: The device has no room for a second model.
    """
    library = _library()
    with skeleton.device.torch_device:  # on the host, 8 billion random weights in fp32 take minutes
        model = _llama(library, skeleton.model, DTYPES[skeleton.dtype])
    lengths, longest = batch.prompt_tokens, int(batch.prompt_tokens.max())
    ids = skeleton.place(np.random.default_rng(seed).integers(skeleton.model.vocab_size, size=(len(lengths), longest)))
    mask = skeleton.place((np.arange(longest) >= longest - lengths[:, None]).astype(np.int64))

    def generate(new_tokens: int) -> None:
        exactly = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
        model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **exactly)

    generate(WARM_UP_TOKENS)
    us = timing.stopwatch(skeleton.device).elapsed_us(lambda _: generate(len(batch.steps)), range(1))
    return us, str(library.__version__)


def _library() -> Any:
    return importlib.import_module("transformers")


def _llama(library: Any, spec: ModelSpec, dtype: torch.dtype) -> Any:
    """A Llama of these shapes with random weights, on torch's default device."""
    config = library.LlamaConfig(
        vocab_size=spec.vocab_size,
        hidden_size=spec.hidden_size,
        intermediate_size=spec.intermediate_size,
        num_hidden_layers=spec.num_layers,
        num_attention_heads=spec.num_heads,
        num_key_value_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        max_position_embeddings=spec.max_model_len,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=None,
    )
    return library.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
