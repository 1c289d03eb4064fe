"""When requests come: traced, drawn, or along a rate."""
