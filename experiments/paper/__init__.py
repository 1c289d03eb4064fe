"""The PagedAttention paper: its measurements, and what was published."""
