"""Settings of a replica as the SOSP'23 paper had it: with the step times that it measured, where they apply."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ...sim.config.settings import Settings, settings
from ...sim.cost import PaperCost
from ...sim.spec import gpu, model


def paper_settings(**fields: Any) -> Settings:
    """As ``settings``; the default cost is the paper's for its model and GPU in 16 bit, and the roofline for others."""
    chosen = settings(**fields)
    if chosen.cost is not None:
        return chosen
    fits = PaperCost.fits(model(chosen.model), gpu(chosen.gpu), chosen.tensor_parallel_size)
    return replace(chosen, cost="paper" if fits else "roofline")
