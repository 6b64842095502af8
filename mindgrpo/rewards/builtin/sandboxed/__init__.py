"""What runs inside a sandbox, started by the folder's path: a completion's program, and the judge of its assertions.

Each process gets one order and knows nothing of the other but two pipes. Imports nothing of mindgrpo.
"""
