"""Where chat templates are rendered: what those written for transformers count on, and nothing that runs code or on.

Jinja's own sandbox keeps templates from Python's objects. This one also counts what a rendering does, so that loops
without an end, macros that call themselves and texts that double end with an error instead of with the machine.
Refuses to count time: the same template gives the same outcome on every machine.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator, Sized
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.sandbox import ImmutableSandboxedEnvironment

# Of one rendering: rounds of loops, calls and filters; and letters or items that any of them may make.
MAX_ROUNDS = 200_000
MAX_LETTERS = 4_000_000
MAX_BITS = 4096
LONG_FIELD = re.compile(r"\d{6,}|[%{][^%}]*\*")


class Sandbox(ImmutableSandboxedEnvironment):
    intercepted_binops = frozenset(["**", "*", "%", "+"])

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._finalized,
            # It would work out at once, and keep, what a template never comes to.
            optimized=False,
        )
        self.renew()
        self.filters["tojson"] = to_json
        self.filters = {name: self._counting(kind) for name, kind in self.filters.items()}
        self.filters["counted_rounds"] = self._rounds_of
        self.filters["counted_text"] = self._finalized
        self.globals["raise_exception"] = raise_exception
        self.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
        del self.globals["lipsum"]

    def renew(self) -> None:
        """Before each rendering."""
        self._rounds, self._letters = 0, 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(nodes.For):
            loop.iter = _filtered("counted_rounds", loop.iter)
        for joined in tree.find_all(nodes.Concat):
            joined.nodes = [_filtered("counted_text", part) for part in joined.nodes]
        tree.set_environment(self)
        return tree

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        self._round()
        if isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() * (max(right, 1) if operator == "**" else 1)
            self._allow(bits + right.bit_length() <= MAX_BITS)
        elif operator in ("*", "+"):
            bigger = size_of(left) * size_of(right) if operator == "*" else 0
            self._made(max(bigger, size_of(left) + size_of(right)))
        elif operator == "%" and isinstance(left, str):
            self._allow(not LONG_FIELD.search(left))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        __self._round()
        # Jinja wraps `format`, to look at what its fields reach.
        receiver = getattr(getattr(__obj, "__wrapped__", __obj), "__self__", None)
        if isinstance(receiver, str | list | dict | tuple):
            if getattr(__obj, "__name__", "") in ("format", "format_map"):
                __self._allow(not LONG_FIELD.search(str(receiver)))
            else:
                __self._grown(receiver, args, kwargs)
        result = super().call(__context, __obj, *args, **kwargs)
        __self._made(size_of(result) if isinstance(result, Sized) else 0)
        return result

    def _counting(self, kind: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(kind)  # with what says that it wants the context
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._round()
            first = next((one for one in args if isinstance(one, str | list | dict | tuple)), "")
            self._grown(first, [one for one in args if one is not first], kwargs)
            if kind.__name__ == "do_format":
                self._allow(not LONG_FIELD.search(str(first)))
            result = kind(*args, **kwargs)
            self._made(size_of(result) if isinstance(result, str | list) else 0)
            return result

        return counted

    def _rounds_of(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._round()
            yield item

    def _finalized(self, value: Any) -> Any:
        if isinstance(value, str | list | dict | tuple):
            self._made(len(value))
        return value

    def _grown(self, receiver: Any, args: Iterable[Any], kwargs: dict[str, Any]) -> None:
        """Padding, replacing and joining make at most the product of what they are given."""
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, int | Sized)]
        largest = max(map(size_of, given), default=1)
        self._allow((size_of(receiver) + 1) * (largest + 1) <= MAX_LETTERS)

    def _round(self) -> None:
        self._rounds += 1
        self._allow(self._rounds <= MAX_ROUNDS)

    def _made(self, letters: int) -> None:
        self._letters += letters
        self._allow(self._letters <= MAX_LETTERS)

    def _allow(self, within: bool) -> None:
        if not within:
            raise SecurityError(
                f"it does more than {MAX_ROUNDS} rounds or makes more than {MAX_LETTERS} letters"
            )


def rendered(template: Template, **values: Any) -> str:
    environment = template.environment
    assert isinstance(environment, Sandbox)
    environment.renew()
    return template.render(**values)


def _filtered(name: str, node: Any) -> nodes.Filter:
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def size_of(value: Any) -> int:
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, list | tuple) and len(value) < 1000:
        return sum(len(item) if isinstance(item, str) else 1 for item in value)
    return len(value) if isinstance(value, str | list | dict | tuple) else 1


def raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def to_json(value: object, indent: int | None = None, ensure_ascii: bool = False) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=ensure_ascii)
