"""Claims of texts and of other systems, put to the test: ``python -m tools.claims``."""
