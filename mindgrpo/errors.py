"""The one exception that is meant for the person at the keyboard. Refuses to carry a traceback."""

from __future__ import annotations


class UserError(Exception):
    """Something the user gave cannot work.

    The message is one sentence: the value, the rule it breaks, the remedy, and where it stands.
    Programs print it as ``mindgrpo: <sentence>`` and exit with status 2.
    """
