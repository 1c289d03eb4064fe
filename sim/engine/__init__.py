"""The engine of one replica: the loop, what a step changes, and how settings become a replica."""
