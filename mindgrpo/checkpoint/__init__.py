"""Saves and restores a run's state: weights, optimizer, counters and data position, atomically, for any layout.

Files are safetensors with a JSON manifest. When a run is saved is decided in run/; model directories are in weights/.
"""
