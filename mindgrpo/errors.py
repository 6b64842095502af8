"""Defines the exceptions that are meant for the person at the keyboard."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from types import TracebackType
from typing import TextIO

# The exit status of a program that a UserError ends.
USER_ERROR_STATUS = 2
LONGEST_SENTENCE = 2000
# Of OSErrors: the disk, the user's share of it, or what a file may take is used up.
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class UserError(Exception):
    """Says that something the user gave cannot work.

    The message is one sentence: the value, the rule it breaks, the remedy, and where it is set.
    Programs print it as ``mindgrpo: <sentence>`` and exit with status 2. Whatever was quoted in it,
    it is one line of text that any terminal can show.
    """

    def __init__(self, sentence: str) -> None:
        super().__init__(one_line(sentence))

    def _render_traceback_(self) -> list[str]:
        """Returns the lines that IPython shows, in a notebook too."""
        return [f"mindgrpo: {self}"]


class UserErrors(UserError):
    """Says several such things at once, which the user has to change together: `sentences`."""

    def __init__(self, sentences: Sequence[str]) -> None:
        super().__init__(" ".join(sentences))
        self.sentences = tuple(map(one_line, sentences))


def sentences_of(error: UserError) -> tuple[str, ...]:
    return error.sentences if isinstance(error, UserErrors) else (str(error),)


def error_of(sentences: Iterable[str]) -> UserError:
    """Returns one error for sentences of which some may be equal; there has to be one."""
    first, *others = dict.fromkeys(sentences)
    return UserErrors([first, *others]) if others else UserError(first)


class CannotWrite(UserError):
    """Says that a file cannot be written: the disk is full, or it is not writable."""


@contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[None]:
    """Raises CannotWrite for an OSError inside. `path` is what is written where the error names no file."""
    try:
        yield
    except OSError as error:
        remedy = "free space on its disk" if error.errno in FULL else "make it writable"
        target = error.filename or os.fspath(path)
        raise CannotWrite(f"{target} cannot be written ({error.strerror}); {remedy}.") from error


def print_user_error(error: UserError) -> int:
    """Prints `mindgrpo: <sentence>` to standard error, a line for each; returns the exit status."""
    for sentence in sentences_of(error):
        print(f"mindgrpo: {sentence}", file=sys.stderr, flush=True)
    return USER_ERROR_STATUS


def show(stream: TextIO | None, text: str) -> bool:
    """Writes what is there to be looked at; returns False where nobody can read the stream any more.

    Raises nothing: what is only shown ends no run. What the stream's encoding lacks is escaped; a pipe that nobody
    reads leads nowhere from then on, or it would fail again when the process ends.
    """
    if stream is None:
        return False
    try:
        try:
            stream.write(text)
        except UnicodeEncodeError:
            encoding = stream.encoding or "ascii"
            stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        stream.flush()
    except BrokenPipeError:
        with suppress(OSError, ValueError), open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())
        return False
    except (OSError, ValueError):  # a full disk, a terminal that has gone, a stream that was closed
        pass
    return True


def escape_what_cannot_be_shown() -> None:
    """Lets this program print what the encoding of its standard output lacks as escapes, where `print` would raise."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):
            stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]


def is_interactive() -> bool:
    """Returns whether somebody types into this process: Python's prompt, IPython, or a notebook."""
    return hasattr(sys, "ps1")


@cache
def end_programs_without_traceback() -> None:
    """Lets a UserError that nobody catches end a Python program as it ends `mindgrpo`: a sentence and status 2.

    Every other exception goes to the hook that was there before. An interactive session shows the sentence and stays
    open. IPython and notebooks never call the hook: they ask the error for its lines.
    """
    previous = sys.excepthook

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if not isinstance(error, UserError):
            previous(kind, error, trace)
            return
        status = print_user_error(error)
        if not is_interactive():
            raise SystemExit(status)

    sys.excepthook = hook


def counted(number: int, noun: str, plural: str | None = None) -> str:
    """Returns the number with its noun: `1 rank`, `8 ranks`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def whole_number(text: str) -> int | None:
    """Returns the number that a word is, from 0 up; None for one of other letters or of more than 18 digits."""
    return int(text) if text.isdecimal() and len(text) <= 18 else None


def one_line(text: str) -> str:
    """Turns line breaks into spaces, escapes other control characters, leaves out the middle of long texts."""
    if len(text) > LONGEST_SENTENCE:
        half = LONGEST_SENTENCE // 2
        text = f"{text[:half]} [...] {text[-half:]}"
    text = " ".join(text.split()) if "\n" in text or "\r" in text else text
    if text.isprintable():
        return text
    return "".join(letter if letter.isprintable() else _escaped(letter) for letter in text)


def _escaped(letter: str) -> str:
    return letter.encode("unicode_escape", "backslashreplace").decode("ascii")
