"""Public traces, and how they are fetched."""
