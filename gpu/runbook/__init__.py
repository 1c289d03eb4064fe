"""The whole GPU day in one command."""
