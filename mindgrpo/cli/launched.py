"""Runs the verb that sys.argv begins with, on a rank of `mindgrpo launch --ranks N -- VERB ...`."""

import sys

from mindgrpo.cli.verbs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv))
