"""Statistics of a trace."""
