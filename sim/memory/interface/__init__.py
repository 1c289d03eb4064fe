"""What an engine, a policy, a cluster, a recording or a metric may ask of a memory."""
