"""Stand-ins for what an NPU host has: npu-smi's tables in the forms of three generations, CANN's folder, device files.

The tables are as public pages and issue threads show them, with other numbers.
"""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

RULE = "+---------------------------+---------------+----------------------------------------------------+"
HEAVY = RULE.replace("-", "=")
PROCESSES = "| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |"


def idle(npu: int) -> str:
    return f"| {f'No running processes found in NPU {npu}':<94} |"


def held(npu: int, chip: int, pid: int, name: str, mib: int) -> str:
    return f"| {npu:<7} {chip:<17} | {pid:<13} | {name:<24} | {mib:<23} |"


def table(version: str, chips: list[str], processes: list[str]) -> str:
    head = [
        RULE.replace("+-", "--")[:-1],
        f"| npu-smi {version:<24} Version: {version:<51} |",
        RULE,
        "| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|",
        "| Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |",
        HEAVY,
    ]
    return "\n".join([*head, *chips, RULE, PROCESSES, HEAVY, *processes, HEAVY]) + "\n"


def chip_910b(npu: int, used: int, health: str = "OK", total: int = 65536) -> str:
    return (
        f"| {npu:<5} 910B3               | {health:<13} | 90.4        32                0    / 0             |\n"
        f"| 0                         | 0000:C{npu}:00.0  | 0           0    / 0          {used:<5}/ {total:<14}|"
    )


# Two chips an NPU, with physical ids, and the power of the first alone.
TABLE_A3 = table(
    "24.1.rc3.7",
    [
        "| 0     Ascend910           | OK            | 178.9       36                0    / 0             |\n"
        "| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3412 / 65536         |",
        "| 0     Ascend910           | OK            | -           36                0    / 0             |\n"
        "| 1     1                   | 0000:9F:00.0  | 0           0    / 0          3189 / 65536         |",
    ],
    [held(0, 1, 3328327, "", 50119)],
)
# Memory of the system beside HBM, and "NA" for a device.
TABLE_910A = table(
    "23.0.3",
    [
        "| 0     910A                | OK            | 67.5        42                0    / 0             |\n"
        "| 0     NA                  | 0000:C1:00.0  | 60          1258 / 15137      2    / 32768         |",
    ],
    [idle(0)],
)


def table_910b(
    version: str = "26.0.rc1", used: tuple[int, ...] = (3400, 3412), processes: str = ""
) -> str:
    chips = [chip_910b(npu, mib) for npu, mib in enumerate(used)]
    return table(version, chips, [processes or idle(npu) for npu in range(len(used))])


@dataclass
class NpuHost:
    """A host with two devices below `folder`; what it has can be changed before it is looked at."""

    folder: Path

    @property
    def home(self) -> Path:
        return self.folder / "cann"

    @property
    def devices(self) -> Path:
        return self.folder / "dev"

    def make(self) -> NpuHost:
        for name in ("davinci0", "davinci1", "davinci_manager", "devmm_svm", "hisi_hdc"):
            self.devices.mkdir(exist_ok=True)
            (self.devices / name).touch()
        (self.folder / "bin").mkdir()
        (self.home / "aarch64-linux").mkdir(parents=True)
        (self.home / "set_env.sh").touch()
        self.give_cann("9.0.0")
        self.give_smi(table_910b())
        return self

    def give_cann(self, version: str) -> None:
        (self.home / "aarch64-linux" / "ascend_toolkit_install.info").write_text(
            f"package_name=Ascend-cann-toolkit\nversion={version}\n"
            f"innerversion=V100R001C23SPC002B210\narch=aarch64\nos=linux\npath={self.home}\n"
        )

    def give_smi(self, output: str, before: str = "", status: int = 0) -> None:
        """A program npu-smi that prints `output`, after the shell's commands `before`."""
        program = self.folder / "bin" / "npu-smi"
        program.write_text(f"#!/bin/sh\n{before}\ncat <<'E'\n{output}\nE\nexit {status}\n")
        program.chmod(0o755)

    def variables(self, path: str) -> dict[str, str]:
        """As set_env.sh would leave them."""
        return {
            "PATH": f"{self.folder / 'bin'}:{path}",
            "ASCEND_HOME_PATH": str(self.home),
            "ASCEND_OPP_PATH": f"{self.home}/opp",
            "PYTHONPATH": f"{self.home}/opp/built-in/op_impl/ai_core/tbe",
            "LD_LIBRARY_PATH": f"{self.home}/lib64",
        }


PROGRAM_THAT_FAILS = textwrap.dedent(
    """
    import json, os, sys
    folder, rank = sys.argv[1], int(os.environ.get("RANK_ID", "0"))
    with open(f"{folder}/rank_{rank}.jsonl", "a") as file:
        file.write(json.dumps({"starts": "all-gather", "figures": {}, "pid": os.getpid()}) + chr(10))
    logs = os.environ["ASCEND_PROCESS_LOG_PATH"] + "/debug/plog"
    os.makedirs(logs)
    with open(f"{logs}/plog-1_2.log", "w") as file:
        file.write("[INFO] HCCL(1,python): up" + chr(10) + "[ERROR] HCCL(1,python): the link is down" + chr(10))
    sys.exit(7)
    """
)

# A sitecustomize of Python: in the doctor's checks one kernel raises and leaves its process broken, another kills it.
PLANTS_KERNELS = textwrap.dedent(
    """
    import importlib.util, os, signal, sys
    CASES = "mindgrpo.doctor.probes.kernel_cases"
    KEPT = "glu", "add rms norm", "packed attention, biases", "packed attention, norms"

    def plant(module):
        from dataclasses import replace
        real, broken = module.cases, []

        def planted(case):
            def make(kernels):
                if type(kernels).__name__ == "NativeKernels":
                    if case.name == "packed attention, biases":
                        os.kill(os.getpid(), signal.SIGKILL)
                    if case.name == "add rms norm" or broken:
                        broken.append(case.name)
                        raise RuntimeError("this kernel breaks its process")
                return case.make(kernels)

            return replace(case, make=make)

        def cases(*own):
            return [planted(case) for case in real(*own) if case.name in KEPT]

        module.cases = cases

    class Finder:
        def find_spec(self, name, path, target=None):
            if name != CASES:
                return None
            sys.meta_path.remove(self)
            spec = importlib.util.find_spec(name)
            execute = spec.loader.exec_module
            spec.loader.exec_module = lambda module: (execute(module), plant(module))
            return spec

    sys.meta_path.insert(0, Finder())
    """
)
