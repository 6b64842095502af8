"""The embedded generator: prompts in, token ids with log-probs and finish reasons out."""
