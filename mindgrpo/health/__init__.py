"""Which rank is where: what each says of itself while it lives, and what is made of it when one is gone.

Light enough for the launcher, which imports neither a device library nor numpy. Refuses to end another process.
"""
