"""Writes a run's output: metrics, completions, reward curve, console lines, trackers, traces, memory of the host.

It receives metrics and never changes a computation. grpo/ and run/ decide what is reported.
"""
