"""Moves weights from one layout to another through memory."""
