"""Says how settings are declared: once, in the room that reads them, with default, bounds and meaning.

A room's Section is part of the tree of the configuration, which config/ composes and reads from files.
"""
