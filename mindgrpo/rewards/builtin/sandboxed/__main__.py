"""`python FOLDER run|answer|judge ORDER [QUESTIONS REPLIES]`, where the last three are open descriptors.

Limits itself to what its order allows before anything of the order runs.
"""

import builtins
import marshal
import os
import resource
import sys
from _sitebuiltins import Quitter

role, order_descriptor, *pipes = sys.argv[1], *map(int, sys.argv[2:])
with os.fdopen(order_descriptor, "rb") as file:
    order = marshal.load(file)
for kind, most in (
    (resource.RLIMIT_AS, order["memory"]),
    (resource.RLIMIT_CPU, int(order["seconds"]) + 2),
    (resource.RLIMIT_FSIZE, order["output"]),
    (resource.RLIMIT_NOFILE, 64),
    (resource.RLIMIT_CORE, 0),
):
    resource.setrlimit(kind, (most, most))
if hasattr(sys, "set_int_max_str_digits"):  # since Python 3.10.7
    sys.set_int_max_str_digits(0)
# As Python's `site` does, which would take as long as all the rest.
builtins.exit, builtins.quit = Quitter("exit", "EOF"), Quitter("quit", "EOF")
sys.argv = ["completion"]

if role == "judge":
    import judge

    verdicts = os.dup(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.path[:1] = order["path"]
    judge.judge_all(order, judge.Line(*pipes), verdicts)
    os._exit(0)
else:
    import completion

    sys.path[:1] = order["path"]
    namespace = completion.run(order["code"])
    if role == "answer":
        completion.answer_questions(namespace, *pipes)
