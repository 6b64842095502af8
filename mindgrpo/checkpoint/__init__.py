"""A run's state on disk, whole or not at all, and back into any layout. Refuses to say when it is saved."""
