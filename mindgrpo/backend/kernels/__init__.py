"""Computes what a model needs beside its collectives: the contract, MindSpore's own operations, C and fused kernels.

`contract.py` defines each kernel, `mindspore_ops.py` is the plain implementation, `native/` the one in C for CPUs and
`ascend.py` the one in fused operations of Ascend.
"""
