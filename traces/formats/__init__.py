"""Traces as they are found: a module for each kind of file, with its names, its units and where that is from."""
