"""Moves weights from one layout to another through memory, bit for bit: policy to generator and reference.

`plan.py` computes who sends what to whom (pure), `execute.py` moves it, `transfer.py` compares checksums of both sides.
Nothing passes over the disk.
"""
