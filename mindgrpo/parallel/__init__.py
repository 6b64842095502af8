"""Describes parallel layouts: the device mesh with named axes, and the slice of each parameter that a rank holds.

Pure index arithmetic: it touches no tensors and does not communicate.
"""
