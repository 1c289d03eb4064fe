"""A grid of finished runs for a page with sliders."""
