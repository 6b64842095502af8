"""Computes with the tensors of pools between passes: `contract.py` declares how, for the host and for devices."""
