"""The GPU day: all GPU checks and measurements in one command."""
