"""Turns what the schema finds wrong with a value into one sentence: the value, the rule, the remedy and the origin."""

from __future__ import annotations

import re
import types
from collections.abc import Mapping
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import ValidationError
from pydantic.fields import FieldInfo

from mindgrpo.config.checks import Contradiction
from mindgrpo.config.names import nearest
from mindgrpo.config.schema import LIVE
from mindgrpo.config.section import kinds
from mindgrpo.config.yaml_file import Sourced, parse_yaml

_BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
# Of one, and of several in a list.
_NOUNS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    types.NoneType: ("null", "null"),
}


def shown(value: object) -> str:
    return "null" if value is None else repr(value)


def explain(error: ValidationError, live: Mapping[str, Sourced]) -> str:
    """Returns pydantic's first error as a sentence: later ones often follow from it. `live` has the user's keys."""
    first = error.errors()[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, Contradiction):
        keys = re.findall(r"\w+(?:\.\w+)*", str(cause))
        origins = dict.fromkeys(live[key].origin for key in keys if key in live)
        return f"{cause} ({', '.join(origins) or 'by default'})."
    location = [str(name) for name in first["loc"]]
    prefixes = (".".join(location[:end]) for end in range(len(location), 0, -1))
    key = next(prefix for prefix in prefixes if prefix in LIVE)
    field, (value, origin) = LIVE[key].field, live[key]
    return (
        f"{key} is {shown(value)}, but {_rule(first, field)}; {_remedy(value, field)} ({origin})."
    )


def takes(field: FieldInfo) -> str:
    """Says what a field accepts: its types, then its bounds."""
    bounds = [
        f"{words} {getattr(limit, name)}"
        for limit in field.metadata
        for words, name in _BOUNDS.values()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([_either(field.annotation), *bounds])


def _rule(error: Any, field: FieldInfo) -> str:
    kind, context = error["type"], error.get("ctx", {})
    if kind in _BOUNDS:
        words, name = _BOUNDS[kind]
        return f"must be {words} {context[name]}"
    if kind == "value_error":
        return str(context["error"])
    if kind == "finite_number":
        return "must be a finite number"
    return f"must be {_either(field.annotation)}"


def _either(annotation: Any) -> str:
    return " or ".join(_noun(kind) for kind in kinds(annotation))


def _noun(kind: Any, several: bool = False) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if get_origin(kind) is list:
        inner = " or ".join(_noun(one, several=True) for one in kinds(get_args(kind)[0]))
        return f"{'lists' if several else 'a list'} of {inner}"
    return _NOUNS[kind][several]


def _remedy(value: object, field: FieldInfo) -> str:
    wanted = kinds(field.annotation)
    choices = [text for kind in wanted if get_origin(kind) is Literal for text in get_args(kind)]
    if isinstance(value, str):
        spelled = value.lower().replace("++", "_plus_plus").replace("-", "_")
        if near := nearest(spelled, [text for text in choices if isinstance(text, str)]):
            return f"did you mean {near!r}"
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
        value = parse_yaml(text)
    except yaml.YAMLError:
        return False
    return type(value) in wanted or (type(value) is int and float in wanted)
