"""Sweeps, searches and paired comparisons."""
