"""Models with layers of fixed-size states, small enough to reckon by hand, and workloads over them."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import numpy as np
from hypothesis import strategies as st

from fragmeter.sim import Workload
from fragmeter.sim.workload.content import PromptContent

#: A page of 16 tokens of one layer: K and V of 2 heads of 16 elements of 2 bytes.
PAGE_BYTES = 2048
#: 8 keys, 40 values: a convolution of 3 x (2 * 8 + 40) in 2 bytes, and a state of 8 x 40 in 4.
STATE_BYTES = 3 * 56 * 2 + 8 * 40 * 4


@cache
def _folder() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory()


@cache
def model_of(kinds: str) -> str:
    """Path of a ``config.json``: a letter a layer, f for full attention, s for a gated delta net; or m for Mamba-2, with states
    as large, which prefills export."""
    names = {"f": "full_attention", "s": "linear_attention"}
    config = {
        "num_hidden_layers": len(kinds),
        "hidden_size": 64,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 128,
        "vocab_size": 1000,
        "max_position_embeddings": 4096,
    }
    if "m" in kinds:
        config |= {
            "model_type": "nemotron_h",
            "hybrid_override_pattern": kinds.replace("m", "M").replace("f", "*"),
            "mamba_num_heads": 1,
            "mamba_head_dim": 40,
            "n_groups": 1,
            "ssm_state_size": 8,
        }
    else:
        config |= {
            "model_type": "qwen3_5_text",
            "layer_types": [names[kind] for kind in kinds],
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 1,
            "linear_key_head_dim": 8,
            "linear_value_head_dim": 40,
            "linear_conv_kernel_dim": 4,
            "mamba_ssm_dtype": "float32",
        }
    path = Path(_folder().name) / kinds / "config.json"
    path.parent.mkdir()
    path.write_text(json.dumps(config))
    return str(path)


def workload(arrivals: list[int], pieces: list[list[tuple[int, int]]], own: list[int], outputs: list[int]) -> Workload:
    """Prompts of (text, tokens) a piece, and so many tokens of their own."""
    flat = [piece for of in pieces for piece in of]
    content = PromptContent(
        np.cumsum([0, *map(len, pieces)]),
        np.array([name for name, _ in flat], dtype=np.int64),
        np.array([tokens for _, tokens in flat], dtype=np.int64),
    )
    prompts = [sum(tokens for _, tokens in of) + rest for of, rest in zip(pieces, own, strict=True)]
    return Workload(
        "states",
        np.array(arrivals),
        np.array(prompts),
        np.array(outputs),
        max_tokens=np.array(outputs),
        content=content,
    )


@st.composite
def workloads(draw: st.DrawFn) -> Workload:
    """A few requests, some with texts in common."""
    count = draw(st.integers(1, 7))
    arrivals = np.cumsum([draw(st.sampled_from([0, 0, 1, 150, 700, 5000])) for _ in range(count)]).tolist()
    piece = st.tuples(st.integers(0, 2), st.integers(1, 60))
    pieces = [draw(st.lists(piece, max_size=2)) for _ in range(count)]
    own = [draw(st.integers(1, 40)) for _ in range(count)]
    return workload(arrivals, pieces, own, [draw(st.integers(1, 40)) for _ in range(count)])
