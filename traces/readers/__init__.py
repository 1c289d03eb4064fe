"""From a file, whatever it is, to a trace."""
