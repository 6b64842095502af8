"""Implements the backend on MindSpore's communication and device memory."""
