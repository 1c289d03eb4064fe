"""The PagedAttention paper: its measurements and its published values."""
