"""Records runs with experiment trackers, each in its own process that follows the run's files (docs/trackers.md)."""
