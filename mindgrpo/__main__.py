"""Runs `python -m mindgrpo VERB ...`."""

import sys

from mindgrpo.cli.verbs import main

if __name__ == "__main__":
    sys.exit(main())
