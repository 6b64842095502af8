"""Scores completions with built-in and user functions, in worker processes with deadlines.

`score.py` is the entry; `builtin/` holds the functions that come with the package, `workers/` the processes.
A failed function is counted and never becomes a reward of 0.
"""
