"""Let the tests of this folder import `reference` and `zoo` beside them."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
