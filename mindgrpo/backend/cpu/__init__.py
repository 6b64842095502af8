"""Implements the backend for ranks on CPUs of one host: groups, links and pools in shared memory."""
