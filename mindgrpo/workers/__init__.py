"""Serves users' code in worker processes, with deadlines and memory limits.

`client.py` is the rank's side, `worker.py` the worker and the supervisor that ends it, `forked.py` the processes that a
worker forks, and `protocol.py` what crosses between them. Rewards, tools and environments are not known here.
"""
