"""Whether a line captures CUDA graphs of whole decode steps: vLLM's ``CUDAGraphMode``, as far as a start-up check depends on it.

    cudagraph_mode of --compilation-config   else by --optimization-level: 0 NONE, 1 PIECEWISE, 2 and 3 FULL_AND_PIECEWISE
    mode of --compilation-config             without VLLM_COMPILE there are no piecewise graphs: FULL_AND_PIECEWISE becomes NONE,
                                             since 0.30 FULL_DECODE_ONLY

as ``VllmConfig.__post_init__`` and ``OPTIMIZATION_LEVEL_TO_CONFIG`` in the wheels of 0.20 to 0.33 say.
"""

from __future__ import annotations

from typing import Any

from ...sim.spec.releases import Release
from ...sim.types.errors import SettingError
from ...sim.types.user_files import json_value
from .line import ServeLine

#: Modes, and whether whole decode steps are captured in them.
_MODES = {"NONE": False, "PIECEWISE": False, "FULL": True, "FULL_DECODE_ONLY": True, "FULL_AND_PIECEWISE": True}
_LEVELS = {"0": "NONE", "1": "PIECEWISE"}
_DEFAULT, _PIECEWISE = "FULL_AND_PIECEWISE", ("PIECEWISE", "FULL_AND_PIECEWISE")
_COMPILES = (None, 3, "3", "VLLM_COMPILE")
#: Where graphs of whole decode steps stay without piecewise compilation.
_FIRST_KEPT = (0, 30)


def captures_decodes(line: ServeLine, release: Release) -> bool:
    """Whether whole decode steps are captured, unless ``--enforce-eager`` forbids graphs.

    Raises:
        SettingError: The line names no mode of vLLM.
    """
    config = _config(line)
    given = config.get("cudagraph_mode")
    chosen = _LEVELS.get(line.text("optimization-level", ""), _DEFAULT) if given is None else str(given).upper()
    if chosen not in _MODES:
        raise SettingError("--compilation-config.cudagraph_mode", given, f"one of {', '.join(_MODES)}")
    mode = config.get("mode", config.get("level"))
    if (mode.upper() if isinstance(mode, str) else mode) in _COMPILES or chosen not in _PIECEWISE:
        return _MODES[chosen]
    return _MODES[chosen] and release.since >= _FIRST_KEPT


def _config(line: ServeLine) -> dict[str, Any]:
    """The line's ``--compilation-config``; empty where it is a number, as up to 0.11."""
    text = line.text("compilation-config", "{}")
    try:
        found = json_value(text)
    except ValueError as error:
        raise SettingError("--compilation-config", text[:60], f"is not readable JSON ({error})") from None
    return found if isinstance(found, dict) else {}
