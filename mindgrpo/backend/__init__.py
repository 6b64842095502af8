"""Holds everything that knows a device: communication between ranks, device memory, graphs and kernels.

`contract.py` says what the rest of the package may ask for; `cpu/` and `device/` implement it, `kernels/` computes.
Models, samples and phases of a step are not known here.
"""
