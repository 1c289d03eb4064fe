"""Comparison of measured steps with predicted ones."""
