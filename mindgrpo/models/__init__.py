"""Builds the decoder of a model family, for one rank of any layout, as MindSpore cells over the kernel contract.

`families.py` declares the families, `decoder.py` the block, and `pipeline.py` runs a stage forward for log-probs.
Weights on disk are in weights/, kernels in backend/.
"""
