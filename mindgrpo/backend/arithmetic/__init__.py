"""Optimizer-side computations on pool tensors between passes; `contract.py` declares them for host and devices."""
