"""Scores for completions. Refuses to turn a failure into a 0."""
