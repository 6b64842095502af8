"""Writes what a run reports: metrics, completions, reward curve, console lines, traces, memory of the host.

It receives figures and never changes what is computed. What is worth reporting is decided in grpo/ and run/.
"""
