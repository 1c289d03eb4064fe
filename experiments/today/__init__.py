"""Memory waste of today's models: three allocators over one run."""
