"""Leaps as single steps."""

from __future__ import annotations

import numpy as np

from fragmeter.sim.output import frames as pd


def expand(steps: pd.DataFrame) -> pd.DataFrame:
    """A steps table with a row per step: start, duration and tokens."""
    count = steps["iterations"].to_numpy()
    row = np.repeat(np.arange(len(count)), count)
    number = np.arange(len(row)) - np.repeat(np.cumsum(count) - count, count)
    pick = {name: steps[name].to_numpy()[row] for name in steps}
    later = np.maximum(number - 1, 0)
    duration = np.where(number == 0, pick["first_ticks"], pick["next_ticks"] + pick["slope_ticks"] * later)
    into = np.cumsum(duration) - duration
    first_into = into[np.cumsum(count) - count][row] if len(row) else into
    return pd.DataFrame(
        {
            "start_ticks": pick["start_ticks"] + into - first_into,
            "ticks": duration,
            "decodes": np.where(number == 0, pick["decodes"], pick["batch_size"]),
            "prefill_tokens": np.where(number == 0, pick["prefill_tokens"], 0),
        }
    )
