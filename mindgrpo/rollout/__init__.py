"""Generates completions: token ids in, token ids with log-probs, finish reasons and the weights' version out.

`engine.py` is the protocol that steps and evaluations speak, `embedded/` the engine in the ranks' own graphs, `vllm/`
vLLM in processes of its own, and `noise.py` keys the noise by seed, step, sample and position.
Prompts come from data/, scores from rewards/; which samples make a step is grpo/'s.
"""
