"""Compile the CUDA kernels before the first use.

    python -m dlp.kernels.build                                  for this machine's GPU
    python -m dlp.kernels.build --compile-only sm_90a sm_100a    check, without optimization, that the sources compile

The exit status is 2 if a program, package or GPU is missing or has an unsupported version, which the message names, and 1 for
other failures, for example if the sources do not compile. The module is stored in ~/.cache/dlp, or in the folder that the
environment variable DLP_CACHE names.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from dlp.kernels import loader


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m dlp.kernels.build", description="Compile the CUDA kernels.")
    parser.add_argument("--compile-only", nargs="+", metavar="ARCH", choices=list(loader.ARCHITECTURES.values()),
                        help="compile for these architectures, with or without a GPU, and load nothing")  # fmt: skip
    options = parser.parse_args(arguments)
    try:
        if options.compile_only is None:
            print(loader.load().__file__)
        else:
            loader.compile_module(loader.find_toolchain(), options.compile_only, loader.CHECK)
            count = sum(file.suffix == ".cu" for file in loader.sources())
            print(f"compiled {count} files for {' '.join(options.compile_only)}")
    except loader.BuildError as error:
        return loader.explain(error)
    return 0


if __name__ == "__main__":
    sys.exit(main())
