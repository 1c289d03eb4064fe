"""A `vllm serve` command line: read, checked, and turned into a replica."""
