"""vLLM as a RolloutEngine, in processes of its own: their environment and, later, the processes themselves.

`environment.py` finds the interpreter that has vLLM and says what a process of it inherits, `install.py` makes one from
the lock file. Nothing here imports vLLM or torch, whose requirements exclude MindSpore's, and the adapter that speaks
to the processes is not here yet.
"""
