"""Trains as a configuration says: msrun ... main.py --config grpo_config.yaml [--key value ...].

`main.py eval --config ...` evaluates instead, as `python -m mindgrpo eval` does.
"""

from __future__ import annotations

import sys

from mindgrpo.cli.verbs import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] if sys.argv[1:2] == ["eval"] else ["train", *sys.argv[1:]]))
