"""`mindgrpo doctor --device`: a list of checks of this machine's devices, up to one real training step, and its report.

What a device is asked stands in backend/probes/; here are the jobs that ask it on ranks, the example's first step and
what moves weights. A check that fails or does not end is a line of the report, and the next one is made.
"""
