"""Asks a machine's devices before a run: driver, toolkit, versions, memory, communication, kernels.

host.py and versions.py need no MindSpore; transfers.py and kernels.py run on a rank.
"""
