"""Completions that try to pass assertions without the right answer, and what each earns: nothing.

Does NOT prove that there is no other cheat. A completion may remember arguments and answers that its prompt
showed, and a weak assertion stays weak.
"""

from __future__ import annotations

import pytest

from mindgrpo.rewards.builtin.program import code_reward

FENCED = "```python\n{}\n```"
ASSERTIONS = ["assert add(1, 2) == 3", "assert add(10, 5) == 15"]

ALWAYS_EQUAL = """
class Anything:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __bool__(self): return True
    __lt__ = __le__ = __gt__ = __ge__ = __contains__ = __eq__
    __hash__ = None
    def __getattr__(self, name): return self
    def __call__(self, *_): return self
    def __sub__(self, other): return self
    __rsub__ = __getitem__ = __sub__
    def __abs__(self): return self
"""

# Each is tried on ASSERTIONS.
CHEATS = {
    "writes the token that stands in the frames below": """
import os, sys
def add(a, b): return None
frame = sys._getframe()
while frame:
    for value in list(frame.f_locals.values()):
        if isinstance(value, dict) and 'token' in value:
            for fd in range(3, 64):
                try: os.write(fd, f"{value['token']} 99\\n".encode())
                except OSError: pass
            os._exit(0)
    frame = frame.f_back
""",
    "returns what equals everything": ALWAYS_EQUAL + "def add(a, b): return Anything()",
    "is what equals everything": ALWAYS_EQUAL + "add = Anything()",
    "returns an int that equals everything": """
class Number(int):
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = int.__hash__
def add(a, b): return Number(0)
""",
    "returns mock.ANY": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "reads the constants of its caller": """
import sys
def add(a, b):
    frame = sys._getframe(1)
    while frame:
        if frame.f_code.co_filename == 'test':
            return [c for c in frame.f_code.co_consts if isinstance(c, int)][-1]
        frame = frame.f_back
""",
    "looks for assertions in memory": """
import ast, gc, re
def add(a, b):
    for found in gc.get_objects():
        texts = found.values() if isinstance(found, dict) else found if isinstance(found, list) else ()
        for text in texts:
            for part in text if isinstance(text, list) else [text]:
                match = isinstance(part, str) and re.match(rf'assert add.{a}, {b}. == (.+)', part)
                if match: return ast.literal_eval(match[1])
""",
    "replaces exec": "import builtins\nbuiltins.exec = lambda *_: None",
    "replaces compile": """
import builtins
old = builtins.compile
builtins.compile = lambda text, *rest: old('pass', *rest)
""",
    "follows frames with a tracer": """
import sys
def tracer(frame, event, arg):
    if frame.f_code.co_filename == 'test':
        frame.f_globals['add'] = type('', (), {'__eq__': lambda *_: True, '__call__': lambda s, *_: s})()
    return tracer
sys.settrace(tracer)
def add(a, b): return None
""",
    "ends the process with success": "import os\nos._exit(0)",
    "ends the process in the call": "import os\ndef add(a, b): os._exit(0)",
    "raises SystemExit in the call": "def add(a, b): raise SystemExit(0)",
    "raises what could end an assertion early": "def add(a, b): raise StopIteration",
    "raises an AssertionError's opposite": """
class Fine(BaseException): pass
def add(a, b): raise Fine
""",
    "prints verdicts": "print('pp' * 9)\ndef add(a, b): print('pp'); return None",
    "writes verdicts to every descriptor": """
import os
def add(a, b):
    for fd in range(64):
        try: os.write(fd, b'pppppppp')
        except OSError: pass
""",
    "writes verdicts before it is asked and stops": """
import os, time
for fd in range(64):
    try: os.write(fd, b'pp')
    except OSError: pass
time.sleep(60)
""",
    "answers before it is asked": """
import os, plain_data
for value in (None, 3, 15):
    for fd in range(3, 64):
        try: plain_data.send(fd, plain_data.encode([bytes(8), 'value', value, []]))
        except OSError: pass
def add(a, b): return None
""",
    "sends a message that is none": """
import os, struct
def add(a, b):
    for fd in range(3, 64):
        try: os.write(fd, struct.pack('<I', 1 << 31) + b'[' * 99999)
        except OSError: pass
""",
    "nests its message deeper than any parser": """
import sys
sys.setrecursionlimit(10**6)
def add(a, b):
    deep = []
    for _ in range(90000): deep = [deep]
    return deep
""",
    "returns 100 MB": "def add(a, b): return 'x' * (100 << 20)",
    "replaces the modules that judge": """
import sys
for name in ('marshal', 'judge', 'plain_data', 'struct', 'ast', 'symtable'):
    sys.modules[name] = None
sys.modules['__main__'].encode = lambda *_, **__: b'p'
def add(a, b): return None
""",
    "returns a function": "def add(a, b): return lambda: 3",
    "returns nothing and changes what it is given": "def add(a, b): a = b = 3",
}


@pytest.mark.parametrize("code", CHEATS.values(), ids=CHEATS.keys())
def test_a_cheat_earns_nothing(code: str) -> None:
    assert code_reward([FENCED.format(code)], [""], None, [ASSERTIONS], seconds=3.0) == [0.0]


# Serves the judge itself, after frames have told it the pipes.
OWN_SERVER = """
import sys
from plain_data import encode, receive, send
frame = sys._getframe()
while 'pipes' not in frame.f_locals:
    frame = frame.f_back
questions, replies = frame.f_locals['pipes']
while True:
    nonce, kind, name, *given = receive(questions)
    reply = {} if kind == 'call' else ['callable'] if name else ['missing']
    send(replies, encode([nonce, *reply]) if isinstance(reply, list) else reply)
"""


@pytest.mark.parametrize(
    ("reply", "reward"),
    [
        ("['value', sum(given[0]), []]", 1.0),
        ("['value', 4, []]", 0.0),
        ("['value', None, [3]]", 0.0),
        ("['value', 3, 3]", 0.0),
        ("['value']", 0.0),
        ("[['value'], 3, []]", 0.0),
        ("['raised', 'StopIteration', '']", 0.0),
        ("['raised', ['ValueError'], None]", 0.0),
        ("['passed']", 0.0),
        ("[]", 0.0),
        ("encode(None)", 0.0),
        ("encode([b'', 'value', 3, []])", 0.0),
        ("encode([nonce, 'value', sum(given[0]), []]) + b'x'", 0.0),
        # A type that there is none of, a size beyond the end, and a set that holds a list.
        ("b'\\x63' + bytes(9)", 0.0),
        ("b'\\7' + b'\\xff' * 4 + encode(nonce)", 0.0),
        (
            "b'\\7\\4\\0\\0\\0' + encode(nonce) + encode('value') + b'\\x09\\1\\0\\0\\0' + 2 * encode([])",
            0.0,
        ),
    ],
)
def test_a_completion_that_serves_the_judge_must_give_right_values_too(
    reply: str, reward: float
) -> None:
    code = OWN_SERVER.replace("{}", reply)
    assert code_reward([FENCED.format(code)], [""], None, [ASSERTIONS], seconds=3.0) == [reward]


# Name: completion, setup, assertion. Right answers of what is asked for would pass.
CHEATS_ON = {
    "replaces a built-in that the assertion uses": (
        "import builtins\nbuiltins.abs = lambda *_: 0.0\ndef area(r): return 0.0",
        "",
        "assert abs(area(2) - 12.566) < 0.001",
    ),
    "defines a name of a built-in": (
        "def len(x): return 3\ndef words(x): return []",
        "",
        "assert len(words('a b c')) == 3",
    ),
    "defines all and leaves out the function": (
        "def all(x): return True",
        "",
        "assert all(double(x) == 2 * x for x in range(3))",
    ),
    "replaces a function of a module": (
        "import math\nmath.isclose = lambda *_, **__: True\ndef root(x): return 0.0",
        "import math",
        "assert math.isclose(root(2), 1.41421356)",
    ),
    "replaces a module that the assertion does not import": (
        "class math:\n    isclose = staticmethod(lambda *_: True)\ndef root(x): return 0.0",
        "",
        "assert math.isclose(root(2), 1.41421356)",
    ),
    "defines a helper that the assertion should have imported": (
        "def isclose(*_): return True\ndef root(x): return 0.0",
        "",
        "assert isclose(root(2), 1.41421356)",
    ),
    "hears the answer in a helper": (
        "def approx(x): return 0.0\ndef root(x): return 0.0",
        "",
        "assert root(2) == approx(1.41421356)",
    ),
    "agrees with a constant of its own": (
        "ROOT = 0.0\ndef root(x): return 0.0",
        "",
        "assert root(2) == ROOT",
    ),
    "replaces import": (
        "import builtins\nbuiltins.__import__ = lambda *_, **__: None\ndef root(x): return 0.0",
        "from math import isclose",
        "assert isclose(root(2), 1.41421356)",
    ),
    "redefines a helper of the setup": (
        "def close(a, b): return True\ndef root(x): return 0.0",
        "def close(a, b):\n    return abs(a - b) < 1e-6",
        "assert close(root(4), 2.0)",
    ),
    "is a float that is less than everything": (
        "class Low(float):\n    def __lt__(s, o): return True\n    __gt__ = __lt__\n"
        "    def __sub__(s, o): return s\n    def __abs__(s): return s\ndef root(x): return Low(9)",
        "",
        "assert abs(root(4) - 2.0) < 1e-6",
    ),
    "is NaN": ("def root(x): return float('nan')", "", "assert abs(root(4) - 2.0) < 1e-6"),
    "is a list of what equals everything": (
        ALWAYS_EQUAL + "def pair(x): return [Anything(), Anything()]",
        "",
        "assert pair(1) == [1, 1]",
    ),
    "is a string that contains everything": (
        "class Text(str):\n    def __contains__(s, o): return True\ndef say(): return Text('')",
        "",
        "assert 'hello' in say()",
    ),
    "is a dict that equals everything": (
        "class Table(dict):\n    def __eq__(s, o): return True\n    def __missing__(s, k): return 3\n"
        "def count(x): return Table()",
        "",
        "assert count('aaa') == {'a': 3}",
    ),
    "ends a map before it has begun": (
        "def double(x): raise StopIteration",
        "",
        "assert all(map(lambda x: double(x) == 2 * x, [1, 2, 3]))",
    ),
    "is code for an assertion that evaluates it": (
        'def make(x): return \'__import__("os").write(1, b"pppp") or 24\'',
        "",
        "assert eval(make(4)) == 24",
    ),
    "empties what it is compared with": (
        "def ordered(x):\n    x.clear()\n    return x",
        "",
        "x = [3, 1, 2]\nassert ordered(x) == sorted(x) and len(x) == 3",
    ),
    "makes an assertion swallow its failure": (
        "import os\ndef risky(x): os._exit(0)",
        "",
        "try:\n    risky(1)\nexcept BaseException:\n    pass",
    ),
    "returns an object to an assertion that swallows everything": (
        "def risky(x): return object()",
        "",
        "try:\n    assert risky(1) == 1\nexcept BaseException:\n    pass",
    ),
    "is a constant that equals everything": (
        ALWAYS_EQUAL + "SIZE = Anything()",
        "",
        "assert SIZE == 3",
    ),
    "lets its class decide": (
        ALWAYS_EQUAL + "class Stack(Anything): pass",
        "",
        "s = Stack()\ns.push(1)\nassert s.pop() == 1",
    ),
}


@pytest.mark.parametrize(("code", "setup", "assertion"), CHEATS_ON.values(), ids=CHEATS_ON.keys())
def test_a_cheat_on_a_certain_assertion_earns_nothing(
    code: str, setup: str, assertion: str
) -> None:
    assert code_reward([FENCED.format(code)], [""], None, [[assertion]], [setup]) == [0.0]


def test_expected_output_is_not_where_a_program_could_print_it() -> None:
    code = """
import gc, os, sys
texts = [str(sys._getframe(i).f_locals) for i in range(9) if i < 1 or sys._getframe(0).f_back]
texts += [str(found) for found in gc.get_objects() if isinstance(found, (dict, list))]
for fd in range(64):
    try: texts.append(os.pread(fd, 1 << 16, 0).decode())
    except OSError: pass
texts += os.environ.values()
print(next((t for t in texts if '8' + '1234' in t), ''))
"""
    cases = [[{"input": "1", "output": "81234"}]]
    assert code_reward([FENCED.format(code)], [""], cases) == [0.0]
