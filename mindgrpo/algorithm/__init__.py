"""Computes what GRPO and its family need on host arrays: advantages, packing, losses, corrections, schedules.

Pure NumPy: no device, no communication, no configuration.
"""
