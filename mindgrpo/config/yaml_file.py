"""Reads a YAML file as dotted keys, each with its value and the line it is on.

Only plain data: YAML's tags make no objects. A key that is given twice is an error.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_text

MAX_YAML_BYTES = 1 << 18
MAX_DEPTH, MAX_SECTIONS = 50, 6
MAX_INTEGER = 2**63 - 1


class Sourced(NamedTuple):
    value: object
    origin: str


class _Loader(yaml.SafeLoader):
    """Reads YAML as people mean it: 1e-6 is a number, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {
        first: [rule for rule in rules if not rule[0].endswith((":int", ":float", ":timestamp"))]
        for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # The scanner's time grows with the square of the depth.
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.YAMLError("it is nested too deep")
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        try:
            value = super().construct_object(node, deep)
            if isinstance(value, int) and abs(value) > MAX_INTEGER:
                raise ValueError("a whole number beyond 64 bits")
            if isinstance(value, str):
                value.encode()  # half a character has no place in a file
        except (ValueError, LookupError, AttributeError) as error:  # of a value unlike its tag
            raise _at(node, str(error)) from None
        return value


_INT = r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"
_FLOAT = (
    r"^([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
    r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
)
for _tag, _pattern in (("int", _INT), ("float", _FLOAT)):
    _Loader.add_implicit_resolver(
        f"tag:yaml.org,2002:{_tag}", re.compile(_pattern), list("-+0123456789.")
    )


def _at(node: yaml.Node, problem: str) -> yaml.MarkedYAMLError:
    return yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def parse_yaml(text: str) -> Any:
    """Returns the value of a text's one document. Raises yaml.YAMLError."""
    try:
        return yaml.load(text, _Loader)
    except (ValueError, OverflowError) as error:
        raise yaml.YAMLError(str(error)) from None


def read_files(paths: Sequence[Path]) -> dict[str, Sourced]:
    """Returns every value of several files by dotted key: that of the last file that has the key. Raises UserError."""
    entries: dict[str, Sourced] = {}
    names = [path.name for path in paths]
    for path in paths:
        name = path.name if names.count(path.name) == 1 else str(path)
        for key, entry in read_yaml(path, name).items():
            inner = next((one for one in entries if one.startswith(key + ".")), None)
            if entry.value != {} and inner is not None:
                value = "null" if entry.value is None else repr(entry.value)
                raise UserError(
                    f"{key} is {value} ({entry.origin}), but {inner} was set before ({entries[inner].origin}); leave "
                    f"{key} out, or set its keys."
                )
            entries[key] = entry
    return entries


def read_yaml(path: Path, name: str | None = None) -> dict[str, Sourced]:
    """Returns every value by dotted key, in file order; a section is an entry of its own, with value {}.

    `name` is the file's in origins and messages; None: without its folder. Raises UserError.
    """
    name = name or path.name
    remedy = "give the path of a YAML file with --config."
    text = read_text(path, "The configuration", remedy, MAX_YAML_BYTES)
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is not None and not isinstance(root, yaml.MappingNode):
            raise UserError(
                f"The configuration '{path}' must hold sections such as 'rl_config:', not one "
                "value or a list."
            )
        return dict(_entries(loader, root, "", name)) if root else {}
    except (yaml.YAMLError, ValueError, OverflowError) as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"The configuration is not valid YAML: {problem} ({name}{line}); correct that "
            "line (indent with spaces, quote text that holds ': ' or '#')."
        ) from None


def _entries(
    loader: _Loader, node: yaml.MappingNode, prefix: str, file: str
) -> Iterator[tuple[str, Sourced]]:
    if prefix.count(".") > MAX_SECTIONS:
        raise _at(node, f"sections are more than {MAX_SECTIONS} deep, or within themselves")
    _check_keys(node, prefix, file)
    # Values that `<<: *anchor` brings in come first, so that the section's own win.
    loader.flatten_mapping(node)
    for key_node, value_node in node.value:
        key, origin = prefix + key_node.value, f"{file} line {key_node.start_mark.line + 1}"
        if isinstance(value_node, yaml.MappingNode):
            yield key, Sourced({}, origin)
            yield from _entries(loader, value_node, key + ".", file)
        else:
            yield key, Sourced(loader.construct_object(value_node, deep=True), origin)


def _check_keys(node: yaml.MappingNode, prefix: str, file: str) -> None:
    lines: dict[str, int] = {}
    for key_node, _ in node.value:
        key, line = key_node.value, key_node.start_mark.line + 1
        is_name = isinstance(key_node, yaml.ScalarNode)
        if not is_name or not key_node.tag.endswith((":str", ":merge")):
            raise UserError(
                f"A key in '{prefix.rstrip('.') or 'the configuration'}' is not a name "
                f"({file} line {line}); write key: value with a plain word as key."
            )
        if key in lines:
            raise UserError(
                f"{prefix}{key} is given twice, on line {lines[key]} and on line {line} of {file}; keep one of them."
            )
        lines[key] = line


def flatten(value: object, key: str, origin: str) -> dict[str, Sourced]:
    """Returns a mapping below `key` as dotted keys; anything else, and an empty mapping, is one entry."""
    if not isinstance(value, dict) or not value:
        return {key: Sourced(value, origin)}
    inner = (flatten(one, f"{key}.{name}", origin).items() for name, one in value.items())
    return dict(itertools.chain.from_iterable(inner))
