"""What every test module needs: the tests' own helpers can be imported by name."""

from __future__ import annotations

import sys
from pathlib import Path

# importlib mode puts no folder of tests on the path.
sys.path.insert(0, str(Path(__file__).parent))
