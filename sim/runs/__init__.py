"""What a run leaves: its log and what follows from it, the replica in its final state, the run, and the run of a cluster."""
