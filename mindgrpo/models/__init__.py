"""The decoder, its families, and its weights on disk."""
