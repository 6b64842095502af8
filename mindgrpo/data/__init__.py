"""From a user's rows to encoded prompts. Refuses to shorten, skip or reorder a row in silence."""
