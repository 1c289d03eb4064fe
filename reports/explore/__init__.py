"""A page with sliders over a grid of finished runs."""
