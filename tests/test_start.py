"""Start of processes: modules that only compiled code needs are not imported."""

from __future__ import annotations

import subprocess
import sys


def test_dlp_does_not_import_dynamo():
    """Importing dlp and launch.train imports neither torch._dynamo nor torch._inductor, which would take more than a
    second."""
    told = "import sys, dlp, launch.train; print(sorted({'torch._dynamo', 'torch._inductor'} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", told], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
