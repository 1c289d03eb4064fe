"""Execution of the simulator's block tables on real hardware."""
