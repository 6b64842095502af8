"""Runs environments that users write: their classes, and the processes in which many of them run at once.

`contract.py` checks what a class takes and returns, `pool.py` runs each environment in a process of its own. Turns,
token ids and prompts are in rollout/.
"""
