"""Worker processes that score, with deadlines and memory limits.

`executor.py` is the rank's side of a function's workers; `worker.py` is the worker and the supervisor that ends it,
`isolated.py` its scoring of samples apart. No reward is known here by name.
"""
