"""Metrics of a finished run: summary, latencies, gaps, residencies, waste."""
