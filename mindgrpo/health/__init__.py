"""Says where each rank of a job is, which one the others wait for, and which one failed first.

Ranks write small files into the job's status folder (heartbeats, failures), which outlive them; a thread of each rank
warns of a phase that takes too long. Nothing here ends another process: the launcher does.
"""
