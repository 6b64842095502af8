"""A YAML file as dotted keys, each with its value and the line it stands on.

Refuses duplicate keys, keys that are not text, and anything but plain YAML data.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from mindgrpo.errors import UserError


class Entry(NamedTuple):
    value: object
    origin: str


class _Loader(yaml.SafeLoader):
    """YAML as people mean it: 1e-6 is a number, 1:30 and 2024-01-01 are text."""

    yaml_implicit_resolvers: dict[str, list[tuple[str, re.Pattern[str]]]] = {}


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


def parse_value(text: str) -> Any:
    """One command-line value as YAML; raises yaml.YAMLError."""
    return yaml.load(text, Loader=_Loader)


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
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not UTF-8 text"
        raise UserError(
            f"The configuration '{path}' cannot be read: {reason}; give the path of a YAML file "
            "with --config."
        ) from None
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
            root = self._loader.get_single_node()
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
                value = self._loader.construct_object(value_node, deep=True)
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
