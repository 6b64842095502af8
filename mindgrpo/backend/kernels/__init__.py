"""All computations of a model except collectives: the kernels' interface, and plain, C and fused implementations.

`contract.py` defines each kernel in plain MindSpore operations, whose cells are in `mindspore_ops.py`,
`mindspore_experts.py` and `mindspore_attention.py`; `native/` overrides them with C kernels for CPUs, and `ascend.py`
with fused operations of Ascend.
"""
