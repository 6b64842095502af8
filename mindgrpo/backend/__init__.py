"""All device-specific code: communication between ranks, device memory, compiled graphs and kernels.

`contract.py` declares the interface, `cpu/` and `device/` implement it, and `kernels/` holds the computations. Nothing
here depends on models, samples or the phases of a training step.
"""
