"""Calibration: measured operations of a device, and the models fitted to them."""
