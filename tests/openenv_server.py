"""A server of OpenEnv's protocol, as openenv-core 0.3 documents and serves it: /schema, and sessions at /ws.

Does not have POST /reset and /step, which have no session. A session's game is to guess a number from 1 to 10.
"""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from websockets.datastructures import Headers
from websockets.http11 import Request, Response
from websockets.sync.server import ServerConnection, serve

COMMON = {"done": {"type": "boolean"}, "reward": {"type": "number"}, "metadata": {"type": "object"}}
TEXT = {"type": "string"}
OBSERVATION = {"text": TEXT, "left": {"type": "integer"}, **COMMON}
SCHEMAS: dict[str, Any] = {
    "/schema": {
        "action": {"properties": {"message": TEXT, "metadata": {}}},
        "observation": {"properties": OBSERVATION},
    },
    "/two/schema": {
        "action": {"properties": {"message": TEXT}},
        "observation": {"properties": {"text": TEXT, "image": TEXT}},
    },
    "/other/schema": ["another program's"],
}
# A completion, and why its conversation ends.
SERVER_FAILURES = {
    "no number": "RuntimeError: http://.* refused step: .*EXECUTION_ERROR",
    "nonsense": "ValueError: http://.* answered step with no observation",
    "hang up": r"ConnectionError: http://.* ended the session \(",
}


def shown(text: str, reward: float | None, done: bool) -> dict[str, Any]:
    observation = {"text": text, "left": 0}
    data = {"observation": observation, "reward": reward, "done": done}
    return {"type": "observation", "data": data}


def play(session: ServerConnection) -> None:
    secret = 0
    for raw in session:
        message = json.loads(raw)
        if message["type"] == "close":
            return
        if message["type"] == "reset":
            secret = random.Random(message["data"]["seed"]).randint(1, 10)
            rules = f"A game, number {secret % 5}: guess from 1 to 10."
            session.send(json.dumps(shown(rules, None, False)))
            continue
        completion = message["data"]["message"]
        if completion in ("hang up", "never"):
            if completion == "hang up":
                return
            continue
        session.send(json.dumps(answer(completion, secret)))


def answer(completion: str, secret: int) -> Any:
    if completion == "nonsense":
        return {"type": "observation", "data": {}}
    if completion == "no number":
        return {"type": "error", "data": {"message": "int", "code": "EXECUTION_ERROR"}}
    if not completion.isdigit():
        return shown("A number, please. The target number is 1 to 10.", 0.0, False)
    hint = "higher" if int(completion) < secret else "lower"
    return shown(
        f"{completion}: {hint}", float(int(completion) == secret), int(completion) == secret
    )


def schema(_: ServerConnection, request: Request) -> Response | None:
    if request.path == "/ws":
        return None
    found = SCHEMAS.get(request.path)
    status, body = (404, b"") if found is None else (200, json.dumps(found).encode())
    return Response(status, "", Headers({"Content-Length": str(len(body))}), body)


@contextmanager
def served() -> Iterator[str]:
    """Serves at a port of its own, until it is left; the address."""
    with serve(play, "127.0.0.1", 0, process_request=schema) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.socket.getsockname()[1]}"
        server.shutdown()
        thread.join()
