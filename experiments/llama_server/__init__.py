"""A ``llama-server`` line: its slots, its cache, and whether it fits a GPU."""
