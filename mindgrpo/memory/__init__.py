"""Owns where each role's tensors are: on the device, on the host, or released.

Phases of a step activate the pools they need, within the budget of context.max_device_memory.
"""
