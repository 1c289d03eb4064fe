"""``fragmeter diagnose``: why a server preempts or is slow, and the flags that change it, each by simulation."""
