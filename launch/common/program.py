"""Start the programs of `launch`: errors in the input end a program with one sentence."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence


def run_program(main: Callable[[Sequence[str]], None]) -> None:
    """Call `main` with the arguments of the command line. After a ValueError or OSError, print its message to stderr and exit
    with code 1."""
    try:
        main(sys.argv[1:])
    except (ValueError, OSError) as error:
        sys.exit(str(error))
