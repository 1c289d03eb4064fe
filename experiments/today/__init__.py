"""Memory waste of today's models: three allocators over one run, and published figures beside the simulation."""
