"""Scores completions with built-in and user functions, in worker processes with deadlines.

`score.py` is the entry, `executors.py` calls the functions; `builtin/` holds those that come with the package.
A failed function is counted and never becomes a reward of 0.
"""
