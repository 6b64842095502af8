"""Starts the ranks of a job on this host: the process that forks them, and the process that each of them is.

Imports nothing but the standard library until a rank does. Refuses to know what the program that it starts does.
"""
