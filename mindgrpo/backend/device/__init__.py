"""Ranks whose devices have memory of their own and meet through MindSpore's communication, on one host or several.

`backend.py` is the same code on Ascend with HCCL and on CPU with MCCL, where tests run it; hardware.py says what the
two differ in, and ascend.py is all that only an NPU can prove. Shared memory between ranks is in cpu/.
"""
