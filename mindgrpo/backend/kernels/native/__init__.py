"""Binds the C kernels of this folder to MindSpore graphs.

`library.py` compiles them once for this machine, `kernels.py` and `rollout.py` wrap them as cells.
"""
