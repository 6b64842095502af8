"""Asks a machine's devices before a run: driver, toolkit, versions, memory, communication, kernels.

The files that read what tools print or installations leave are pure and need no MindSpore (smi.py, toolkit.py,
matrix.py); host.py calls the tools; communication.py and kernel_pairs.py run on a rank.
"""
