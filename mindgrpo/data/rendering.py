"""Renders chat templates with the code of transformers itself, within limits of time and memory.

The text is that of `apply_chat_template`, byte for byte: same sandbox, same filters, same variables. Importing this
module imports transformers (without torch), which takes 0.7 s of a core; so it is imported where a first prompt is
rendered, and by the fork server once for all ranks.
"""

from __future__ import annotations

import os
import resource
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from jinja2 import TemplateError

# Without torch transformers prints advice that has nothing to do with templates.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers.utils.chat_template_utils import render_jinja_template  # noqa: E402

MAX_SECONDS = 5.0
MAX_GIB = 2
PAGE_BYTES = resource.getpagesize()

Spans = list[tuple[int, int]]


class OutOfTime(BaseException):
    """Not an Exception: jinja's compiler swallows those where it computes constants."""


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    *,
    with_spans: bool = False,
    **variables: Any,
) -> tuple[str, Spans]:
    """Returns the text and, `with_spans`, [start, end) characters of each `{% generation %}` block in it.

    `variables` are those of `apply_chat_template`: add_generation_prompt, tools, documents (None where a conversation
    has none), special tokens. Raises jinja2.TemplateSyntaxError for text that is no template, jinja2.TemplateError
    beyond the limits, and whatever the template's operations raise.
    """
    try:
        with limits():
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=template,
                return_assistant_tokens_mask=with_spans,
                **variables,
            )
    except OutOfTime as error:
        raise TemplateError(
            f"it takes more than {MAX_SECONDS:g} s of processor time for one prompt"
        ) from error
    except MemoryError as error:
        raise TemplateError(f"it takes more than {MAX_GIB} GiB of memory for one prompt") from error
    texts, spans = rendered
    return texts[0], spans[0] if spans else []


@contextmanager
def limits() -> Iterator[None]:
    """Ends what runs inside after MAX_SECONDS of the process's time, and lets it allocate MAX_GIB.

    Raises OutOfTime or MemoryError. Both limits are the process's own, so they are set in its main thread alone, in
    which runs prepare their prompts; other threads render without.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = address_space_bytes() + (MAX_GIB << 30)
    bounds = [size for size in (wanted, soft, hard) if size != resource.RLIM_INFINITY]
    handler = signal.signal(signal.SIGVTALRM, _out_of_time)
    resource.setrlimit(resource.RLIMIT_AS, (min(bounds), hard))
    # Again every second, in case the first one met code that no exception leaves.
    signal.setitimer(signal.ITIMER_VIRTUAL, MAX_SECONDS, 1.0)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGVTALRM, handler)


def address_space_bytes() -> int:
    """What RLIMIT_AS counts of this process now."""
    statm = os.open("/proc/self/statm", os.O_RDONLY)
    try:
        return int(os.read(statm, 64).split()[0]) * PAGE_BYTES
    finally:
        os.close(statm)


def _out_of_time(*_: object) -> NoReturn:
    raise OutOfTime
