"""Types that all of ``sim`` uses: time, errors, sequences, and the plan of a step."""
