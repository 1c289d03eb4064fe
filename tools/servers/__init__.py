"""Runs of real servers beside their simulation: ``python -m tools.servers``."""
