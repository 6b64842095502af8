"""Implements the built-in generator: continuous batching, prompts shared by their group, sampling in the graph.

`engine.py` is the entry, `kv_cache.py` sizes the cache, `sampling.py` defines how a token is drawn.
"""
