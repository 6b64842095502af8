"""Computes what a model needs beside its collectives: the contract, MindSpore's own operations, C and fused kernels.

`contract.py` defines each kernel by MindSpore's own operations, whose cells are in `mindspore_ops.py` and
`mindspore_attention.py`; `native/` overrides them with C for CPUs, and `ascend.py` with fused operations of Ascend.
"""
