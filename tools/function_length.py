"""The former name of parameters.py, for scripts outside of this repository that still call it."""

import sys

from tools.parameters import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
