"""A YAML file as dotted keys, each with its value and the line it stands on.

Refuses duplicate keys, keys that are not text, and anything but plain YAML data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mindgrpo.errors import UserError
from mindgrpo.strict_files import read_text

MAX_YAML_BYTES = 1 << 18
# What aliases grow into counts; the longest configuration of users has some 200.
MAX_NODES = 20_000
MAX_DEPTH = 50
TOO_DEEP = f"it is nested more than {MAX_DEPTH} deep, or within itself"
MAX_INTEGER = 2**63 - 1
_PLAIN = ("null", "bool", "int", "float", "str", "seq", "map", "merge", "value")


class Entry(NamedTuple):
    value: object
    origin: str


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}
    _depth = 0

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        # Told while it is read: to read on would take the square of what follows.
        self._depth += 1
        if self._depth > MAX_DEPTH:
            mark = self.peek_event().start_mark
            raise yaml.MarkedYAMLError(problem=TOO_DEEP, problem_mark=mark)
        node: yaml.Node | None = super().compose_node(parent, index)
        self._depth -= 1
        return node


_INT, _FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
_Loader.yaml_implicit_resolvers = {
    first: [rule for rule in rules if not rule[0].endswith((":int", ":float", ":timestamp"))]
    for first, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_Loader.add_implicit_resolver(
    _INT, re.compile(r"^[-+]?(0|[1-9][0-9_]*|0x[0-9a-fA-F]+)$"), list("-+0123456789")
)
_Loader.add_implicit_resolver(
    _FLOAT,
    re.compile(
        r"^([-+]?([0-9][0-9_]*\.[0-9_]*|\.[0-9]+|[0-9][0-9_]*(?=[eE]))([eE][-+]?[0-9]+)?"
        r"|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


def plain_yaml(text: str) -> Any:
    """The one document of `text`; raises yaml.YAMLError."""
    loader = _Loader(text)
    try:
        root = _composed(loader)
        return None if root is None else _constructed(loader, root)
    finally:
        loader.dispose()


def parse_value(text: str) -> Any:
    """One command-line value as YAML; raises yaml.YAMLError."""
    if len(text) > MAX_YAML_BYTES:
        raise yaml.YAMLError(f"{len(text)} characters are no value")
    return plain_yaml(text)


class _Refused(yaml.MarkedYAMLError):
    def __init__(self, node: yaml.Node | None, problem: str) -> None:
        super().__init__(problem=problem, problem_mark=node.start_mark if node else None)


def _composed(loader: _Loader) -> yaml.Node | None:
    """The document's nodes, after counting them as aliases repeat them. Raises yaml.YAMLError."""
    try:
        root = loader.get_single_node()
    except (ValueError, OverflowError) as error:  # an escape such as \UFFFFFFFF
        raise _Refused(None, str(error)) from None
    if root is not None:
        _count(root, 1)
    return root


def _count(node: yaml.Node, depth: int, seen: int = 0) -> int:
    seen += 1
    if depth > MAX_DEPTH:
        raise _Refused(node, TOO_DEEP)
    if seen > MAX_NODES:
        raise _Refused(node, f"its anchors and aliases make more than {MAX_NODES} values of it")
    if node.tag.removeprefix("tag:yaml.org,2002:") not in _PLAIN:
        raise _Refused(node, f"the tag {node.tag!r} is no plain data")
    if isinstance(node, yaml.ScalarNode):
        return seen
    for held in node.value:
        for part in held if isinstance(held, tuple) else (held,):
            seen = _count(part, depth + 1, seen)
    return seen


def _constructed(loader: _Loader, node: yaml.Node) -> Any:
    """Raises yaml.YAMLError."""
    try:
        value = loader.construct_object(node, deep=True)
    except (ValueError, KeyError, IndexError, TypeError, AttributeError):
        raise _Refused(node, "its value does not fit its tag") from None
    if isinstance(value, int) and abs(value) > MAX_INTEGER:
        raise _Refused(node, "a whole number beyond 64 bits")
    if isinstance(value, str) and not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise _Refused(node, "half a character (a lone surrogate)") from None
    for held in node.value if isinstance(node, yaml.CollectionNode) else ():
        for part in held if isinstance(held, tuple) else (held,):
            _constructed(loader, part)
    return value


def flatten(value: object, key: str, origin: str) -> dict[str, Entry]:
    """A mapping below `key` as dotted keys; anything else, and an empty mapping, is one entry."""
    if not isinstance(value, dict) or not value:
        return {key: Entry(value, origin)}
    entries: dict[str, Entry] = {}
    for name, inner in value.items():
        entries.update(flatten(inner, f"{key}.{name}", origin))
    return entries


def read_yaml(path: Path) -> dict[str, Entry]:
    """Every value by dotted key, in file order; a section is an entry of its own, with value {}."""
    remedy = "give the path of a YAML file with --config."
    text = read_text(path, "The configuration", remedy, MAX_YAML_BYTES)
    try:
        return _Reader(path, text).entries
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or str(error)
        raise UserError(
            f"The configuration is not valid YAML: {problem} ({path.name}{line}); correct that "
            "line (indent with spaces, quote text that holds ': ' or '#')."
        ) from None


class _Reader:
    def __init__(self, path: Path, text: str) -> None:
        self._name = path.name
        self._loader = _Loader(text)
        self.entries: dict[str, Entry] = {}
        try:
            root = _composed(self._loader)
            if isinstance(root, yaml.MappingNode):
                self._read_mapping(root, "")
            elif root is not None:
                raise UserError(
                    f"The configuration '{path}' must hold sections such as 'rl_config:', not one "
                    "value or a list."
                )
        finally:
            self._loader.dispose()

    def _origin(self, node: yaml.Node) -> str:
        return f"{self._name} line {node.start_mark.line + 1}"

    def _read_mapping(self, node: yaml.MappingNode, prefix: str) -> None:
        self._refuse_duplicates(node, prefix)
        # Values that `<<: *anchor` brings in come first, so that the section's own win.
        self._loader.flatten_mapping(node)
        for key_node, value_node in node.value:
            key = prefix + key_node.value
            if isinstance(value_node, yaml.MappingNode):
                self.entries[key] = Entry({}, self._origin(key_node))
                self._read_mapping(value_node, key + ".")
            else:
                value = _constructed(self._loader, value_node)
                self.entries[key] = Entry(value, self._origin(key_node))

    def _refuse_duplicates(self, node: yaml.MappingNode, prefix: str) -> None:
        seen: dict[str, int] = {}
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.tag.endswith(
                (":str", ":merge")
            ):
                raise UserError(
                    f"A key in '{prefix.rstrip('.') or 'the configuration'}' is not a name "
                    f"({self._name} line {line}); write key: value with a plain word as key."
                )
            if key_node.value in seen:
                raise UserError(
                    f"{prefix}{key_node.value} is given twice, on line {seen[key_node.value]} and "
                    f"on line {line} of {self._name}; keep one of them."
                )
            seen[key_node.value] = line
