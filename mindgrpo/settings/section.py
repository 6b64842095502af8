"""What every section of the configuration shares: it is strict and frozen, and can list its own keys.

No type is turned into another: a quoted "8" is text. A whole number is a number, too.
"""

from __future__ import annotations

import re
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUseDefault


class Section(BaseModel):
    """A section's keys; the text below each is its meaning in the generated reference."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        protected_namespaces=(),
        use_attribute_docstrings=True,
    )


def _of_text(change: Callable[[str], object]) -> BeforeValidator:
    return BeforeValidator(lambda value: change(value) if isinstance(value, str) else value)


def spelled(true: object, false: object) -> BeforeValidator:
    """Says what true and false stand for: YAML reads words such as ON and off as these."""
    return BeforeValidator(
        lambda value: (true if value else false) if isinstance(value, bool) else value
    )


def _or_default(value: object) -> object:
    if value is None:
        raise PydanticUseDefault
    return value


# Users write null where they ask for the default.
NULL_IS_DEFAULT = BeforeValidator(_or_default)
# Users write "" for a path that they leave unset.
OptionalText = Annotated[str | None, _of_text(lambda text: text or None)]
BEFORE_TEXT = BeforeValidator(lambda value: "" if value is None else value)
BEFORE_LIST = _of_text(lambda text: [word.strip() for word in text.split(",") if word.strip()])
# A key of a list that is left empty in the file.
NULL_IS_EMPTY = BeforeValidator(lambda value: [] if value is None else value)
BEFORE_NAME = _of_text(lambda text: text.lower() or None)
BEFORE_UPPER = _of_text(str.upper)

BOUNDS = {
    "greater_than_equal": ("at least", "ge"),
    "greater_than": ("above", "gt"),
    "less_than_equal": ("at most", "le"),
    "less_than": ("below", "lt"),
}
# Of one, and of several in a list.
NOUNS: dict[Any, tuple[str, str]] = {
    int: ("a whole number", "whole numbers"),
    float: ("a number", "numbers"),
    bool: ("true or false", "true or false"),
    str: ("text", "texts"),
    types.NoneType: ("null", "null"),
}
_UNITS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}


def memory_bytes(text: str) -> int:
    """Returns the bytes of a size such as 58GB; GB is 2**30 here as for the framework itself. Raises ValueError."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if match is None or len(text) > 20 or float(match[1]) <= 0:
        raise ValueError("must be a size above 0 such as 58GB, 512MB or 65536KB")
    return int(float(match[1]) * 2 ** _UNITS[match[2].upper()])


# The field stays text.
AFTER_SIZE = AfterValidator(lambda text: text if text is None or memory_bytes(text) else None)


@dataclass(frozen=True)
class Key:
    """One value a user may set: its attribute path in Config and its field."""

    path: tuple[str, ...]
    field: FieldInfo

    @property
    def meaning(self) -> str:
        return " ".join((self.field.description or "").split())


def plain(value: object) -> object:
    """Returns a value as a file has it: sections in a list as mappings of the keys that are set."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    return (
        value.model_dump(by_alias=True, exclude_unset=True) if isinstance(value, Section) else value
    )


def kinds(annotation: Any) -> tuple[Any, ...]:
    """Returns the types that a field may hold: (int, NoneType) of `int | None`."""
    if get_origin(annotation) in (Union, types.UnionType):
        return tuple(kind for one in get_args(annotation) for kind in kinds(one))
    return (annotation,)


def takes(field: FieldInfo) -> str:
    """Says what a field accepts: its types, then its bounds."""
    bounds = [
        f"{words} {getattr(limit, name)}"
        for limit in field.metadata
        for words, name in BOUNDS.values()
        if getattr(limit, name, None) is not None
    ]
    return ", ".join([either(field.annotation), *bounds])


def either(annotation: Any) -> str:
    """Names the types of an annotation: "a whole number or null"."""
    return " or ".join(_noun(kind) for kind in kinds(annotation))


def _noun(kind: Any, several: bool = False) -> str:
    if get_origin(kind) is Literal:
        return " or ".join(repr(choice) for choice in get_args(kind))
    if isinstance(kind, type) and issubclass(kind, Section):
        return "sections" if several else "a section"
    if get_origin(kind) is list:
        inner = " or ".join(_noun(one, several=True) for one in kinds(get_args(kind)[0]))
        return f"{'lists' if several else 'a list'} of {inner}"
    return NOUNS[kind][several]


def keys_of(
    model: type[Section], prefix: str = "", path: tuple[str, ...] = ()
) -> Iterator[tuple[str, Key]]:
    """Yields every dotted key below `model`, in the order of declaration."""
    for name, field in model.model_fields.items():
        dotted = prefix + (field.alias or name)
        classes = (kind for kind in kinds(field.annotation) if isinstance(kind, type))
        inner = next((kind for kind in classes if issubclass(kind, Section)), None)
        if inner is not None:
            yield from keys_of(inner, dotted + ".", (*path, name))
        else:
            yield dotted, Key((*path, name), field)
