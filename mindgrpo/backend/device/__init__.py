"""Ranks whose devices have memory of their own and meet through MindSpore's communication, on one host or several.

`backend.py` is the same code on Ascend with HCCL and on CPU with MCCL, where tests run it; host_cpu.py and
ascend.py are what the two differ in. Shared memory between ranks is in cpu/.
"""
