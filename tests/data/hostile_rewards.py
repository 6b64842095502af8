"""Rewards that do their worst on the text "3" and are good on every other."""

import math
import os
import time


def one(completions):
    return [1.0] * len(completions)


def sleeps(completions):
    if "3" in completions:
        time.sleep(10**9)
    return one(completions)


def exits(completions):
    if "3" in completions:
        os._exit(3)
    return one(completions)


def raises(completions):
    return [1.0 / (text != "3") for text in completions]


def forgets(completions):
    return None if "3" in completions else one(completions)


def nans(completions):
    return [math.nan if text == "3" else None if text == "4" else 1.0 for text in completions]


def short(completions):
    return [1.0 for text in completions if text != "3"]


def eats(completions):
    held = []
    while "3" in completions:
        held.append(b"x" * 10**7)
    return one(completions)


def good(completions, answers):
    return [float(text == answer) for text, answer in zip(completions, answers, strict=True)]
