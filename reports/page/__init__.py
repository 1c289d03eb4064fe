"""Pages: runs, sweeps, templates, pictures, tables for the terminal."""
