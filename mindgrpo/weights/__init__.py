"""Reads and writes model weights: safetensors, MindSpore's .ckpt, names of Hugging Face and MindFormers.

`local_weights.py` holds one rank's tensors, `pretrained.py` fills them. Checkpoints of a run are in checkpoint/.
"""
