"""Paged KV memory: blocks, block tables, sharing, windows, caches."""
