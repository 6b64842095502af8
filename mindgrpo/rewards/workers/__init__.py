"""Worker processes that score, and what holds them. Refuses to know any reward by name."""
