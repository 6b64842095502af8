"""Checks this machine's devices on a ladder, up to one real training step, and reports: `mindgrpo doctor --device`."""
