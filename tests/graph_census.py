"""Counts what compiled graphs launch, and finds in the installed package which of it an NPU's AI CPU would compute.

A graph's primitives are read from the IR that MindSpore writes behind its optimizations, which is the same for every
device; the CPU then refuses bfloat16 and fused operations, and nothing is run. What is read is not what an NPU
launches: kernels may be fused there, and a primitive may be more than one kernel.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import mindspore as ms

PACKAGE = Path(ms.__file__).parent
# Views, and what only the graph needs.
NO_KERNELS = (
    *("Load", "UpdateState", "Depend", "Return", "Partial", "call", "StopGradient"),
    *("MakeTuple", "TupleGetItem", "MakeList", "ListGetItem"),
    *("Reshape", "ExpandDims", "Squeeze", "Shape", "Size"),
)
_NODE = re.compile(r"\s*%\d+\(.*?\) = (?:PrimFunc_|Primitive::)?([A-Za-z_0-9]+)\(")
_DTYPES = re.compile(r"Tensor\[(\w+)\]")
_REFUSED = re.compile(
    r"Unsupported op \[|is not supported|not support|unsupported|Can not find", re.I
)

# (primitive, the dtypes of its tensors, outputs behind an arrow) and how often
Census = Counter[tuple[str, str]]


def census_of(run: Callable[[], Any], folder: Path) -> Census:
    """Returns the primitives of the one graph that `run` compiles; that the CPU refuses them is no error."""
    ms.set_context(save_graphs=1, save_graphs_path=str(folder))
    try:
        run()
    except (RuntimeError, TypeError, ValueError) as error:
        if not _REFUSED.search(str(error)):
            raise
    finally:
        ms.set_context(save_graphs=0)
    (final,) = sorted(folder.rglob("*hwopt_d_after_optimization*.ir"))[-1:]
    return _read(final)


def _read(path: Path) -> Census:
    lines = path.read_text(errors="replace").splitlines()
    found: Census = Counter()
    for number, line in enumerate(lines):
        node = _NODE.match(line)
        if node and node[1] not in NO_KERNELS:
            types = next((x for x in lines[number + 1 : number + 3] if "-> (" in x), "")
            ins, _, outs = types.partition("-> (")
            dtypes = (",".join(_DTYPES.findall(part)) for part in (ins, outs))
            found[node[1], " -> ".join(dtypes)] += 1
    return found


def by_primitive(census: Census) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (name, _), count in census.items():
        counts[name] += count
    return counts


@cache
def aicpu_primitives() -> frozenset[str]:
    """Returns those that the package registers a kernel of the AI CPU for."""
    folder = PACKAGE / "ops/_op_impl/aicpu"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    return frozenset(re.findall(r"AiCPURegOp\(\"(\w+)\"\)", text))


@cache
def aclnn_primitives() -> frozenset[str]:
    """Returns those with a kernel of aclnn in the package's plugin, by its classes' and functions' names."""
    content = (PACKAGE / "lib/plugin/libmindspore_ops_ascend.so").read_bytes()
    patterns = (
        rb"\d([A-Z]\w*?)Ascend(?=[A-Z0-9]|\0)",
        rb"Aclnn([A-Z]\w*?)KernelMod",
        rb"\0aclnn([A-Z]\w*?)\0",
    )
    return frozenset(name.decode() for pattern in patterns for name in re.findall(pattern, content))
