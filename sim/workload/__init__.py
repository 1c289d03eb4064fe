"""Requests and their sources: arrivals, prompt contents, closed loops, sessions."""
