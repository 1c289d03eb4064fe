"""Writes ``sim/spec/data/repositories.json``, the facts by which ``--model ORG/NAME`` is answered, and docs/results/models.md, their list.

    python docs/models.py read FOLDER ... [--read 2026-11-28]
    python docs/models.py count FOLDER
    python docs/models.py

The first reads every ``ORG/NAME/config.json`` of the folders, with ``hf_quant_config.json`` beside it. ``sources.tsv`` in a folder says where they
are from: name, repository or package, path in it, commit or release, and a fifth column where the file is doubted, one line each. A file replaces what
is stored of its name, but a doubted file nothing that is from elsewhere. Of a file only the keys
that the readers of ``sim/spec`` name are stored, and of lists of modules only those that decide a format; the script
refuses to write what would be read as another model. Files that are not understood are named and left out.

The second compares the answer by folder with the answer by name, for every model of a folder. The third writes docs/results/models.md alone.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from fragmeter.sim.spec import ModelSpec, model, model_names, stage_bytes
from fragmeter.sim.spec import stored as table
from fragmeter.sim.spec.checkpoint import deciding_modules, needs_quantization_file
from fragmeter.sim.spec.model import preset_config, read_files
from fragmeter.sim.types.errors import SettingError, UserError

SPEC = Path(__file__).parent.parent / "sim" / "spec"
PAGE = Path(__file__).parent / "results" / "models.md"
#: Keys of which the children have free names.
_FREE = ("config_groups", "quantized_layers")
#: Repositories that the hub renamed: today's name and the former, which it still answers.
RENAMED = {
    "meta-llama/Llama-3.1-8B": "meta-llama/Meta-Llama-3.1-8B",
    "meta-llama/Llama-3.1-70B": "meta-llama/Meta-Llama-3.1-70B",
    "meta-llama/Llama-3.1-405B": "meta-llama/Meta-Llama-3.1-405B",
    "meta-llama/Meta-Llama-3.1-8B-Instruct": "meta-llama/Llama-3.1-8B-Instruct",
    "meta-llama/Meta-Llama-3.1-70B-Instruct": "meta-llama/Llama-3.1-70B-Instruct",
    "THUDM/glm-4-9b": "zai-org/glm-4-9b",
}
#: Repositories that are served much, and of which no copy was found.
MISSING = """
Qwen/Qwen2.5-72B-Instruct-AWQ Qwen/Qwen2.5-VL-32B-Instruct Qwen/Qwen2.5-VL-72B-Instruct Qwen/Qwen3-Next-80B-A3B-Thinking Qwen/Qwen3-8B-FP8
Qwen/Qwen3-30B-A3B-Instruct-2507-FP8 Qwen/Qwen3-235B-A22B-Instruct-2507-FP8 Qwen/Qwen3-Coder-30B-A3B-Instruct-FP8 Qwen/Qwen3.6-27B-FP8
Qwen/Qwen3.8-27B google/gemma-4-26B-A4B-it google/gemma-4-12B-it google/gemma-4-E4B-it mistralai/Mistral-Small-3.1-24B-Instruct-2503
mistralai/Mistral-Small-3.2-24B-Instruct-2506 mistralai/Ministral-8B-Instruct-2410 mistralai/Ministral-3-8B-Instruct-2512
mistralai/Mistral-Large-3-675B-Instruct-2512 mistralai/Mistral-7B-Instruct-v0.2 microsoft/Phi-3.5-mini-instruct zai-org/GLM-4.7 zai-org/GLM-4.7-Flash
zai-org/GLM-4-32B-0414 MiniMaxAI/MiniMax-M2 MiniMaxAI/MiniMax-M2.1 deepseek-ai/DeepSeek-V3-0324 deepseek-ai/DeepSeek-R1-0528
deepseek-ai/DeepSeek-V3.2-Exp deepseek-ai/DeepSeek-R1-Distill-Qwen-7B deepseek-ai/DeepSeek-R1-Distill-Qwen-14B
deepseek-ai/DeepSeek-R1-Distill-Qwen-32B moonshotai/Kimi-K2-Instruct-0905 moonshotai/Kimi-K2-Thinking baidu/ERNIE-4.5-21B-A3B-PT
baidu/ERNIE-4.5-300B-A47B-PT CohereLabs/c4ai-command-a-03-2025 ibm-granite/granite-4.0-h-tiny tencent/Hunyuan-7B-Instruct
RedHatAI/Meta-Llama-3.1-8B-Instruct-FP8-dynamic RedHatAI/Llama-3.3-70B-Instruct-FP8-dynamic hugging-quants/Meta-Llama-3.1-70B-Instruct-AWQ-INT4
nvidia/Llama-3.1-8B-Instruct-FP8 nvidia/Llama-3.3-70B-Instruct-FP8 nvidia/Llama-3.3-70B-Instruct-FP4 unsloth/Llama-3.3-70B-Instruct-bnb-4bit
""".split()
#: Repositories of which a copy was found, and that are not simulated.
UNREAD = {
    "google/gemma-4-E2B-it, google/gemma-4-E4B-it": "layers share a KV cache, and each has an embedding of its own",
    "meta-llama/Llama-3.2-11B-Vision-Instruct": "layers attend to an image encoder",
    "sgl-project/DeepSeek-V4-Flash-FP8, sgl-project/DeepSeek-V4-Pro-FP8": "a model_type that vLLM does not know",
}
_HEAD = """\
# Models by the name of their repository

`--model ORG/NAME` is answered from the checkpoint's own `config.json` alone: the one in the local cache of the hub, else the keys of a stored
copy (`sim/spec/data/repositories.json`), else a download. This page lists the stored copies; `python docs/models.py` writes it and is not edited by
hand. A name without its organisation is taken where one known model alone may have it. Every other name is refused, with the remedy: `--model FOLDER` of its `config.json`. A fine-tune, a quantised copy or a longer
variant may have another shape, another longest sequence and another number format than its base, so no name is taken for another.

{count} repositories, {presets} of them with a short name (`fragmeter list models`). Files of aiconfigurator-core are Apache-2.0; some are shortened by that
project: MiniMax M3 is there without its vision encoder, Step 3.7 Flash without its encoder and the heads of its windows (the presets `minimax-m3` and
`step-3.7-flash` have them), and two of Nemotron 3 without their lists of modules. Of other files only single figures are stored.

A *doubted* copy is weaker evidence: an early revision, one in the code of another project, the defaults of a class of transformers, or the
shape of litgpt's table, which has no number formats and not always the longest sequence of the checkpoint (of 28 models that are stored from a `config.json`, too, 26 agree in all figures, one differs in its longest sequence and one in
its vocabulary). The first line of every answer by such a name says so.

| repository | preset | parameters, billions | longest | weights | KV cache | read from | day | doubted |
|---|---|---|---|---|---|---|---|---|
"""
_TAIL = """
## Presets without a stored file

Their shapes were read in public copies before this table was made, and a repository of one is answered by it: {presets}.

## Repositories without a stored file

No copy of these was found in the sources above, and they are refused: {missing}.

## Repositories that are not simulated

{unread}
"""


def needed_keys() -> frozenset[str]:
    """Every name in quotes in the readers: a superset of the keys that they read."""
    return frozenset(word for path in SPEC.glob("*.py") for word in re.findall(r'"(\w+)"', path.read_text("utf-8")))


def pruned(value: Any, keys: frozenset[str], free: bool = False) -> Any:
    """A configuration without keys that no reader names; null counts as absent, but for a number format."""
    if isinstance(value, list):
        return [pruned(each, keys) for each in value]
    if not isinstance(value, dict):
        return value
    return {
        key: pruned(inner, keys, key in _FREE)
        for key, inner in value.items()
        if (free or key in keys) and (inner is not None or key == "quantization_config")
    }


def with_deciding_modules(config: dict[str, Any], spec: ModelSpec) -> dict[str, Any]:
    """A configuration with only the modules in its lists that decide the format of a part."""
    given = config.get("quantization_config") or config
    if not isinstance(given, dict):
        return config
    for holder in (given, given.get("quantization")):
        if isinstance(holder, dict):
            for key in ("ignore", "exclude_modules", "modules_to_not_convert", "quantized_layers"):
                if isinstance(holder.get(key), list | dict):
                    holder[key] = deciding_modules(spec, holder[key])
    return config


def sources(folder: Path) -> dict[str, dict[str, str]]:
    """Where the files of a folder are from, and why one is doubted, by name."""
    path = folder / "sources.tsv"
    if not path.is_file():
        raise UserError(f"{path}: is not there; it says where each config.json is from")
    rows = (line.split("\t") for line in path.read_text("utf-8").splitlines() if line)
    return {
        name: {"source": f"{where}, {place}, {version}"} | ({"doubt": doubt[0]} if doubt else {})
        for name, where, place, version, *doubt in rows
    }


def files(folder: Path) -> Iterator[tuple[str, dict[str, Any], dict[str, Any] | None]]:
    """Name, ``config.json`` and ``hf_quant_config.json`` of each model of a folder."""
    for path in sorted(folder.glob("*/*/config.json")):
        beside = path.with_name("hf_quant_config.json")
        name = f"{path.parent.parent.name}/{path.parent.name}"
        yield (
            name,
            json.loads(path.read_text("utf-8")),
            json.loads(beside.read_text("utf-8")) if beside.is_file() else None,
        )


def facts_of(name: str, config: dict[str, Any], beside: dict[str, Any] | None) -> dict[str, Any]:
    """What is stored of a model.

    Raises:
        UserError: It is not understood, or what is stored would be read as another model.
    """
    whole, keys = read_files(config, beside, name), needed_keys()
    kept = {"config": with_deciding_modules(pruned(config, keys), whole)}
    if beside is not None and needs_quantization_file(config):
        kept["hf_quant_config"] = with_deciding_modules(pruned(beside, keys), whole)
    if read_files(kept["config"], kept.get("hf_quant_config"), name) != whole:
        raise SettingError("model", name, "is read as another model when only its needed keys are stored")
    return kept


def read(folders: list[Path], day: str) -> None:
    """Add the models of the folders to the stored facts."""
    path, own = SPEC / table.DATA, {preset_config(name).get("_name_or_path") for name in model_names()}
    found = json.loads(path.read_text("utf-8"))
    for folder in folders:
        where = sources(folder)
        for name, config, beside in files(folder):
            other = found.get(name, where[name])["source"].partition(",")[0] != where[name]["source"].partition(",")[0]
            if "doubt" in where[name] and (name in own or other):
                continue
            try:
                found[name] = where[name] | {"read": day} | facts_of(name, config, beside)
            except UserError as error:
                print(f"left out: {name}: {str(error)[:140]}")
    for name, other in RENAMED.items():
        if other in found:
            found[name] = found[other] | {"source": f"{found[other]['source']} ({other}, the same repository)"}
    lines = (f"{json.dumps(name)}: {json.dumps(found[name])}" for name in sorted(found, key=str.lower))
    path.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")


def answer(spec: ModelSpec) -> dict[str, Any]:
    """The figures of a model in which a name and a file must agree."""
    return {
        "KV bytes per token": [spec.slot_bytes(form) for form in ("bf16", "fp8")],
        "groups": spec.kv_groups(),
        "states": spec.state_bytes("bf16"),
        "weights": stage_bytes(spec, quantization=spec.quantization),
        "longest": spec.max_model_len,
        "formats": (spec.quantization, spec.unquantized, spec.kv_dtype, spec.named_format),
    }


def count(folder: Path) -> None:
    """Print how many models are answered by folder and by name, and the differences."""
    by: Mapping[str, dict[str, Any]] = {"folder": {}, "name": {}}
    for name, _, _ in files(folder):
        for how, asked in (("folder", str(folder / name)), ("name", name)):
            try:
                by[how][name] = answer(model(asked))
            except UserError as error:
                print(f"by {how}: {name}: {str(error)[:160]}")
    both = by["folder"].keys() & by["name"].keys()
    differ = {
        name: [key for key in by["name"][name] if by["name"][name][key] != by["folder"][name][key]] for name in both
    }
    for name, keys in differ.items():
        if keys:
            print(f"differs: {name}: {', '.join(keys)}")
    total = sum(1 for _ in files(folder))
    print(
        f"{total} models: {len(by['folder'])} by folder, {len(by['name'])} by name, {sum(map(bool, differ.values()))} differ"
    )


def page() -> str:
    """The text of docs/results/models.md."""
    rows, short = [], {}
    for name in table.stored_names():
        facts, spec = table.stored(name), model(name)
        assert facts is not None
        if spec.name != name:
            short[spec.name] = name
        cells = (
            f"`{name}`", f"`{spec.name}`" if spec.name != name else "", f"{spec.num_params / 1e9:,.2f}", f"{spec.max_model_len:,}",
            spec.quantization or "16 bits", spec.kv_dtype or "16 bits", facts.source, facts.read, "yes" if facts.doubt else "",
        )  # fmt: skip
        rows.append(f"| {' | '.join(cells)} |")
    own = [name for name in model_names() if name not in short and not name.startswith("toy-")]
    missing = sorted(set(MISSING) - set(table.stored_names()), key=str.lower)
    return (
        _HEAD.format(count=len(rows), presets=len(short))
        + "\n".join(rows)
        + _TAIL.format(
            presets=", ".join(f"`{name}`" for name in own),
            missing=", ".join(f"`{name}`" for name in missing),
            unread="\n".join(f"- {names}: {why}." for names, why in UNREAD.items()),
        )
    )


if __name__ == "__main__":
    words = sys.argv[1:]
    if words[:1] == ["count"]:
        count(Path(words[1]))
    elif words[:1] == ["read"]:
        day = words[words.index("--read") + 1]
        read([Path(word) for word in words[1:] if word not in ("--read", day)], day)
    else:
        PAGE.write_text(page(), "utf-8")
