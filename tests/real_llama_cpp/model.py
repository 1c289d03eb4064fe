"""A llama of one layer with random weights, as a GGUF file: ``python -m real_llama_cpp.model PATH``.

Tokens from ``FIRST`` on are ordinary words.
"""

from __future__ import annotations

import sys
from pathlib import Path

import gguf
import numpy as np

from .workloads import FIRST, TOKENS

_WIDTH, _HEADS = 32, 2


def write(path: Path) -> None:
    """Write the model."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_context_length(1 << 20)
    writer.add_embedding_length(_WIDTH)
    writer.add_block_count(1)
    writer.add_feed_forward_length(_WIDTH)
    writer.add_head_count(_HEADS)
    writer.add_rope_dimension_count(_WIDTH // _HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(TOKENS)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(["<unk>", "<s>", "</s>", *(f"word{number}" for number in range(FIRST, TOKENS))])
    writer.add_token_scores([0.0] * TOKENS)
    ordinary, special, unknown = gguf.TokenType.NORMAL, gguf.TokenType.CONTROL, gguf.TokenType.UNKNOWN
    writer.add_token_types([unknown, special, special, *[ordinary] * (TOKENS - FIRST)])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    draw = np.random.default_rng(0)
    square = (_WIDTH, _WIDTH)
    shapes = {"token_embd": (TOKENS, _WIDTH), "output": (TOKENS, _WIDTH)}
    shapes |= {
        f"blk.0.{name}": square
        for name in ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down")
    }
    for name, shape in shapes.items():
        writer.add_tensor(f"{name}.weight", draw.standard_normal(shape, dtype=np.float32))
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        writer.add_tensor(f"{name}.weight", np.ones(_WIDTH, dtype=np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


if __name__ == "__main__":
    write(Path(sys.argv[1]))
