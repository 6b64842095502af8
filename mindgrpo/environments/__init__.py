"""Environments that users write: their classes, and the processes in which many of them run at once.

`pool.py` is the rank's side, `host.py` the worker that forks a process for each environment, `episode.py` that process.
Turns, token ids and prompts are rollout/.
"""
