"""Recordings of a run: what block tables do step by step, and what every block holds over time."""
