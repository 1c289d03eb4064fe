"""What a line says of CUDA graphs: flags, ``--compilation-config`` and the level of optimization.

Up to 0.11 a whole number as ``--compilation-config`` is the level, and so is ``-O``.
"""

from __future__ import annotations

from typing import Any

from ...sim.spec.releases import Release
from ...sim.spec.startup.cuda_graphs import GraphSettings, graph_mode
from ...sim.types.bounds import human_readable_int
from ...sim.types.errors import SettingError
from .line import ServeLine

_CONFIG = "compilation-config"
_COMPILES = (3, "3", "VLLM_COMPILE")
_LEVELS = range(4)
#: Releases up to this one read the sizes with one flag, of which one number is the largest.
_LAST_LIST = 11


def graph_settings(line: ServeLine, release: Release) -> GraphSettings:
    """The settings of a line.

    Raises:
        SettingError: A value is not one that vLLM takes.
    """
    config, level = _config(line)
    given = _sizes(line, "cudagraph-capture-sizes", config.get("cudagraph_capture_sizes"))
    largest = line.whole("max-cudagraph-capture-size", _number(config, "max_cudagraph_capture_size"))
    older = _sizes(line, "cuda-graph-sizes", None)
    if older is not None and len(older) == 1 and release.since[1] <= _LAST_LIST:
        largest = older[0]
    elif older is not None:
        given = older
    compiled = config.get("mode", config.get("level"))
    return GraphSettings(
        mode=graph_mode(config.get("cudagraph_mode"), f"--{_CONFIG}.cudagraph_mode"),
        level=level,
        compiled=None
        if compiled is None
        else (compiled.upper() if isinstance(compiled, str) else compiled) in _COMPILES,
        sizes=given,
        largest=largest,
        interactive=line.text("performance-mode", "") == "interactivity",
        enforce_eager=line.switch("enforce-eager"),
        lora=line.switch("enable-lora"),
        custom_all_reduce=not line.switch("disable-custom-all-reduce"),
    )


def _config(line: ServeLine) -> tuple[dict[str, Any], int | None]:
    """The line's ``--compilation-config``, and its level of optimization."""
    found = line.json_of(_CONFIG)
    level = line.text("optimization-level", "")
    if level and (not level.isdecimal() or int(level) not in _LEVELS):
        raise SettingError("--optimization-level", level, "must be from 0 to 3")
    number = int(level) if level else None
    if isinstance(found, int) and found in _LEVELS and number is None:
        number = int(found)
    return (found if isinstance(found, dict) else {}), number


def _sizes(line: ServeLine, flag: str, configured: object) -> tuple[int, ...] | None:
    if flag in line.flags:
        configured = [human_readable_int(each) or each for each in line.text(flag, "").split()]
    if configured is None:
        return None
    whole = isinstance(configured, list) and all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in configured
    )
    if not isinstance(configured, list) or not whole:
        raise SettingError(f"--{flag}", str(configured)[:60], "must be whole numbers of at least 1")
    return tuple(configured)


def _number(config: dict[str, Any], key: str) -> int | None:
    value = config.get(key)
    if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
        raise SettingError(f"--{_CONFIG}.{key}", value, "must be a whole number of at least 1")
    return value
