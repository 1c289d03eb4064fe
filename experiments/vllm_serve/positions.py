"""The longest sequence of a model with the rotary positions that a line gives (``_get_and_verify_max_len`` of vLLM's ``config/model.py``).

yarn              factor x ``original_max_position_embeddings`` up to 0.29 (the wheel of 0.28; that of 0.29 was not read); since 0.30
                  ``max_position_embeddings``, which is taken to be scaled
longrope, llama3  ``max_position_embeddings``
others            factor x ``max_position_embeddings``
"""

from __future__ import annotations

from dataclasses import replace

from ...sim.spec import ModelSpec
from ...sim.spec.releases import Release
from ...sim.types.errors import SettingError
from .line import ServeLine

_OVERRIDES, _SCALING = "hf-overrides", "rope-scaling"
_POSITIONS = "max_position_embeddings"
_READ = {_POSITIONS, "rope_scaling", "rope_parameters", "rope_theta"}
_YARN = ("yarn", "deepseek_yarn")
_UNSCALED = ("su", "longrope", "llama3", "deepseek_llama_scaling")
_FIRST_SCALED = 30


def with_positions(line: ServeLine, shape: ModelSpec, vllm: Release) -> tuple[ServeLine, ModelSpec]:
    """The model with the longest sequence of the line, and the line without the flags that say nothing else.

    Raises:
        SettingError: A flag is no JSON object, or a number in it is none.
    """
    given = {name: _object(line, name) for name in (_OVERRIDES, _SCALING) if name in line.flags}
    overrides = given.get(_OVERRIDES, {})
    inner = overrides.get("text_config")
    keys = overrides | inner if isinstance(inner, dict) else overrides
    scaling = given.get(_SCALING) or keys.get("rope_scaling") or keys.get("rope_parameters")
    if _POSITIONS not in keys and not isinstance(scaling, dict):
        return line, shape
    longest = _number(keys, _POSITIONS, shape.max_model_len)
    if isinstance(scaling, dict):
        kind, factor = scaling.get("rope_type", scaling.get("type")), _number(scaling, "factor", 1)
        if kind in _YARN:
            if vllm.since[1] < _FIRST_SCALED:
                longest = factor * _number(scaling, "original_max_position_embeddings", longest)
        elif kind not in _UNSCALED:
            longest = factor * longest
    counted = [f"--{name} " for name in given if name == _SCALING or keys.keys() - {"text_config"} <= _READ]
    line = replace(
        line, not_simulated=_without(line.not_simulated, counted), uncounted=_without(line.uncounted, counted)
    )
    return line, replace(shape, max_model_len=int(longest))


def _without(texts: list[str], flags: list[str]) -> list[str]:
    return [text for text in texts if not text.startswith(tuple(flags))] if flags else texts


def _object(line: ServeLine, name: str) -> dict[str, object]:
    found = line.json_of(name)
    if not isinstance(found, dict):
        raise SettingError(f"--{name}", line.text(name, "")[:60], "must be a JSON object")
    return found


def _number(keys: dict[str, object], key: str, default: float) -> float:
    found = keys.get(key, default)
    if isinstance(found, bool) or not isinstance(found, int | float) or not 0 < found <= 2**40:
        raise SettingError(key, found, "must be a number above 0")
    return found
