"""Benchmark clients: what each one's result says of the requests that it sent. One module a client."""
