"""A trace in memory."""
