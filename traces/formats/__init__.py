"""Trace file formats: one module per format, with its field names, units and source."""
