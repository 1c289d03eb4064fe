"""What a user asks for: settings of a replica, of a cluster and of its size over time, and what a run would not read of them."""
