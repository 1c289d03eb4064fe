"""The runbook on a machine without a network: ``python3 tools/offline/collect.py FOLDER``."""
