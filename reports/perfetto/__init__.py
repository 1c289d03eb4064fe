"""Runs as timelines for ui.perfetto.dev."""
