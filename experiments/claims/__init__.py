"""Claims of texts and of other systems, put to the test."""
