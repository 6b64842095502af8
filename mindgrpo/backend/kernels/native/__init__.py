"""Python bindings of the C kernels in this folder.

`library.py` compiles and loads them; `kernels.py`, `attention.py` and `experts.py` wrap them as cells for graphs, and
`rollout.py` calls those that decode.
"""
