"""Models by the name of their Hugging Face repository: the local cache of the hub, and the hub.

The cache comes before the stored facts of a repository (``stored``), and these before a download. A name without a file is refused: its
shape, the number formats of weights and KV cache and the longest sequence are unknown.

The cache is where huggingface_hub keeps it: ``HF_HUB_CACHE``, else ``HF_HOME/hub``, else ``~/.cache/huggingface/hub``. With
``HF_HUB_OFFLINE=1`` nothing is downloaded; ``HF_HUB_ETAG_TIMEOUT`` is the time-out in seconds, by default 10.
"""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable
from contextlib import suppress
from functools import cache
from pathlib import Path

from ..types.errors import SettingError, install

#: Suffixes of the names of quantised and of trained checkpoints, which leave the name of their base.
_OF_FORMATS = r"awq|gptq|nvfp4|fp4|fp8|mxfp4|int4|int8|4bit|w4a16|w8a8|quantized\.\w+|dynamic|kv|static|pertensor|block"
_FORMATS = re.compile(rf"-({_OF_FORMATS})(?=-|$)")
_SUFFIXES = re.compile(rf"-({_OF_FORMATS}|instruct|thinking|chat|hf|it|base|bf16|\d{{4}})(?=-|$)")
#: Models that are not simulated, by the beginning of their names, and their ``model_type``.
_UNSUPPORTED = {"falcon-h1": "falcon_h1", "minimax-text-01": "minimax_text_01"}
_TIMEOUT_S = 10
#: The remedy of every name without a file.
NAME_A_FILE = "name the folder of its config.json by --model FOLDER"
#: ModelOpt's own file of number formats.
QUANTIZATION_FILE = "hf_quant_config.json"
#: Errors of the network, of a repository that is gated or does not exist, and of a name that cannot be.
_REFUSALS = (OSError, ValueError, RuntimeError)
_REPOSITORY = re.compile(r"\w[\w.-]*/[\w.-]+")


def unsupported(name: str) -> str | None:
    """The ``model_type`` of a model that is not simulated, by the beginning of its name; None for all others."""
    bare = name.rstrip("/").lower().rpartition("/")[2]
    return next((kind for start, kind in _UNSUPPORTED.items() if bare.startswith(start)), None)


def nearest(name: str, known: Iterable[str]) -> str | None:
    """The known model with the same name but for suffixes of formats and of training; None without one.

    Its shape, formats and longest sequence may be others: it is named in errors alone.
    """
    wanted = _base(name)
    return next((each for each in known if _base(each) == wanted), None)


def short_for(name: str, known: Iterable[str]) -> list[str]:
    """The known models that a name without an organisation may stand for.

    These are the ones with exactly that name after the organisation; without one, those with only suffixes of training and of formats
    more, such as ``-Instruct``. A suffix of the name itself is never left out: ``x-fp8`` does not stand for ``x``.
    """
    if "/" in name:
        return []
    wanted = _bare(name)
    alike = [each for each in known if _base(each) == _base(name)]
    exact = [each for each in alike if _bare(each) == wanted]
    return exact or [each for each in alike if set(_SUFFIXES.findall(wanted)) <= set(_SUFFIXES.findall(_bare(each)))]


def in_formats(name: str, known: Iterable[str]) -> list[str]:
    """The known models with the same name and suffixes of number formats more: the same model, quantised."""
    bare = _bare(name)
    return [each for each in known if _bare(each) != bare and _FORMATS.sub("", _bare(each)) == bare]


def _bare(name: str) -> str:
    return name.rstrip("/").rsplit("/", 1)[-1].lower().removeprefix("meta-").removeprefix("nvidia-")


def _base(name: str) -> str:
    return _SUFFIXES.sub("", _bare(name))


def config_file(name: str, alike: str | None = None) -> Path | None:
    """The ``config.json`` of a repository, from the cache, or downloaded into it; None if the name is not of the form ORG/NAME.

    Args:
        alike: A known model with nearly that name, for the error.

    Raises:
        SettingError: It is in neither.
    """
    if not _REPOSITORY.fullmatch(name):
        return None
    return cached_config(name) or _downloaded(name, alike)


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


def _downloaded(name: str, alike: str | None) -> Path:
    where = "is no preset, no stored file is of it, and it is not in the local cache of the Hugging Face hub"
    if alike is not None:
        where += f"; --model {alike} has nearly its name, and may have another shape, length and number format"
    if _is_offline():
        raise SettingError("model", name, f"{where}; HF_HUB_OFFLINE forbids to download it: unset it, or {NAME_A_FILE}")
    try:
        found = _download(name, "config.json")
    except ImportError:
        remedy = f"{install('hub')} to download its config.json, or {NAME_A_FILE}"
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
        return f"its repository is gated: accept its terms at {page} and {log_in}, or {NAME_A_FILE}"
    if isinstance(error, RepositoryNotFoundError):
        return f"the hub has no such repository, or it is private: check the name, {log_in}, or {NAME_A_FILE}"
    # The second is of a network that was lost after the first answer, and of a kind with the first.
    if isinstance(error, EntryNotFoundError) and not isinstance(error, LocalEntryNotFoundError):
        return f"its repository has no config.json: {NAME_A_FILE}"
    said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    if isinstance(error, URLError | TimeoutError | ConnectionError | LocalEntryNotFoundError):
        said = str(error.reason) if isinstance(error, URLError) else said
        return f"{_endpoint()} does not answer ({said}): connect to a network, or {NAME_A_FILE}"
    return f"the hub does not give it ({said}): {NAME_A_FILE}"


def _require_answer(url: str, timeout_s: float) -> None:
    """Any answer will do; OSError if there is none."""
    # Loaded here, as loading them takes longer than a small run.
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    with suppress(HTTPError):
        urlopen(Request(url, method="HEAD"), timeout=timeout_s).close()
