"""The device backend: separate device memory, and MindSpore's collectives on one or several hosts.

`backend.py` is shared by Ascend with HCCL and by the CPU with MCCL, where tests run it; `ascend.py` and `host_cpu.py`
hold the differences. The shared-memory backend is in cpu/.
"""
