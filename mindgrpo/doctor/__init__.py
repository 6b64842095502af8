"""Checks this machine's devices, up to one real training step, and reports: `mindgrpo doctor --device`.

probes/ asks the devices; here are the jobs that ask them on ranks, the example's first step and the report. A check
that fails or does not end is a line of the report, and the next one is made.
"""
