"""`tests/` is on the path, so that test modules may import one another's helpers."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
