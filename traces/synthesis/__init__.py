"""Drawn traces, and loads that are fitted to a trace."""
