"""Rewards that are slow, talkative, forgetful or leave things behind."""

import asyncio
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier


def spins(completions):
    while len(completions[0]) == 1:
        pass
    return [1.0] * len(completions)


def slow_together(completions):
    time.sleep(10**9 if len(completions) > 1 else 0)
    return [1.0] * len(completions)


def slow_after_raising(completions):
    if len(completions) > 1:
        raise ValueError("one at a time")
    if completions == ["1"]:
        time.sleep(10**9)
    return [1.0]


def prints(completions):
    print("first line")
    for _ in range(20000):
        print("x" * 100)
    print("more", file=sys.stderr)
    return [1.0] * len(completions)


def loaded(completions):
    return [float(name in sys.modules) for name in completions]


def how_many(completions):
    return [float(len(completions))] * len(completions)


class Counter:
    def __init__(self, start=0):
        self.calls = start

    def __call__(self, completions):
        self.calls += 1
        return [float(self.calls)] * len(completions)


class PickyCounter(Counter):
    def __call__(self, completions):
        scores = super().__call__(completions)
        return [score / (text != "x") for score, text in zip(scores, completions, strict=True)]


def writes_half_a_message(completions):
    while "3" in completions:
        for descriptor in os.listdir("/proc/self/fd"):
            if "socket:" in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                os.write(int(descriptor), b"\0\0\xff\xff")
        time.sleep(10**9)
    return [1.0] * len(completions)


async def waits(completions):
    await asyncio.sleep(0.01)
    return [1.0] * len(completions)


def closes_its_output(completions):
    os.close(1)
    os.close(2)
    time.sleep(0.5)
    return [1.0] * len(completions)


def leaves_a_process(completions):
    subprocess.Popen(["sleep", os.environ["LEFT_BEHIND"]], start_new_session=True)
    time.sleep(10**9 if len(completions[0]) == 1 else 0)
    return [1.0] * len(completions)


kept = []


def keeps_what_it_has_read(completions):
    kept.append(b"x" * 10**9)
    return [1.0] * len(completions)


def asks_with_many_threads(completions):
    all_run = Barrier(len(completions))
    with ThreadPoolExecutor(len(completions)) as pool:
        list(pool.map(lambda _: all_run.wait(60), completions))
    return [1.0] * len(completions)
