"""Worker processes that score, with deadlines and memory limits.

`executor.py` is the entry: the worker executor of one function; `pool.py` is the rank's side of a worker, `worker.py`
and `isolated.py` the worker's, and `supervisor.py` forks and ends workers. No reward is known here by name.
"""
