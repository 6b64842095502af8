"""Computes what a run takes before it starts: layouts, device and host memory by phase, traffic, and what fits.

Follows from the configuration and the model's shapes: nothing is loaded and no device is needed. The run's own roles
are constructed on a backend that only counts (`count.py`); what graphs hold beside them is computed (`activations.py`).
`run_plan.py` is what the trainer is built from; `python -m mindgrpo plan` prints all of it.
"""
