"""Capacity plans: candidates, highest rates, objectives, prices."""
