"""A `vllm serve` command line: parsed, checked, and converted to the settings of a replica."""
