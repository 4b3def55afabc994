from __future__ import annotations

import subprocess
import sys


def test_the_coordinator_starts_without_torch():
    script = "import sys; sys.modules['torch'] = None; import piped.coordinator.server; assert not sys.modules['torch']"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
