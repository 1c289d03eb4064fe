"""fragmeter in Python: ``fragmeter.simulate`` and its result."""
