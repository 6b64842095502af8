"""Runs environments that users write: their classes, and the processes in which many of them run at once.

`contract.py` checks what a class takes and returns, `packages.py` has those of other packages, `mixture.py` says which
of several a row meets, and `pool.py` runs each environment in a process of its own. Turns, token ids and prompts are in
rollout/.
"""
