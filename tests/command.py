"""Run `python -m MODULE` inside this process, because a new process needs five seconds to import torch and dlp."""

from __future__ import annotations

import io
import runpy
import sys
import warnings
from contextlib import redirect_stderr, redirect_stdout
from typing import NamedTuple
from unittest.mock import patch


class Done(NamedTuple):
    code: int
    out: str
    err: str


def command(module: str, *arguments: str) -> Done:
    """Run `python -m module arguments` in this process; return the exit code and the output. The module is executed as
    __main__, and finds its imports already loaded (test_imports.py imports each program before any other module of launch
    and bench)."""
    out, err, code = io.StringIO(), io.StringIO(), 0
    with (
        patch.object(sys, "argv", [module, *arguments]), redirect_stdout(out), redirect_stderr(err),
        warnings.catch_warnings(),
    ):  # fmt: skip
        warnings.filterwarnings("ignore", "'.*' found in sys.modules after import of", RuntimeWarning)  # from runpy
        # torchrun warns that this stderr is not a file
        warnings.filterwarnings("ignore", "Unable to enable fault handler", UserWarning)
        try:
            runpy.run_module(module, run_name="__main__", alter_sys=True)
        except SystemExit as left:  # the exit code is what the interpreter would return
            code = left.code if isinstance(left.code, int) else int(left.code is not None)
            err.write(f"{left.code}\n" if isinstance(left.code, str) else "")
    return Done(code, out.getvalue(), err.getvalue())
