"""Computes what GRPO and its family need on host arrays: advantages, packing, losses, corrections, schedules.

`sample.py` has the rollout and the batch made from it (`train_batch.py`), `packing.py` puts them into rows.
Pure NumPy: no device, no communication, no configuration.
"""
