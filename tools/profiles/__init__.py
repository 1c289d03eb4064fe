"""Fits of the profiles in ``sim/cost/profiles`` to published tables."""
