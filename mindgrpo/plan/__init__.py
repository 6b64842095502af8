"""Computes what a run takes before it starts: layouts, device and host memory by phase, traffic, and what fits.

Pure functions of the configuration and the model's shapes: nothing is loaded and no device is needed. `run_plan.py` is
what the trainer is built from; `python -m mindgrpo plan` prints all of it.
"""
