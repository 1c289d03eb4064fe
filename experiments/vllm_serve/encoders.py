"""The encoder of images that a line leaves out, by ``--language-model-only`` or ``--limit-mm-per-prompt``.

vLLM leaves a tower out where the limits of all that it takes are 0 (``SupportsMultiModal._mark_tower_model``). A limit that is not given is
no limit.
"""

from __future__ import annotations

from dataclasses import replace

from ...sim.spec import ModelSpec
from ...sim.types.errors import SettingError
from .line import ServeLine

LIMITS = "limit-mm-per-prompt"
#: Model types with an encoder of images and none of videos (``get_supported_mm_limits``).
_IMAGES_ALONE = ("gemma3", "mistral3", "pixtral", "llama4")
_PAIR = "="


def without_encoder(line: ServeLine, shape: ModelSpec) -> ModelSpec:
    """The model as the line loads it.

    Raises:
        SettingError: The limits are not readable.
    """
    if _is_text_only(line, shape):
        return replace(shape, encoder=None, file_weights=None)
    encoder = shape.encoder
    if encoder is None or encoder.item is None or "video" not in _left_out(line):
        return shape
    return replace(shape, encoder=replace(encoder, item=replace(encoder.item, video=None)))


def uncounted_limits(line: ServeLine, shape: ModelSpec) -> str | None:
    """The flag and why its memory is not counted; None if it is."""
    if LIMITS not in line.flags or shape.encoder is None or _is_text_only(line, shape):
        return None
    return f"--{LIMITS} (an encoder takes memory)"


def _is_text_only(line: ServeLine, shape: ModelSpec) -> bool:
    if line.switch("language-model-only"):
        return True
    none = _left_out(line)
    return "image" in none and ("video" in none or shape.model_type in _IMAGES_ALONE)


def _left_out(line: ServeLine) -> set[str]:
    return {name for name, limit in _limits(line).items() if limit in (0, {"count": 0})}


def _limits(line: ServeLine) -> dict[str, object]:
    """The limit of each kind of item; ``image=1,video=0`` is the form of releases before 0.9."""
    text = line.text(LIMITS, "{}")
    if _PAIR in text and not text.startswith("{"):
        pairs = (pair.partition(_PAIR) for pair in text.split(","))
        return {name: int(limit) if limit.isdecimal() else limit for name, _, limit in pairs}
    found = line.json_of(LIMITS)
    if not isinstance(found, dict):
        raise SettingError(f"--{LIMITS}", text[:60], 'must be an object, as {"image": 0, "video": 0}')
    return found
