"""Types that everything needs: time, errors, sequences, the plan of a step."""
