"""Generates completions: token ids in, token ids with log-probs and finish reasons out.

`embedded/` is the built-in engine with its KV cache; `noise.py` keys the noise by seed, step, sample and position.
Prompts come from data/, scores from rewards/.
"""
