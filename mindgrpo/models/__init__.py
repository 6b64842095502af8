"""The decoder of all model families, as MindSpore cells for one rank of any parallel layout, built on backend kernels.

`families.py` declares the families, `decoder.py` defines the decoder block, and `pipeline.py` runs a pipeline stage
forward to compute log-probs. Loading and saving weights is in weights/, kernels are in backend/.
"""
