"""Synthetic traces, and loads fitted to a trace."""
