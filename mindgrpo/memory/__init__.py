"""Moves each role's memory pools between device and host.

Each phase of a step activates the pools that it needs, within the budget of context.max_device_memory.
"""
