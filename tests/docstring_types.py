"""What docstrings of the installed MindSpore say of dtypes, held against the arguments of a call."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

from mindspore import Tensor

DTYPE_WORDS = {"float16", "float32", "bfloat16", "bool", "int8", "uint8", "int32", "int64"}
# Annotations of the documented arguments.
PYTHON_TYPES = {"int": int, "double": float, "float": float, "str": str}


def documented(function: Callable[..., Any], name: str) -> str:
    """What the docstring's list of arguments says of one."""
    doc = inspect.getdoc(function) or ""
    # A primitive's are in a list of its own.
    begins = r"^    (?:    - \*\*)?{}(?:\*\*)? "
    own, others = begins.format(name), begins.format(r"\w+")
    match = re.search(rf"{own}(\(.*?)(?={others}\(|^\S)", doc, re.MULTILINE | re.DOTALL)
    assert match, f"{function} does not document {name}"
    return match[1]


def type_errors(function: Callable[..., Any]) -> list[tuple[set[str], str]]:
    """The `Raises` that concern types: the arguments that one names, and its sentence."""
    lines = re.findall(r"^    TypeError: (.*)", inspect.getdoc(function) or "", re.MULTILINE)
    return [(set(re.findall(r"`(\w+)`", line)), line) for line in lines]


def dtypes_of(value: Any) -> set[str]:
    tensors = value if isinstance(value, tuple) else (value,)
    return {str(t.dtype).lower() for t in tensors if isinstance(t, Tensor)}


def check_types(function: Callable[..., Any], arguments: dict[str, Any]) -> None:
    """Raises AssertionError for a dtype or a Python type that the docstring does not allow."""
    if not DTYPE_WORDS & set(re.findall(r"\w+", inspect.getdoc(function) or "")):
        # It says nothing of dtypes: only the compiler can refuse one.
        return
    used = {name: value for name, value in arguments.items() if value is not None}
    for name, value in used.items():
        text, dtypes = documented(function, name), dtypes_of(value)
        if isinstance(value, tuple) and not dtypes:
            assert "tuple[int]" in text and all(isinstance(number, int) for number in value)
            continue
        if not dtypes:
            kind = PYTHON_TYPES[re.match(r"\((\w+)", text)[1]]  # type: ignore[index]
            assert isinstance(value, kind), f"{function}: {name} is {value!r}"
            continue
        same = re.search(r"[Ss]ame (?:dtype|type|with)[^`]*`(\w+)`", text)
        if same:
            assert dtypes == dtypes_of(used[same[1]]), f"{name} is {dtypes}"
            continue
        named = [line for names, line in type_errors(function) if names == {name}]
        allowed = DTYPE_WORDS & set(re.findall(r"\w+", " ".join([text, *named]).lower()))
        # It may say nothing of this one.
        assert dtypes <= (allowed or dtypes), f"{function}: {name} is {dtypes}, not {allowed}"
    for names, line in type_errors(function):
        if "same" in line and "type" in line:
            dtypes = {dtype for name in names & used.keys() for dtype in dtypes_of(used[name])}
            assert len(dtypes) <= 1, f"{function.__name__}: {line} Got {dtypes}"
