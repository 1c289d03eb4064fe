"""Requests and where they come from: arrivals, contents, closed loops, sessions."""
