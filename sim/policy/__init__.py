"""Who runs next: one file a policy."""
