"""Static batches of the same lengths through ``transformers``' ``generate``: a measured throughput of independent code.

The model is a Llama of the same config with random weights, on the same device and in the same dtype; nothing is
downloaded. Prompts are padded on the left to the longest of their batch, and a batch generates as many tokens as its longest
output has. The cache of ``generate`` has no block tables.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch

from ...sim.recording.plans import Plan
from ...sim.spec import ModelSpec
from ...sim.workload.workload import Workload
from ..devices import timing
from ..model.skeleton import DTYPES, Skeleton

#: Whole batches are generated up to so many steps, and one at least. On an H200 1,000 steps of a model of 8 billion parameters took
#: more than 40 s.
MOST_STEPS = 300
#: New tokens of the first call, which is not timed.
WARM_UP_TOKENS = 2


class StaticBatch(NamedTuple):
    """A batch of a static plan.

    Attributes:
        steps: Its steps in the plan.
        prompt_tokens, output_tokens: int64 [sequences].
    """

    steps: range
    prompt_tokens: np.ndarray
    output_tokens: np.ndarray


def static_batches(plan: Plan, workload: Workload, most_steps: int = MOST_STEPS) -> list[StaticBatch]:
    """The first batches of a static plan, with no more than so many steps, and one at least."""
    starts = np.flatnonzero(plan.prefill_tokens).tolist()
    found: list[StaticBatch] = []
    for start, end in zip(starts, [*starts[1:], plan.num_steps], strict=True):
        if found and end > most_steps:
            break
        rows = plan.step(start).sequence
        found.append(StaticBatch(range(start, end), workload.prompt_tokens[rows], workload.output_tokens[rows]))
    return found


def generated_us(skeleton: Skeleton, batches: Sequence[StaticBatch], seed: int) -> tuple[list[float], str]:
    """Microseconds of each batch, by the stopwatch's clock, and the version of transformers.

    Raises:
        ImportError: transformers is not installed.
        torch.OutOfMemoryError: The device has no room for a second model.
    """
    library = _library()
    with skeleton.device.torch_device:  # on the host, 8 billion random weights in fp32 take minutes
        model = _llama(library, skeleton.model, DTYPES[skeleton.dtype])
    stopwatch, rng = timing.stopwatch(skeleton.device), np.random.default_rng(seed)
    found = []
    for number, batch in enumerate(batches):
        lengths, longest = batch.prompt_tokens, int(batch.prompt_tokens.max())
        ids = skeleton.place(rng.integers(skeleton.model.vocab_size, size=(len(lengths), longest)))
        mask = skeleton.place((np.arange(longest) >= longest - lengths[:, None]).astype(np.int64))

        def generate(new_tokens: int, ids: torch.Tensor = ids, mask: torch.Tensor = mask) -> None:
            exactly = {"min_new_tokens": new_tokens, "max_new_tokens": new_tokens, "do_sample": False}
            model.generate(input_ids=ids, attention_mask=mask, pad_token_id=0, eos_token_id=None, **exactly)

        if not number:
            generate(WARM_UP_TOKENS)
        whole = partial(_numbered, generate, int(batch.output_tokens.max()))
        found.append(stopwatch.elapsed_us(whole, range(1)))
    return found, str(library.__version__)


def _numbered(generate: Callable[[int], None], new_tokens: int, _: int) -> None:
    """A call as a stopwatch makes it, with its number."""
    generate(new_tokens)


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
