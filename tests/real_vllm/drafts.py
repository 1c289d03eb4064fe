"""Workloads under speculative decoding; knows nothing of vLLM."""

from __future__ import annotations

import json
import random
from dataclasses import replace

from fragmeter.sim.engine.replica import build

from . import ours
from .shapes import Layer, drafter_layers
from .workloads import KINDS, OPTIONS, Case, with_options

METHODS = ("ngram", "eagle", "draft_model")
#: Those of packed blocks: the drafters of others do not have DeepSeek V4's number format, nor GLM-5.3-Flash's indexer.
PACKED = [(kind, method) for kind in ("compressed", "rings") for method in ("ngram", "mtp")]
#: Kinds of workloads that steps with drafts of every method serve.
DRAFTED = tuple(kind for kind in KINDS if kind not in ("rings", "compressed"))
#: Kinds over several KV groups.
HYBRIDS = ("windows", "windows_cached", "states", "block_sizes")


def drawn(kind: str, seed: int, method: str, option: str | None = None, **fixed: bool) -> Case:
    """A workload with up to five drafts, of which none, all, or 60 % of those behind accepted ones are accepted.

    Args:
        fixed: Fields of ``Case`` that are not drawn.
    """
    draw = random.Random(f"{kind}/{seed}/{method}")
    drafts = draw.choice([1, 2, 3, 5])
    rate = (0.0, 0.6, 1.0)[seed % 3]
    case = replace(KINDS[kind](seed), **fixed)
    if option is not None:
        case = OPTIONS[option](case)
        if "long_prefill_token_threshold" in case.options:
            # With a lower one vLLM ends at an assertion.
            least = max(drafts + 1, case.options["long_prefill_token_threshold"])
            longer = replace(case, max_model_len=max(case.max_model_len, least))
            case = with_options(longer, {"long_prefill_token_threshold": least})
    return drafting(case, method, drafts, [rate**place for place in range(1, drafts + 1)])


def drafting(case: Case, method: str, drafts: int, rates: list[float]) -> Case:
    """The case with speculative decoding."""
    config = {
        "method": method,
        "num_speculative_tokens": drafts,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": rates,
    }
    if method == "draft_model":
        config["model"] = ours._model_of((Layer(),))
    # vLLM starts with more tokens a step than a sequence has drafts.
    case = replace(case, max_num_batched_tokens=max(case.max_num_batched_tokens, drafts + 1))
    case = with_options(case, {"speculative_config": json.dumps(config, sort_keys=True)})
    if len(case.layers) == 1 and case.layers[0].kind == "full":
        return case
    # Of hybrids the pool holds the longest sequence with its drafts and the drafter's layer, or a little more.
    layout = build(ours.settings_of(case, True)).layout
    assert layout is not None
    if layout.config is None:
        return case
    least = layout.config.sequence_blocks(case.max_model_len) + 1
    return replace(case, num_blocks=least + random.Random(case.name).choice([0, 0, 1, 5, 20, 100]))


def beside_drafts(layers: tuple[Layer, ...], method: str, drafts: int) -> tuple[Layer, ...]:
    """What the layers keep beside drafts: a convolution also its inputs of those; and the drafter's layer comes last."""
    kept = []
    for layer in layers:
        if layer.kind == "state":
            (channels, inputs), *others = layer.state_shapes
            layer = replace(layer, state_shapes=((channels, inputs + drafts), *others))
        elif layer.kind == "ring":
            # ``Glm5NextTailCache``: keys of tokens and drafts, a power of two of them.
            layer = replace(
                layer, tokens=layer.tokens * (1 << (-(-(layer.tokens + drafts) // layer.tokens) - 1).bit_length())
            )
        kept.append(layer)
    return (*kept, *drafter_layers(kept, method))
