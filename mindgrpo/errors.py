"""The one exception that is meant for the person at the keyboard."""

from __future__ import annotations

LONGEST_SENTENCE = 2000


class UserError(Exception):
    """Something the user gave cannot work.

    The message is one sentence: the value, the rule it breaks, the remedy, and where it stands.
    Programs print it as ``mindgrpo: <sentence>`` and exit with status 2. Whatever was quoted in it,
    it is one line of text that any terminal can show.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(one_line(sentence))


def one_line(text: str) -> str:
    """Line breaks as spaces, other control characters escaped, the middle of long texts left out."""
    if len(text) > LONGEST_SENTENCE:
        half = LONGEST_SENTENCE // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    text = " ".join(text.split()) if "\n" in text or "\r" in text else text
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")
