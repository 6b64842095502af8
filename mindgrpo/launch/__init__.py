"""Starts the ranks of a job on this host, shows what the first one prints, and ends them all.

`options.py` checks the command line, `plan.py` decides on processes and environments, `launcher.py` runs one start and
starts again where that is allowed; `worker.py` and `fork_server.py` are what it starts. The launcher itself imports
nothing but the standard library and `health`.
"""
