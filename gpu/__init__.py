"""The same block tables on real hardware."""
