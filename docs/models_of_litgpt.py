"""Writes folders with a ``config.json`` and sources.tsv for ``docs/models.py``, from the table of models in a wheel of litgpt (Apache-2.0).

    python docs/models_of_litgpt.py litgpt-0.5.13-py3-none-any.whl FOLDER

litgpt has the shape of a checkpoint under names of its own, no file of its publisher. Heads, layers and sizes of the models that
are stored from a ``config.json``, too, agree; the longest sequence does not always, and number formats are not there. Each answer by such a name says so.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

DOUBT = (
    "the shape is that of litgpt's table, not of a config.json: the longest sequence is not certain, and weights and KV cache are taken to"
    " have 16 bits"
)
#: Families: pattern of the repository, and the keys that litgpt does not have.
_FAMILIES: tuple[tuple[str, dict[str, Any]], ...] = (
    (r"meta-llama/.*Llama-3|deepseek-ai/.*Distill-Llama|nvidia/Llama-3", {"model_type": "llama"}),
    (r"Qwen/(Qwen2\.5|QwQ)", {"model_type": "qwen2", "use_sliding_window": False}),
    (r"Qwen/Qwen3-.*-A\d+B", {"model_type": "qwen3_moe", "use_sliding_window": False}),
    (r"Qwen/Qwen3-", {"model_type": "qwen3", "use_sliding_window": False}),
    (r"google/gemma-2-", {"model_type": "gemma2"}),
    (r"microsoft/Phi-4|microsoft/phi-4", {"model_type": "phi3"}),
    (r"mistralai/Mistral-Large", {"model_type": "mistral"}),
    (r"mistralai/Mixtral", {"model_type": "mixtral"}),
    (r"tiiuae/Falcon3|HuggingFaceTB/SmolLM2|meta-llama/Llama-2", {"model_type": "llama"}),
)
#: Models with one embedding for input and output, by the number of parameters that their publishers give.
_TIED = re.compile(
    r"Qwen2\.5-(Coder-|Math-)?(0\.5|1\.5|3)B|Qwen3-(0\.6|1\.7|4)B|Llama-3\.2-(1|3)B|Phi-4-mini|SmolLM2-|gemma-2-"
)


def table(wheel: Path) -> list[dict[str, Any]]:
    """litgpt's list of models."""
    with zipfile.ZipFile(wheel) as archive:
        text = archive.read("litgpt/config.py").decode("utf-8")
    text = re.sub(r"^(import yaml|from typing_extensions import Self)$", "Self = object", text, flags=re.M)
    module = ModuleType("config_of_litgpt")
    sys.modules[module.__name__] = module
    exec(compile(text, "litgpt/config.py", "exec"), module.__dict__)
    return list(module.__dict__["configs"])


def config_of(name: str, given: dict[str, Any]) -> dict[str, Any] | None:
    """A model as a ``config.json``; None if its family is not read."""
    family = next((keys for pattern, keys in _FAMILIES if re.match(pattern, name)), None)
    if family is None:
        return None
    heads = given.get("n_head", 32)
    multiple = given.get("padding_multiple", 512)
    vocab = given.get("padded_vocab_size") or -(-given["vocab_size"] // multiple) * multiple
    found = family | {
        "hidden_size": given.get("n_embd", 4096),
        "num_hidden_layers": given.get("n_layer", 16),
        "num_attention_heads": heads,
        "num_key_value_heads": given.get("n_query_groups", heads),
        "intermediate_size": given["intermediate_size"],
        "vocab_size": vocab,
        "max_position_embeddings": given.get("block_size", 4096),
        "tie_word_embeddings": _TIED.search(name) is not None,
    }
    if "head_size" in given:
        found["head_dim"] = given["head_size"]
    if given.get("sliding_window_size") and family["model_type"].startswith("gemma"):
        found["sliding_window"] = given["sliding_window_size"]
    if given.get("n_expert"):
        count = "num_experts" if family["model_type"] == "qwen3_moe" else "num_local_experts"
        found |= {count: given["n_expert"], "num_experts_per_tok": given["n_expert_per_token"]}
    if "moe_intermediate_size" in given:
        found["moe_intermediate_size"] = given["moe_intermediate_size"]
    return found


def main(wheel: Path, folder: Path) -> None:
    """Write one folder for each model."""
    version, lines = wheel.name.split("-")[1], []
    for given in table(wheel):
        name = f"{given['hf_config']['org']}/{given['hf_config']['name']}"
        if (config := config_of(name, given)) is not None:
            (folder / name).mkdir(parents=True, exist_ok=True)
            (folder / name / "config.json").write_text(json.dumps(config), "utf-8")
            lines.append(f"{name}\tlitgpt (PyPI)\tlitgpt/config.py\t{version}\t{DOUBT}")
    (folder / "sources.tsv").write_text("\n".join(lines) + "\n", "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
