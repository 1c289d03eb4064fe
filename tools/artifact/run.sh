#!/bin/sh
# Makes every figure of the paper and the tests of claims, and prints where they differ from docs/results. Python 3.11 or later and, for the
# packages alone, an index of packages are needed. PYTHON names another interpreter.
set -e
cd "$(dirname "$0")/../.."
"${PYTHON:-python3}" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check --requirement requirements.lock
.venv/bin/python -m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation --editable .
mkdir -p out
.venv/bin/fragmeter reproduce all --out out/reproduction > out/reproduction.txt
.venv/bin/python docs/reproduction.py out/reproduction out/reproduction.md
cp docs/results/claims.md out/claims.md
.venv/bin/python -m tools.claims --markdown out/claims.md > out/claims.txt
.venv/bin/python -m tools.artifact.differences out/reproduction.md out/claims.md > out/differences.md || status=$?
cat out/differences.md
exit "${status:-0}"
