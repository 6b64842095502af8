"""Starts, finds, watches and ends processes: ranks, workers, engines, sandboxes, trackers.

`child.py` starts a program or a function of this package, `fork.py` forks this process and exchanges messages with it,
`job.py` finds the processes of a job, and `linux.py` asks the kernel. What the processes do is not known here.
"""
