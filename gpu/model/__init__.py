"""A transformer with a model's real shapes and random weights, over a paged KV pool."""
