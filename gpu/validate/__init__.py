"""Measured steps beside predicted ones."""
