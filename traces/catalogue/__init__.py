"""Catalogue of public traces, and their download."""
