"""Output files and folders, each written whole or not at all."""
