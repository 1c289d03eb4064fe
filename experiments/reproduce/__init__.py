"""Every figure that can be rerun: registry, runs, page, text."""
