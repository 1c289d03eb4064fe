"""The engine of one replica: the loop, the executor of plans, and the replica built from settings."""
