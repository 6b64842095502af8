"""A reward that computes in processes which import this file by the name of what they are given."""

import dataclasses
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context


@dataclasses.dataclass
class Item:
    text: str


def length(item):
    return Item(item.text * 1), float(len(item.text))


def in_other_processes(completions):
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        results = list(pool.map(length, map(Item, completions)))
    assert [item for item, _ in results] == list(map(Item, completions))
    return [score for _, score in results]
