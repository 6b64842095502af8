"""Trains as a configuration says: msrun ... main.py --config grpo_config.yaml [--key value ...]."""

from __future__ import annotations

import sys

from mindgrpo.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
