"""Mutants of the code that buys GPUs and counts memory: are they noticed by the nearest tests?

`operators` finds the mutants of a module, `draw` takes some of all by a seed, `trial` runs the tests beside one of them.
By hand: `python -m mutants --seed 50` in `tests`.
"""
