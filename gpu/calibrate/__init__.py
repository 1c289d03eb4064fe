"""Measured operations of a device, and the models that are fitted to them."""
