"""Shared by several commands: inputs, grids, parallel execution, stores that resume, console output."""
