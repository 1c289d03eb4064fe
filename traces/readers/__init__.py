"""Readers: convert a file of any supported format into a trace."""
