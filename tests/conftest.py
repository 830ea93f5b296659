"""Shared by all tests; `tests/` is on the path, so test modules may import one another's helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
