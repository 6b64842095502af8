"""Which names exist, and what an unknown one was probably meant to be.

Only suggests: a near name is never taken for the given one.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mindgrpo.config.neighbours import NEIGHBOUR_SECTIONS, NEIGHBOURS, WITHOUT_COUNTERPART
from mindgrpo.config.retired import PENDING, RETIRED
from mindgrpo.config.schema import LIVE

KNOWN: tuple[str, ...] = (*LIVE, *PENDING, *RETIRED)
SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:end]) for key in KNOWN for end in range(1, key.count(".") + 1)
)


def suggestion(key: str, dashes: str = "") -> str:
    """The remedy for an unknown dotted key or bare name, as the end of a sentence."""
    section, _, leaf = key.rpartition(".")
    if leaf in NEIGHBOURS:
        return f"it is called {dashes}{NEIGHBOURS[leaf]} here"
    if leaf in WITHOUT_COUNTERPART:
        return WITHOUT_COUNTERPART[leaf]
    elsewhere = [known for known in KNOWN if known.rpartition(".")[2] == leaf]
    if elsewhere:
        return _mention(_nearest(key, elsewhere, cutoff=0.0) or elsewhere[0], dashes)
    beside = {known.rpartition(".")[2]: known for known in KNOWN if _section(known) == section}
    near = _nearest(leaf, beside)
    if near:
        return _mention(beside[near], dashes)
    everywhere = {known.rpartition(".")[2]: known for known in reversed(KNOWN)}
    near = _nearest(leaf, everywhere)
    if near:
        return _mention(everywhere[near], dashes)
    return "no key comes near it, leave it out"


def section_suggestion(section: str) -> str:
    elsewhere = NEIGHBOUR_SECTIONS.get(section.rpartition(".")[2])
    if elsewhere:
        return f"what other trainers keep there is in {elsewhere} here"
    near = _nearest(section, SECTIONS) or _nearest(section, KNOWN, cutoff=0.75)
    top = sorted(name for name in SECTIONS if "." not in name)
    return f"did you mean {near}" if near else f"the sections are {', '.join(top)}"


def unknown(key: str, is_section: bool) -> str:
    """What is wrong with a key that is neither live, pending nor retired, and the remedy."""
    parts = key.split(".")
    if parts[-1] in {*NEIGHBOURS, *WITHOUT_COUNTERPART} and not is_section:
        return f"'{key}' is no key of the configuration; {suggestion(key)}"
    prefixes = [".".join(parts[:end]) for end in range(1, len(parts))]
    for prefix in prefixes:
        if prefix in LIVE or prefix in PENDING:
            return f"{prefix} takes one value, but is given the section '{key[len(prefix) + 1 :]}'"
        if prefix not in SECTIONS:
            return f"'{prefix}' is no section; {section_suggestion(prefix)}"
    if is_section:
        return f"'{key}' is no section; {section_suggestion(key)}"
    return f"'{key}' is no key of the configuration; {suggestion(key)}"


def _mention(key: str, dashes: str) -> str:
    retired = f" (which is retired: {RETIRED[key]})" if key in RETIRED else ""
    return f"did you mean {dashes}{key}{retired}"


def _section(key: str) -> str:
    return key.rpartition(".")[0]


def _nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return near[0] if near else None
