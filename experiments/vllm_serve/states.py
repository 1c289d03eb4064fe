"""What a line says of states: their number formats, and at which ends of blocks they are kept for prefix hits.

``MambaModelConfig`` of vLLM's ``model_executor/models/config.py`` decides by release, in the wheels of 0.10 to 0.33:

    up to 0.11   prefixes of models with states are not cached
    0.12, 0.13, 0.14  only of those with Mamba's or Mamba-2's kernels, with the states of all blocks
    0.15 to 0.27 these as before ("all"; in 0.20 and 0.21 with drafts "align"), others with some states ("align")
    0.28 to 0.31 "align" unless ``--mamba-cache-mode all`` asks such a model for all
    since 0.32   "align"

The mode "none" is that of a line that says nothing, and follows ``--enable-prefix-caching``.
"""

from __future__ import annotations

from dataclasses import replace

from ...sim.spec import ModelSpec
from ...sim.spec.releases import Release
from ...sim.spec.states import KimiDelta, Mamba, Mamba2
from ...sim.types.errors import NotSimulated, SettingError
from .line import ServeLine

_CONV, _STATE = "mamba-cache-dtype", "mamba-ssm-cache-dtype"
_MODE, _BLOCK = "mamba-cache-mode", "mamba-block-size"
_FORMATS = {"auto": "auto", "float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
#: Releases: the first that caches prefixes with states, the first with both modes, those that keep all by default, and may keep all.
_FIRST, _FIRST_ALIGNED, _LAST_BY_DEFAULT, _LAST_ALL = 12, 15, 27, 31
#: In this release, and 0.21, drafts turn the default.
_ALIGNED_WITH_DRAFTS = 20
#: The first wheel that was read in which Kimi delta attention reads the format of its states.
_FIRST_KDA = 30
#: ``get_mamba_chunk_size`` of kernels without chunks.
_CHUNK_TOKENS = 2048


def with_formats(line: ServeLine, shape: ModelSpec, vllm: Release) -> ModelSpec:
    """The model with the number formats of states that a line gives.

    Raises:
        SettingError: A format is unknown, or the kernels of the model do not have it.
    """
    mixer = shape.mixer
    conv, state = (_format(line, name) for name in (_CONV, _STATE))
    if mixer is None:
        return shape
    if isinstance(mixer, KimiDelta):
        if vllm.since[1] < _FIRST_KDA:
            state = "auto"
        elif state == "fp16":
            raise SettingError(
                f"--{_STATE}", "float16", "is not supported by Kimi delta attention; float32 or bfloat16"
            )
    own = mixer.state_dtype if state == "auto" else state
    return replace(shape, mixer=replace(mixer, conv_dtype=conv, state_dtype=own))


def _format(line: ServeLine, name: str) -> str:
    given = line.text(name, "auto")
    if given not in _FORMATS:
        raise SettingError(f"--{name}", given, f"must be one of {', '.join(_FORMATS)}")
    return _FORMATS[given]


def caching(line: ServeLine, shape: ModelSpec, vllm: Release, asked: bool) -> tuple[bool, int | None]:
    """Whether prefixes are cached, and of which blocks are a multiple where all their states are kept (``CacheSettings``).

    Args:
        asked: Whether the line, or the default of the release, caches prefixes.

    Raises:
        SettingError: vLLM refuses the mode or the size.
    """
    mode, size = line.text(_MODE, "none"), line.whole(_BLOCK)
    modes = ("all", "align", "none") if vllm.since[1] <= _LAST_ALL else ("align", "none")
    if mode not in modes:
        raise SettingError(f"--{_MODE}", mode, f"must be {', '.join(modes[:-1])} or none in this release")
    if size is not None and not asked and size != line.whole("max-model-len", shape.max_model_len):
        raise SettingError(f"--{_BLOCK}", size, "can only be set with --enable-prefix-caching")
    if not asked or shape.mixer is None:
        return asked, None
    minor, keeps_all = vllm.since[1], isinstance(shape.mixer, Mamba | Mamba2)
    if minor < _FIRST or (minor < _FIRST_ALIGNED and not keeps_all):
        return False, None
    by_default = minor <= _LAST_BY_DEFAULT and not (
        minor == _ALIGNED_WITH_DRAFTS and "speculative-config" in line.flags
    )
    if not keeps_all or not (mode == "all" or (mode == "none" and by_default)):
        return True, None
    chunk = shape.mixer.chunk if isinstance(shape.mixer, Mamba2) else _CHUNK_TOKENS
    return True, size or chunk


def require_simulated(shape: ModelSpec, own: ModelSpec, state_chunk_tokens: int | None) -> None:
    """Raise NotSimulated for states that a simulation lays out otherwise; ``own`` is the model without the line's formats."""
    if state_chunk_tokens is not None:
        raise NotSimulated(
            f"--{_MODE}", "all", "keeps states that are not simulated", f"--{_MODE} align, or a later release"
        )
    if shape.mixer is not None and own.mixer is not None and shape.mixer.state_bytes() != own.mixer.state_bytes():
        formats = "/".join(shape.mixer.state_dtypes("bf16"))
        raise NotSimulated(f"--{_STATE}", formats, "is not simulated: its blocks have other sizes")
