"""Layers of pipeline stages."""

from __future__ import annotations

from ..types.errors import SettingError


def stages(num_layers: int, pipeline_parallel: int = 1) -> list[range]:
    """The layers of each stage, as vLLM's ``get_pp_indices`` divides them (0.6.4 and later).

    If the number of stages does not divide the layers, the remaining layers go one each to the stages
    from the last but one backwards, because the last stage has the output head. 61 layers on 4 stages: 15,
    15, 16, 15.

    Raises:
        SettingError: A stage would be empty.
    """
    if not 1 <= pipeline_parallel <= num_layers:
        raise SettingError("pipeline_parallel", pipeline_parallel, f"must be from 1 to the {num_layers} layers")
    each, left = divmod(num_layers, pipeline_parallel)
    longer = range(pipeline_parallel - 1 - left, pipeline_parallel - 1)
    found, start = [], 0
    for stage in range(pipeline_parallel):
        end = start + each + (stage in longer)
        found.append(range(start, end))
        start = end
    return found
