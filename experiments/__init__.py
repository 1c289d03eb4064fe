"""Questions: the paper's figures, runs, the command line."""
