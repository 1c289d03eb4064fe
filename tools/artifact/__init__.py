"""The artifact of a release: one archive that makes every figure of the paper again on a clean machine.

``python -m tools.artifact`` writes the archive, ``run.sh`` in it makes the figures, and ``differences`` compares them with docs/results.
"""
