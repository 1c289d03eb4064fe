"""Models by the name of their Hugging Face repository: presets, the local cache of the hub, and the hub.

    meta-llama/Llama-3.1-8B-Instruct     the preset llama-3.1-8b, by the name without suffixes of tuning, of its publisher
    nvidia/Qwen3.6-27B-NVFP4             a preset with the number formats of this checkpoint
    org/name-FP8                         its config.json in the local cache; without one the preset with fp8 weights, by the suffix
    any other org/name                   its config.json in the local cache, or from the hub (extra ``hub``)

The cache is where huggingface_hub keeps it: ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else ``~/.cache/huggingface/hub``. With
``HF_HUB_OFFLINE=1`` nothing is downloaded; ``HF_HUB_ETAG_TIMEOUT`` is the time-out in seconds, by default 10.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from ..types.errors import SettingError, install

#: Repositories with the shape of a preset under another name.
_ALIKE = {
    "llama-3.3-70b": "llama-3.1-70b",
    "llama-4-scout-17b-16e": "llama-4-scout",
    "llama-4-maverick-17b-128e": "llama-4-maverick",
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "mixtral-8x7b-v0.1": "mixtral-8x7b",
    "mixtral-8x22b-v0.1": "mixtral-8x22b",
    "mistral-nemo-2407": "mistral-nemo-12b",
    "mistral-small-24b-2501": "mistral-small-24b",
    "nemotron-h-56b-8k": "nemotron-h-56b",
    "minimax-m2.7": "minimax-m2.5",
    "glm-5.1": "glm-5",
    "glm-5.3": "glm-5.2",
    "kimi-k2.6": "kimi-k2.5",
    "llama-3_3-nemotron-super-49b-v1": "nemotron-super-49b",
    "nemotron-3-super-120b-a12b": "nemotron-3-super",
    "nemotron-3-ultra-550b-a55b": "nemotron-3-ultra",
    "nemotron-3.5-lightning-30b-a3b": "nemotron-3.5-30b-a3b",
    "deepseek-r1-distill-llama-8b": "llama-3.1-8b",
    "deepseek-r1-distill-llama-70b": "llama-3.1-70b",
    "deepseek-r1-distill-qwen-14b": "qwen2.5-14b",
    "deepseek-r1-distill-qwen-32b": "qwen2.5-32b",
}
#: Checkpoints with parts in several formats, by their ``config.json`` (in the wheel of aiconfigurator-core 0.12.0): preset, and the
#: formats of weights and KV cache.
_MIXED = {
    "nvidia/qwen3.6-27b-nvfp4": ("qwen3.6-27b", "fp8[mixer]+nvfp4[mlp,head]", "fp8"),
    "nvidia/qwen3.6-35b-a3b-nvfp4": ("qwen3.6-35b-a3b", "fp8[mixer]+nvfp4[shared,expert,head]", None),
    "nvidia/qwen3.5-122b-a10b-nvfp4": ("qwen3.5-122b-a10b", "nvfp4[expert]", "fp8"),
    "nvidia/qwen3.5-397b-a17b-nvfp4": ("qwen3.5-397b-a17b", "nvfp4[expert]", "fp8"),
    "nvidia/gemma-4-26b-a4b-nvfp4": ("gemma-4-26b-a4b", "nvfp4[expert]", "fp8"),
    "nvidia/gemma-4-31b-it-nvfp4": ("gemma-4-31b", "nvfp4[mlp]", "fp8"),
    "nvidia/glm-5.1-nvfp4": ("glm-5", "nvfp4[expert]", "fp8"),
    "nvidia/glm-5.2-nvfp4": ("glm-5.2", "nvfp4[expert]", "fp8"),
    "nvidia/glm-5.3-nvfp4": ("glm-5.2", "nvfp4[expert]", "fp8"),
    "nvidia/kimi-k2.5-nvfp4": ("kimi-k2.5", "nvfp4[mlp,shared,expert]", "fp8"),
    "nvidia/kimi-k2.6-nvfp4": ("kimi-k2.5", "nvfp4[expert]", "fp8"),
    "nvidia/minimax-m2.5-nvfp4": ("minimax-m2.5", "nvfp4[expert]", "fp8"),
    "nvidia/minimax-m2.7-nvfp4": ("minimax-m2.5", "nvfp4[expert]", "fp8"),
    "nvidia/minimax-m3-nvfp4": ("minimax-m3", "mxfp8[mixer,mlp,shared]+nvfp4[expert]", None),
}
#: Suffixes of quantised repositories' names, and the format of their weights.
_QUANTIZED = (
    (re.compile(r"-awq(-int4)?$"), "awq"),
    (re.compile(r"-gptq(-int4|-4bit)?$"), "gptq"),
    (re.compile(r"-quantized\.w4a16$"), "w4a16"),
    (re.compile(r"-quantized\.w8a8$"), "int8"),
    (re.compile(r"-fp8(-dynamic|-kv|-static-pertensor)?$"), "fp8"),
    (re.compile(r"-(nv)?fp4$"), "nvfp4"),
)
#: Organisations that publish the models with names that begin like this, and those that publish quantised copies of any.
_PUBLISHERS = {
    "opt-": "facebook",
    "llama-2-": "meta-llama",
    "llama-3": "meta-llama",
    "llama-4-": "meta-llama",
    "llama-13b": "huggyllama",
    "llama-65b": "huggyllama",
    "codellama-": "codellama",
    "mistral-": "mistralai",
    "mixtral-": "mistralai",
    "falcon-": "tiiuae",
    "qwen": "qwen",
    "gemma-": "google",
    "gpt-oss-": "openai",
    "deepseek-": "deepseek-ai",
    "nemotron-": "nvidia",
    "granite-": "ibm-granite",
    "kimi-": "moonshotai",
    "minimax-": "minimaxai",
    "phi-": "microsoft",
    "glm-": "zai-org",
    "mimo-": "xiaomimimo",
    "step-": "stepfun-ai",
    "zamba2-": "zyphra",
}
_QUANTIZERS = ("nvidia", "redhatai", "neuralmagic", "hugging-quants", "amd", "unsloth")
_TUNED = re.compile(r"-(instruct|thinking|chat|hf|it|base|bf16)(?=-|$)")
#: Models that are not simulated, by the beginning of their names, and their ``model_type``.
_UNSUPPORTED = {"deepseek-v4": "deepseek_v4", "falcon-h1": "falcon_h1", "minimax-text-01": "minimax_text_01"}
_TIMEOUT_S = 10
#: ModelOpt's own file of number formats.
QUANTIZATION_FILE = "hf_quant_config.json"
#: Errors of the network, of a repository that is gated or does not exist, and of a name that cannot be.
_REFUSALS = (OSError, ValueError, RuntimeError)
_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")


class Known(NamedTuple):
    """The preset with the shape of a repository.

    Attributes:
        quantization, kv_dtype: Number formats of the checkpoint's weights and KV cache, if other than the preset's.
        is_guess: Whether the suffix of the name alone says the format of the weights.
    """

    preset: str
    quantization: str | None = None
    kv_dtype: str | None = None
    is_guess: bool = False


def preset_of(name: str, presets: Mapping[str, Any]) -> Known | None:
    """The preset with the shape of a repository, if its publisher or a known quantiser has it; None if there is none."""
    if (mixed := _MIXED.get(name.rstrip("/").lower())) is not None:
        return Known(*mixed)
    known = _alike(name, presets)
    if known is not None and _is_published(name):
        return known
    own = (preset for preset, config in presets.items() if config.get("_name_or_path", "").lower() == name.lower())
    return next(map(Known, own), None)


def unsupported(name: str) -> str | None:
    """The ``model_type`` of a model that is not simulated, by the name of its publisher's repository; None for all others."""
    bare = name.rstrip("/").lower().rpartition("/")[2]
    found = next((kind for start, kind in _UNSUPPORTED.items() if bare.startswith(start)), None)
    return found if _is_published(name) else None


def _is_published(name: str) -> bool:
    """Whether a repository's organisation publishes models of that name; a name alone says nothing of one."""
    organisation, slash, bare = name.rstrip("/").lower().rpartition("/")
    if not slash or organisation in _QUANTIZERS:
        return True
    bare = bare.removeprefix("meta-")
    return any(bare.startswith(start) and organisation == own for start, own in _PUBLISHERS.items())


def _alike(name: str, presets: Mapping[str, Any]) -> Known | None:
    """The preset with the last part of a name, without the organisation."""
    bare = name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-").removeprefix("nvidia-")
    quantization = None
    for pattern, form in _QUANTIZED:
        bare, found = pattern.subn("", bare)
        quantization = form if found else quantization
    bare = _TUNED.sub("", bare)
    bare = _ALIKE.get(bare, bare)
    return Known(bare, quantization, is_guess=quantization is not None) if bare in presets else None


def namesake(name: str, presets: Mapping[str, Any]) -> str | None:
    """The preset with the name of a repository of an organisation that does not publish it."""
    known = _alike(name, presets)
    return None if known is None else known.preset


def config_file(name: str, namesake: str | None = None) -> Path | None:
    """The ``config.json`` of a repository, from the cache, or downloaded into it; None if the name is of no repository.

    Args:
        namesake: The preset of that name, for the error.

    Raises:
        SettingError: It is in neither.
    """
    if not _REPOSITORY.fullmatch(name):
        return None
    return cached_config(name) or _downloaded(name, namesake)


def _cache() -> Path:
    home = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    return Path(os.environ.get("HF_HUB_CACHE") or Path(home) / "hub")


def cached_config(name: str) -> Path | None:
    """The ``config.json`` of a repository in the local cache of the hub."""
    if not _REPOSITORY.fullmatch(name):
        return None
    folder = _cache() / f"models--{name.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text("utf-8").strip()
    except (OSError, ValueError):
        return None
    found = folder / "snapshots" / revision / "config.json"
    return found if found.is_file() else None


def _downloaded(name: str, namesake: str | None) -> Path:
    where = "is no preset, and not in the local cache of the Hugging Face hub"
    if namesake is not None:
        where = f"is not the repository of the preset {namesake}, which --model {namesake} names, and not in the local cache of the Hugging Face hub"
    if _is_offline():
        remedy = "unset it, or name a config.json, of which model_type and the sizes of the layers are read"
        raise SettingError("model", name, f"{where}; HF_HUB_OFFLINE forbids to download it: {remedy}")
    try:
        found = _download(name, "config.json")
    except ImportError:
        remedy = f"{install('hub')} to download its config.json, or name a config.json"
        raise SettingError("model", name, f"{where}; {remedy}") from None
    except _REFUSALS as error:
        raise SettingError("model", name, f"{where}; {_reason(name, error)}") from None
    download(name, QUANTIZATION_FILE, found.parent.name)
    return found


@cache
def download(name: str, file: str, revision: str) -> None:
    """Put a file of a repository beside its ``config.json`` of that revision in the cache, if the hub has it and may be asked."""
    if not _is_offline():
        with suppress(ImportError, *_REFUSALS):
            _download(name, file, revision)


def _is_offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")


def _endpoint() -> str:
    return os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")


def _download(name: str, file: str, revision: str | None = None) -> Path:
    """A file of a repository in the cache, downloaded if it is not there.

    Raises:
        ImportError: The extra is not installed.
        OSError, ValueError, RuntimeError: The hub does not answer, or does not give the file.
    """
    from huggingface_hub import hf_hub_download

    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    timeout_s = float(os.environ.get("HF_HUB_ETAG_TIMEOUT", _TIMEOUT_S))
    # Without a network, or with a hub that does not answer, huggingface_hub tries for a minute.
    _require_answer(f"{_endpoint()}/{name}/resolve/{revision or 'main'}/{file}", timeout_s)
    return Path(hf_hub_download(name, file, revision=revision, etag_timeout=timeout_s))


def _reason(name: str, error: Exception) -> str:
    """Why the hub does not give the ``config.json`` of a repository, and the remedy."""
    from urllib.error import URLError

    from huggingface_hub.errors import (
        EntryNotFoundError,
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    page, log_in = f"{_endpoint()}/{name}", "log in by hf auth login or HF_TOKEN"
    if isinstance(error, GatedRepoError):
        return f"its repository is gated: accept its terms at {page} and {log_in}, or name a config.json"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private: check the name, {log_in}, or name a config.json"
    # The second is of a network that was lost after the first answer, and of a kind with the first.
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return "its repository has no config.json: name one"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, URLError | TimeoutError | ConnectionError | LocalEntryNotFoundError):
        said = str(error.reason) if isinstance(error, URLError) else said
        return f"{_endpoint()} does not answer ({said}): connect to a network, or name a config.json"
    return f"the hub does not give it ({said}): name a config.json"


def _require_answer(url: str, timeout_s: float) -> None:
    """Any answer will do; OSError if there is none."""
    # Loaded here, as loading them takes longer than a small run.
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    with suppress(HTTPError):
        urlopen(Request(url, method="HEAD"), timeout=timeout_s).close()
