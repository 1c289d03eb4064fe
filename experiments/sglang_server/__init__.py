"""A line that starts SGLang's server."""
