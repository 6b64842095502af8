"""Turns the text that names a user's reward into a function to call.

`parse` reads where it is, its name and its arguments, and imports nothing; `resolve` imports the user's module.
Whatever goes wrong there is one sentence. A class is made into an object once and that object is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from mindgrpo.errors import UserError
from mindgrpo.rewards import builtin
from mindgrpo.rewards.builtin import BUILTINS
from mindgrpo.rewards.verl_forms import as_reward, is_verls
from mindgrpo.user_code import CALL, Kind, describe, import_named, nearest, read_arguments

WHERE = "reward_config.verifier_function"
REWARD = Kind("reward function", WHERE)


@dataclass(frozen=True)
class Spec:
    """`source` is "" for a built-in, else a module or a .py file that holds `name`.

    `text` is what the user wrote, `arguments` what stands in brackets behind it.
    """

    text: str
    source: str
    name: str
    arguments: dict[str, Any] = field(default_factory=dict)

    @property
    def is_quick(self) -> bool:
        return not self.source and BUILTINS[self.name].quick


def parse(text: str) -> Spec:
    """Reads `name`, `module:name` or `file.py:name`, each optionally followed by `(key=value, ...)`."""
    target, arguments = text.strip(), {}
    call = CALL.fullmatch(target)
    if call:
        target, arguments = call["name"], read_arguments(REWARD, call["arguments"], text)
    if target in BUILTINS:
        return Spec(text, "", target, arguments)
    source, colon, name = target.rpartition(":")
    if not (colon and source and name):
        raise unknown_name(target)
    return Spec(text, source, name, arguments)


def reference_to(reward: Callable[..., Any]) -> Spec | None:
    """Returns how another process finds a callable: its module and name, or None.

    None for closures, lambdas, bound methods and whatever the program itself defines.
    """
    module, name = getattr(reward, "__module__", None), getattr(reward, "__qualname__", "")
    if module in (None, "__main__", "builtins") or "." in name or not name.isidentifier():
        return None
    if getattr(sys.modules.get(module), name, None) is not reward:
        return None
    return Spec(f"{module}:{name}", module, name)


def unknown_name(target: str) -> UserError:
    if target.endswith(".py"):
        return UserError(
            f"reward function {target!r} names a file only; write {target}:function in {WHERE}"
        )
    return UserError(
        f"reward function {target!r} is not built in{nearest(target, BUILTINS)}; use one of "
        f"{', '.join(BUILTINS)}, package.module:function or path/to/file.py:function in {WHERE}"
    )


@dataclass(frozen=True)
class RewardFunction:
    """`bound` are the names of arguments that the user gave a value already.

    `reads_messages` is whether it gets completions as messages where the run passes these: built-ins and functions in
    verl's forms read texts.
    """

    name: str
    call: Callable[..., Any]
    bound: frozenset[str] = field(default_factory=frozenset)
    reads_messages: bool = True


def resolve(reward: str | Spec | Callable[..., Any]) -> RewardFunction:
    if not isinstance(reward, str | Spec):
        return _function(name_of(reward), instance_of(reward, reward, {}))
    spec = parse(reward) if isinstance(reward, str) else reward
    if not spec.source:
        return replace(with_arguments(spec, BUILTINS[spec.name].load()), reads_messages=False)
    function = with_arguments(spec, import_named(REWARD, spec.text, spec.source, spec.name))
    # A built-in may be imported and given in code.
    is_own = not spec.source.startswith(f"{builtin.__name__}.")
    return replace(function, reads_messages=function.reads_messages and is_own)


def with_arguments(spec: Spec, reward: Any) -> RewardFunction:
    """Passes the spec's arguments on: to a class when its object is made, to a function at every call."""
    if isinstance(reward, type):
        return _function(spec.name, instance_of(reward, spec.text, spec.arguments))
    called = instance_of(reward, spec.text, {})
    if spec.arguments:
        called = functools.partial(called, **spec.arguments)
    return _function(spec.name, called, frozenset(spec.arguments))


def _function(
    name: str, call: Callable[..., Any], bound: frozenset[str] = frozenset()
) -> RewardFunction:
    if is_verls(call):
        return RewardFunction(name, as_reward(call), bound, reads_messages=False)
    return RewardFunction(name, call, bound)


def name_of(reward: object) -> str:
    return str(getattr(reward, "__name__", type(reward).__name__))


def instance_of(reward: object, spec: object, arguments: dict[str, Any]) -> Callable[..., Any]:
    if isinstance(reward, type):
        try:
            reward = reward(**arguments)
        except Exception as error:  # the user's own constructor
            how = f"with {arguments}" if arguments else "without arguments"
            raise UserError(
                f"reward class {spec!r} cannot be made {how}: {describe(error)}; "
                f"give its parameters defaults or values ({WHERE})"
            ) from error
    if not callable(reward):
        raise UserError(
            f"reward function {spec!r} is a {type(reward).__name__}; it must be callable as "
            f"reward(completions, answers, **columns) ({WHERE})"
        )
    return reward
