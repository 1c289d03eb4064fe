"""Contiguous KV memory: arenas and reservations."""
