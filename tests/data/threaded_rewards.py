"""Rewards that ask a judge in an event loop, whose thread the module starts when it is imported."""

import asyncio
import threading
import time

loop = asyncio.new_event_loop()
threading.Thread(target=loop.run_forever, name="judge", daemon=True).start()


async def asked(text):
    await asyncio.sleep(0)
    if text == "x":
        raise ValueError("no such judge")
    return 1.0


def judged(completions):
    asking = [asyncio.run_coroutine_threadsafe(asked(text), loop) for text in completions]
    return [one.result() for one in asking]


def hangs(completions):
    time.sleep(10**9)
