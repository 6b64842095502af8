"""Environments that users write: their classes, and the processes in which many of them run at once.

`pool.py` is the rank's side, `episode.py` what runs in the process of each environment. Turns, token ids and prompts
are rollout/.
"""
