"""Graphs of a rank's pipeline stage, their 1F1B schedule, gradient synchronisation and the optimizer."""
