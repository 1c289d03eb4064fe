"""From bytes to rows: compression, lines, CSV, JSON, Parquet, pickles, checks."""
