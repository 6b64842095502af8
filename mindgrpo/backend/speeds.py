"""Hardware constants of the roofline model in plan/: peak rates, bandwidths and latencies of each device.

Each is the default of the `context.roofline` key of the same name. They are published figures where available, else
estimates within a factor of two until measured on the device.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from mindgrpo.backend.targets import Target


@dataclass(frozen=True)
class Speeds:
    """Constants of one device, or of a whole host if its ranks share `cores`. Roofline in config/ documents them."""

    matmul_tflops: float
    float32_tflops: float
    matmul_share: float
    memory_GB_per_s: float
    memory_share: float
    link_GB_per_s: float
    host_link_GB_per_s: float
    link_share: float
    host_copy_GB_per_s: float
    launch_us: float
    call_us: float
    collective_us: float
    sync_us: float
    slow_ns: float
    compile_ms: float
    devices_per_host: int
    cores: int = 0


# Peaks: cores x clock x 8,192 operations a cycle, from CANN's platform_config (Ascend910B2C.ini: 24 at 1.8 GHz;
# Ascend910A.ini: 32 at 1 GHz; the 910B3 has 20). Memory: 1.6 and 1.2 TB/s of HBM, eight devices a host, each joined to
# every other by 56 GB/s (910A: to three by 30 GB/s), and a port of 200 Gb/s (910A: 100), from Huawei's pages of the
# Atlas 800T A2 and 800-9000. GEMMs reach half of the peak and links 60 % in published runs of models of this size.
# Launches, calls, waits, the AI CPU and compilation are estimates.
_910B2 = Speeds(
    matmul_tflops=354.0,
    float32_tflops=88.0,
    matmul_share=0.5,
    memory_GB_per_s=1600.0,
    memory_share=1.0,
    link_GB_per_s=56.0,
    host_link_GB_per_s=25.0,
    link_share=0.6,
    host_copy_GB_per_s=25.0,
    launch_us=10.0,
    call_us=100.0,
    collective_us=15.0,
    sync_us=300.0,
    slow_ns=1.0,
    compile_ms=30.0,
    devices_per_host=8,
)
SPEEDS = {
    "910B2": _910B2,
    "910B3": replace(_910B2, matmul_tflops=295.0, float32_tflops=74.0),
    "910A": replace(
        _910B2,
        matmul_tflops=262.0,
        float32_tflops=65.0,
        memory_GB_per_s=1200.0,
        link_GB_per_s=30.0,
        host_link_GB_per_s=12.5,
    ),
    # Two cores of an AMD EPYC server, fitted to steps of three models (scripts/bench/roofline.py, docs/plan.md).
    "host": Speeds(
        matmul_tflops=0.18,
        float32_tflops=0.18,
        matmul_share=0.9,
        memory_GB_per_s=26.0,
        memory_share=0.7,
        link_GB_per_s=13.0,
        host_link_GB_per_s=1.0,
        link_share=1.0,
        host_copy_GB_per_s=13.0,
        launch_us=15.0,
        call_us=100.0,
        collective_us=100.0,
        sync_us=100.0,
        slow_ns=5.0,
        compile_ms=8.0,
        devices_per_host=1024,
        cores=2,
    ),
}


def device_of(target: Target) -> str:
    """Returns the key of SPEEDS that estimates use by default."""
    return "host" if target.keeps_weights_on_host else "910B2"
