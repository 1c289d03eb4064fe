"""Conversion of bytes into rows: compression, lines, CSV, JSON, Parquet, pickles, checks."""
