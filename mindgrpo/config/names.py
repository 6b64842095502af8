"""Which names exist, and what an unknown one was probably meant to be. A near name is only suggested, never taken."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from mindgrpo.config.aliases import aliases
from mindgrpo.config.retired import PENDING, RETIRED
from mindgrpo.config.schema import LIVE

KNOWN: tuple[str, ...] = (*LIVE, *PENDING, *RETIRED)
SECTIONS: frozenset[str] = frozenset(
    ".".join(key.split(".")[:end]) for key in KNOWN for end in range(1, key.count(".") + 1)
)


def leaf_of(key: str) -> str:
    return key.rpartition(".")[2]


def suggestion(key: str, dashes: str = "") -> str:
    """Returns the remedy for an unknown dotted key or bare name, as the end of a sentence."""
    if remedy := aliases().remedy(key, dashes):
        return remedy
    section, _, leaf = key.rpartition(".")
    same = [known for known in KNOWN if leaf_of(known) == leaf]
    near = nearest(key, same, cutoff=0.0)
    for among in (section, None):
        if not near:
            leaves = {
                leaf_of(known): known
                for known in reversed(KNOWN)
                if among is None or known.rpartition(".")[0] == among
            }
            near = leaves.get(nearest(leaf, leaves) or "")
    if not near:
        return "no key comes near it, leave it out"
    retired = f" (which is retired: {RETIRED[near]})" if near in RETIRED else ""
    return f"did you mean {dashes}{near}{retired}"


def section_suggestion(section: str) -> str:
    elsewhere = aliases().sections.get(leaf_of(section))
    if elsewhere:
        return f"what other trainers keep there is in {elsewhere} here"
    near = nearest(section, SECTIONS) or nearest(section, KNOWN, cutoff=0.75)
    top = sorted(name for name in SECTIONS if "." not in name)
    return f"did you mean {near}" if near else f"the sections are {', '.join(top)}"


def unknown(key: str, is_section: bool) -> str:
    """Says what is wrong with a key that is neither live, pending nor retired, and the remedy."""
    words = key.split(".") if is_section or not aliases().remedy(key) else []
    for prefix in (".".join(words[:end]) for end in range(1, len(words))):
        if prefix in LIVE or prefix in PENDING:
            return f"{prefix} takes one value, but is given the section '{key[len(prefix) + 1 :]}'"
        if prefix not in SECTIONS:
            return f"'{prefix}' is no section; {section_suggestion(prefix)}"
    if is_section:
        return f"'{key}' is no section; {section_suggestion(key)}"
    return f"'{key}' is no key of the configuration; {suggestion(key)}"


def nearest(name: str, names: Iterable[str], cutoff: float = 0.6) -> str | None:
    near = difflib.get_close_matches(name, sorted(names), n=1, cutoff=cutoff)
    return near[0] if near else None
