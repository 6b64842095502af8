"""Experiment trackers, each in a process of its own that follows the run's files; see docs/trackers.md."""
