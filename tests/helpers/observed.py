"""Observations of a residency as a whole, which a run reads in parts."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from fragmeter.sim.memory.prefix.residency import BlockResidency, Observed


def observed_ticks(
    residency: BlockResidency, ticks_of: Callable[[np.ndarray], np.ndarray] = np.asarray
) -> dict[str, Observed]:
    """``BlockResidency.observations`` in one part."""
    parts = [*residency.observations(ticks_of)]
    return {
        name: (np.concatenate([part[name][0] for part in parts]), np.concatenate([part[name][1] for part in parts]))
        for name in parts[0]
    }
