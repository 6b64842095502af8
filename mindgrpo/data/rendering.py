"""Renders chat templates with the code of transformers itself, within limits of time and memory.

The text is that of `apply_chat_template`, byte for byte: same sandbox, same filters, same variables. Importing this
module imports transformers (without torch), which takes 0.7 s of a core; so it is imported where a first prompt is
rendered, and by the fork server once for all ranks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jinja2 import TemplateError

from mindgrpo.data.limits import OutOfTime, limits

# Without torch transformers prints advice that has nothing to do with templates.
os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
from transformers.utils.chat_template_utils import (  # noqa: E402
    get_json_schema,
    render_jinja_template,
)

MAX_SECONDS = 3.0
MAX_GIB = 2

Spans = list[tuple[int, int]]


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """What templates take in `tools`, JSON schemas, from type hints and docstring. Raises what transformers raises."""
    schema: dict[str, Any] = get_json_schema(function)
    return schema


def render_chat(
    template: str,
    messages: Sequence[Mapping[str, Any]],
    with_spans: bool = False,
    **variables: Any,
) -> tuple[str, Spans]:
    """Returns the text and, `with_spans`, [start, end) characters of each `{% generation %}` block in it.

    `variables` are those of `apply_chat_template`: add_generation_prompt, tools, documents (None where a conversation
    has none), special tokens. Raises jinja2.TemplateSyntaxError for text that is no template, jinja2.TemplateError
    beyond the limits, and whatever the template's operations raise.
    """
    try:
        with limits(MAX_SECONDS, MAX_GIB << 30):
            rendered: Any = render_jinja_template(
                [[dict(message) for message in messages]],
                chat_template=template,
                return_assistant_tokens_mask=with_spans,
                **{"tools": None, "documents": None, **variables},
            )
    except OutOfTime as error:
        raise TemplateError(
            f"it takes more than {MAX_SECONDS:g} s of processor time for one prompt"
        ) from error
    except MemoryError as error:
        raise TemplateError(f"it takes more than {MAX_GIB} GiB of memory for one prompt") from error
    texts, spans = rendered
    return texts[0], spans[0] if spans else []
