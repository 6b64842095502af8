"""Mutations of what users hand over: bytes, text, JSON and YAML trees. A function of the random generator alone.

Refuses to know what a file is for: `inputs.py` says which mutations fit it.
"""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from typing import Any

Value = Any
Way = tuple[list[Any], Any]

# Numbers, texts and shapes that programs were never tried with; those in RAW are written as they stand.
VALUES: tuple[Value, ...] = (
    *(None, True, False, 0, 1, -1, 2, 3, 7, 0.5, -0.0, 1e308, -1e-320, 1e30),
    *(2**31 - 1, 2**31, 2**32, 2**53 + 1, 2**63 - 1, 2**63, -(2**63) - 1, 10**30, 10**400),
    *(
        "",
        " ",
        "0",
        "-1",
        "1e400",
        "nan",
        "null",
        "true",
        "../../etc/passwd",
        "/etc/passwd",
        "/dev/zero",
    ),
    *(
        "\x00",
        "a\x00b",
        "a\nb\r\nc",
        "\ud800",
        "\ufeff",
        "\u202e",
        "é" * 300,
        "x" * 1_000_000,
        "%s%n{0}{}",
    ),
    *(
        "{{ ''.__class__ }}",
        "${HOME}",
        "$(touch hacked)",
        "; rm -rf .",
        "__import__('os').system('touch hacked')",
    ),
    *(
        [],
        {},
        [[]],
        [None],
        {"": None},
        [1, "a", None],
        {"a": {"b": {"c": []}}},
        [0] * 3000,
        ["a", "a"],
    ),
    *({"__class__": "x"}, {"a": 1, "A": 2}),
)
RAW = (
    "NaN",
    "Infinity",
    "-Infinity",
    "1" * 5000,
    "[" * 500 + "]" * 500,
    "[" * 100_000,
    '{"a":' * 60_000,
)
RAW_YAML = (
    *(
        "!!python/object/apply:os.system ['touch hacked']",
        "!!python/name:os.system",
        "!!binary 'a'",
        "!!int x",
    ),
    *(
        "!!set {a, b}",
        "!!omap [a: 1]",
        "!!timestamp 9",
        "!!float ''",
        "!!bool x",
        "!!null [1]",
        "!x y",
        "&a *a",
    ),
    *(
        "*nothing",
        "&a [*a, *a]",
        "{a: 1, a: 2}",
        "{[1]: 2}",
        "{? {a: 1} : 2}",
        "|\n  x",
        ">-\n",
        "'",
        '"\\UFFFFFFFF"',
    ),
    *(
        "0x" + "f" * 3000,
        "1_0_0",
        ".nan",
        "-.inf",
        "1e999",
        "0o17",
        "1:30",
        "2024-01-01",
        "@",
        "`",
        "%",
        "~",
        "\t- a",
    ),
    *("[" * 400, "{a: " * 400, "- " * 300 + "a", "<<: 3", "{<<: [1]}", '"\\ud800"', "\x85", "\x07"),
)
BOMB = "a: &a [l,l,l,l,l,l,l,l,l]\n" + "".join(
    f"{k}: &{k} [{','.join([f'*{j}'] * 9)}]\n" for j, k in zip("abcdefg", "bcdefgh", strict=True)
)
MAP_BOMB = "a: &a {x: 1, y: 2}\n" + "".join(
    f"{k}: &{k} {{p: *{j}, q: *{j}, r: *{j}, s: *{j}}}\n"
    for j, k in zip("abcdefghijklm", "bcdefghijklmn", strict=True)
)


def mutated_bytes(given: bytes, draw: random.Random) -> bytes:
    data = bytearray(given)
    for _ in range(draw.choice((1, 1, 1, 2, 5, 40))):
        place = draw.randrange(len(data) + 1)
        length = draw.choice((1, 1, 2, 4, 8, 100))
        kind = draw.randrange(8)
        if kind == 0 and data:
            data[min(place, len(data) - 1)] ^= 1 << draw.randrange(8)
        elif kind == 1:
            data[place : place + length] = draw.randbytes(length)
        elif kind == 2:
            del data[place : place + length]
        elif kind == 3:
            del data[place:]
        elif kind == 4:
            data[place:place] = data[place : place + length] * draw.choice((1, 2, 50))
        elif kind == 5:
            data[place:place] = draw.choice(
                (b"\x00", b"\xff", b"\xef\xbb\xbf", b"\r", b"\n", b'"', b"\xed\xa0\x80")
            )
        elif kind == 6:
            data[place : place + 8] = draw.choice((0, 1, 2**31, 2**63, 2**64 - 1)).to_bytes(
                8, "little"
            )
        else:
            data[place:place] = draw.randbytes(length)
    return bytes(data)


def mutated_text(data: bytes, draw: random.Random) -> bytes:
    """Lines and whole files: other ends of lines, marks at the start, lines twice, elsewhere or not at all."""
    lines = data.splitlines(keepends=True) or [b""]
    place = draw.randrange(len(lines))
    kind = draw.randrange(10)
    if kind == 0:
        return data.replace(b"\n", b"\r\n")
    if kind == 1:
        return b"\xef\xbb\xbf" + data
    if kind == 2:
        return draw.choice((b"", b"\n", b"\x00" * 4096, b" " * 10_000, b"\xff\xfe" + data))
    if kind == 3:
        return data.decode("utf-8", "replace").encode(
            draw.choice(("utf-16", "utf-32", "latin-1")), "replace"
        )
    if kind == 4:
        lines.insert(draw.randrange(len(lines) + 1), lines[place])
    elif kind == 5:
        lines.insert(draw.randrange(len(lines) + 1), lines.pop(place))
    elif kind == 6:
        del lines[place]
    elif kind == 7:
        lines[place] = lines[place][: draw.randrange(len(lines[place]) + 1)]
    elif kind == 8:
        lines[place] = draw.choice((b" ", b"\t", b"- ", b"#", b"'", b'"')) + lines[place]
    else:
        lines[place] = mutated_bytes(lines[place], draw)
    return b"".join(lines)


def ways(tree: Value, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The places of every value in a tree of lists and dictionaries, the tree itself first."""
    yield path
    if isinstance(tree, dict):
        for key, held in tree.items():
            yield from ways(held, (*path, key))
    elif isinstance(tree, list):
        for place, held in enumerate(tree[:40]):
            yield from ways(held, (*path, place))


def mutated_tree(
    tree: Value, draw: random.Random, raw: tuple[str, ...]
) -> tuple[Value, dict[str, str]]:
    """The tree with a few values replaced, and texts to write as they are for the marks that stand in it."""
    tree, marks = copy.deepcopy(tree), {}
    for number in range(draw.choice((1, 1, 1, 2, 3))):
        path = draw.choice(list(ways(tree)))
        kind = draw.randrange(10)
        value = near(at(tree, path), draw) if kind < 3 else copy.deepcopy(draw.choice(VALUES))
        if kind == 9:
            value = f"RAW{number}MARK"
            marks[value] = draw.choice(raw)
        if not path:
            if draw.random() < 0.8:
                continue
            return value, marks
        holder = at(tree, path[:-1])
        if kind == 8 and isinstance(holder, dict):
            renamed = draw.choice(
                ("", str(path[-1]) + "s", str(path[-1])[:-1], "__class__", "\ud800", "a.b", "\x00")
            )
            holder[renamed] = holder.pop(path[-1])
        elif kind == 7:
            del holder[path[-1]]
        else:
            holder[path[-1]] = value
    return tree, marks


def at(tree: Value, path: tuple[Any, ...]) -> Value:
    for part in path:
        tree = tree[part]
    return tree


def near(value: Value, draw: random.Random) -> Value:
    """A value of the same kind that is a little or far off."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return draw.choice(
            (
                value + 1,
                value - 1,
                -value,
                value * 3,
                value * 10**6,
                value * 10**12,
                float(value) if abs(value) < 2**1000 else -value,
                str(value),
            )
        )
    if isinstance(value, float):
        return draw.choice((-value, value * 1e9, value / 1e9, str(value)))
    if isinstance(value, str):
        return draw.choice(
            (
                value + "x",
                value[:-1],
                value.upper(),
                value * 1000,
                [value],
                f"../{value}",
                f"/{value}",
            )
        )
    if isinstance(value, list):
        return draw.choice((value * 2, value[1:], value[::-1], value + [None], {"0": value}))
    if isinstance(value, dict):
        return draw.choice(
            (list(value.items()), {**value, "more": 1}, dict(list(value.items())[1:]))
        )
    return draw.choice((0, "", [], {}))


def as_json(tree: Value, marks: dict[str, str], draw: random.Random) -> bytes:
    text = json.dumps(tree, ensure_ascii=True)
    for mark, raw in marks.items():
        text = text.replace(f'"{mark}"', raw)
    if draw.random() < 0.03:  # a key twice
        text = text.replace("{", '{"a": 1, "a": 2, ', 1)
    return text.encode()


def mutated_json(data: bytes, draw: random.Random) -> bytes:
    if draw.random() < 0.3:
        return draw.choice((mutated_bytes, mutated_text))(data, draw)
    tree, marks = mutated_tree(json.loads(data), draw, RAW)
    return as_json(tree, marks, draw)


def mutated_lines(data: bytes, draw: random.Random) -> bytes:
    """One object a line, as in JSONL."""
    if draw.random() < 0.3:
        return draw.choice((mutated_bytes, mutated_text))(data, draw)
    lines = data.splitlines()
    place = draw.randrange(len(lines))
    tree, marks = mutated_tree(json.loads(lines[place]), draw, RAW)
    lines[place] = as_json(tree, marks, draw)
    return b"\n".join(lines) + b"\n"


def mutated_yaml(data: bytes, draw: random.Random) -> bytes:
    kind = draw.random()
    if kind < 0.25:
        return draw.choice((mutated_bytes, mutated_text))(data, draw)
    if kind < 0.3:
        bomb = draw.choice((BOMB, MAP_BOMB, "a: &a\n  b: *a\n", "? " * 2000)).encode()
        return draw.choice((bomb, data + bomb, bomb + data))
    import yaml

    tree, marks = mutated_tree(yaml.safe_load(data), draw, RAW_YAML + RAW)
    try:
        text = yaml.safe_dump(tree, allow_unicode=draw.random() < 0.5, width=10**9)
    except (yaml.YAMLError, UnicodeError, ValueError):
        return data + b"\nlast: '\xed\xa0\x80'\n"
    for mark, raw in marks.items():
        text = text.replace(mark, raw)
    return text.encode("utf-8", "surrogatepass")


Mutation = Callable[[bytes, random.Random], bytes]
