"""fragmeter in Python: ``fragmeter.simulate`` and what it returns."""
