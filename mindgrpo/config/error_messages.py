"""What a wrong value is told to its user: the value, the rule, the remedy and the place.

Says the first finding only: the later ones often follow from it.
"""

from __future__ import annotations

import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mindgrpo.config.schema import LIVE
from mindgrpo.config.section import Contradiction
from mindgrpo.config.yaml_file import Entry, parse_value

_BOUNDS = {
    "greater_than_equal": ("must be at least", "ge"),
    "greater_than": ("must be above", "gt"),
    "less_than_equal": ("must be at most", "le"),
    "less_than": ("must be below", "lt"),
}
_KINDS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    types.NoneType: "null",
}
_PLURALS: dict[Any, str] = {int: "whole numbers", float: "numbers", str: "texts"}


def kinds(annotation: Any) -> tuple[Any, ...]:
    """The types that a field may hold: `int | None` as (int, NoneType)."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for part in get_args(annotation) for kind in kinds(part))
    return (annotation,)


def explain(error: ValidationError, live: Mapping[str, Entry]) -> str:
    """The first finding of pydantic as one sentence; `live` has the keys that were given."""
    finding = error.errors()[0]
    cause = finding.get("ctx", {}).get("error")
    if isinstance(cause, Contradiction):
        places = dict.fromkeys(live[key].origin for key in cause.keys if key in live)
        return f"{cause} ({', '.join(places) or 'by default'})."
    key = _key_at(finding["loc"])
    field, (value, origin) = LIVE[key].field, live[key]
    shown = "null" if value is None else repr(value)
    return f"{key} is {shown}, but {_rule(finding, field)}; {_remedy(value, field)} ({origin})."


def takes(field: FieldInfo) -> str:
    """What a field accepts, in words: its types, then its bounds."""
    words = " or ".join(_describe(kind) for kind in kinds(field.annotation))
    bounds = [
        f"{rule.removeprefix('must be ')} {getattr(limit, name)}"
        for limit in field.metadata
        for rule, name in _BOUNDS.values()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([words, *bounds])


def _key_at(location: tuple[int | str, ...]) -> str:
    for end in range(len(location), 0, -1):
        key = ".".join(str(part) for part in location[:end])
        if key in LIVE:
            return key
    raise KeyError(location)


def _rule(finding: Any, field: FieldInfo) -> str:
    kind, context = finding["type"], finding.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"{words} {context[name]}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "finite_number":
        return "must be a finite number"
    return "must be " + " or ".join(_describe(part) for part in kinds(field.annotation))


def _describe(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        return "a list of " + " or ".join(_plural(part) for part in kinds(get_args(kind)[0]))
    return _KINDS[kind]


def _plural(kind: Any) -> str:
    if get_origin(kind) is Literal:
        return _describe(kind)
    return f"lists of {_PLURALS[get_args(kind)[0]]}" if get_origin(kind) is list else _PLURALS[kind]


def _remedy(value: object, field: FieldInfo) -> str:
    wanted = kinds(field.annotation)
    if isinstance(value, str) and str not in wanted and _unquoted(value, wanted):
        return f"write {value} without quotes"
    if str in wanted and isinstance(value, (int, float)):
        return "put it in quotes"
    if any(get_origin(kind) is list for kind in wanted) and isinstance(value, (str, int, float)):
        return f"write [{value}]"
    default = "the default" if field.default in (None, "", []) else repr(field.default)
    return f"leave it out for {default}"


def _unquoted(text: str, wanted: tuple[Any, ...]) -> bool:
    try:
        value = parse_value(text)
    except yaml.YAMLError:
        return False
    return type(value) in wanted or (type(value) is int and float in wanted)
