"""The command line: one module a command, and the flags that commands share."""
