"""Asks a machine's devices before a run: host.py needs no MindSpore, the others run on a rank."""
