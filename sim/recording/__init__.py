"""Recordings of a run: its block tables step by step, and the holder of every block over time."""
