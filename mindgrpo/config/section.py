"""What every section of the configuration shares: strict, frozen, and able to list its own keys.

Refuses to turn one type into another: a quoted "8" is text. A whole number is a number, too.
"""

from __future__ import annotations

import re
import types
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, protected_namespaces=()
    )


class Contradiction(ValueError):
    """Keys that are each right and cannot stand together; `keys` say where to look."""

    def __init__(self, sentence: str, *keys: str) -> None:
        super().__init__(sentence)
        self.keys = keys


def _unset_if_empty(value: object) -> object:
    return None if value == "" else value


def _on_or_off(value: object) -> object:
    # YAML reads a bare ON as true, and users write it both ways.
    if isinstance(value, bool):
        return "ON" if value else "OFF"
    return value.upper() if isinstance(value, str) else value


def _upper(value: object) -> object:
    return value.upper() if isinstance(value, str) else value


def _empty_if_unset(value: object) -> object:
    return "" if value is None else value


def _list_of_words(value: object) -> object:
    return (
        [word.strip() for word in value.split(",") if word.strip()]
        if isinstance(value, str)
        else value
    )


def _lower_name(value: object) -> object:
    return (value.lower() or None) if isinstance(value, str) else value


# Users write "" for a path that they leave unset.
OptionalText = Annotated[str | None, BeforeValidator(_unset_if_empty)]
BEFORE_TEXT = BeforeValidator(_empty_if_unset)
BEFORE_LIST = BeforeValidator(_list_of_words)
BEFORE_NAME = BeforeValidator(_lower_name)
BEFORE_ON_OFF = BeforeValidator(_on_or_off)
BEFORE_UPPER = BeforeValidator(_upper)

_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def memory_bytes(text: str) -> int:
    """Text such as 58GB in bytes; GB is 2**30 here as for the framework itself."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or len(text) > 20 or float(match[1]) <= 0:
        raise ValueError("must be a size above 0 such as 58GB, 512MB or 65536KB")
    return int(float(match[1]) * 2 ** _UNITS[match[2].upper()])


@dataclass(frozen=True)
class Key:
    """One value a user may set: its attribute path in Config and its field."""

    path: tuple[str, ...]
    field: FieldInfo


def section_of(annotation: Any) -> type[Section] | None:
    """The Section in `annotation`, which may be optional; None for a plain value."""
    if get_origin(annotation) in (Union, types.UnionType):
        inner = [section_of(part) for part in get_args(annotation)]
        return next((part for part in inner if part), None)
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return None


def keys_of(
    model: type[Section], prefix: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Key]]:
    """Every dotted key below `model`, in the order of declaration."""
    for name, field in model.model_fields.items():
        dotted = prefix + (field.alias or name)
        inner = section_of(field.annotation)
        if inner is None:
            yield dotted, Key((*path, name), field)
        else:
            yield from keys_of(inner, dotted + ".", (*path, name))
