"""A real server or device beside its simulation."""
