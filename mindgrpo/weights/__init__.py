"""Weights on one rank and in model files: the arrays that a role computes with, readers and a writer.

Entry points: `local_weights.Weights`, `pretrained.load_weights`, `pretrained.open_weights` (safetensors or MindSpore's
.ckpt, Hugging Face's or MindFormers' names), `model_files.SafetensorsWriter`, `checksum.PartSums`. Run state is in
`checkpoint`, moving weights between ranks in `weight_sync`.
"""
