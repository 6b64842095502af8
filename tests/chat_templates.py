"""Constructs of chat templates as public models use them, and conversations to render. Refuses to test.

Each template is rendered with every conversation, with and without the generation prompt; some raise for some of them.
"""

from __future__ import annotations

from typing import Any

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "get_wéather",
            "description": "Today's <weather> & more",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string"},
                    "age": {"type": "integer", "minimum": 0},
                },
                "required": ["city"],
            },
        },
    }
]
DOCUMENTS = [{"title": "Zürich", "text": "A city."}, {"title": "b", "text": 'It\'s "quoted".'}]

USER = {"role": "user", "content": "2 + 3 = ?"}
CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [
        {
            "id": "call_1",
            "type": "function",
            "function": {"name": "get_wéather", "arguments": {"city": "Zürich", "age": 3.5}},
        }
    ],
}
CONVERSATIONS: dict[str, list[dict[str, Any]]] = {
    "question": [USER],
    "system": [{"role": "system", "content": " Be short.\n"}, USER],
    "turns": [
        USER,
        {"role": "assistant", "content": "<think>\n2 + 3\n</think>\n\n5"},
        {"role": "user", "content": "日本 🙂 <b>&amp;</b>\n\n{{ x }} {% y %}"},
    ],
    "tools": [
        USER,
        CALL,
        {
            "role": "tool",
            "content": '{"sun": true}',
            "name": "get_wéather",
            "tool_call_id": "call_1",
        },
        {"role": "tool", "content": "<tool_response>\nrain\n</tool_response>"},
        {"role": "user", "content": "So?"},
    ],
    "whitespace": [{"role": "user", "content": "  \n a\tb \r\n "}],
    "long": [{"role": "user", "content": "a long question " * 1_000}],
}

FOR = "{% for message in messages %}"
END = "{% endfor %}"
OPEN = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
TURN = "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
GENERATED = (
    f"{FOR}<|im_start|>{{{{ message.role }}}}\n{{% if message.role == 'assistant' %}}"
    "{% generation %}{{ message.content }}<|im_end|>{% endgeneration %}\n"
    f"{{% else %}}{{{{ message.content }}}}<|im_end|>\n{{% endif %}}{END}{OPEN}"
)

TEMPLATES = {
    "chatml": FOR + TURN + END + OPEN,
    "generation": GENERATED,
    "generation, whitespace control": GENERATED.replace("{% generation %}", "{%- generation -%}"),
    "generation around the role": (
        FOR
        + "{% generation %}{{ message['role'] + ': ' }}{% endgeneration %}{{ message.content }}"
        + END
    ),
    "generation at the start": "{% generation %}a{% endgeneration %}b{% generation %}c{% endgeneration %}",
    "generation in a macro": (
        "{% macro turn(m) %}{% generation %}{{ m.content }}{% endgeneration %}{% endmacro %}"
        "{% for m in messages %}[{{ turn(m) }}]{% endfor %}"
    ),
    "tools is not none": (
        "{% if tools is not none %}T{{ tools|length }}{% else %}no tools{% endif %}"
        "{% if documents is none %} no documents{% endif %}" + FOR + TURN + END
    ),
    "tools defined": "{{ tools is defined }} {{ documents is defined }} {{ tools }} {{ nothing is defined }}",
    "tools, one a line": "{% for tool in tools or [] %}{{ tool | tojson }}\n{% endfor %}{{ tools|string }}",
    "documents": (
        "{% for d in documents or [] %}[{{ loop.index0 }}] {{ d['title'] }}: {{ d.text }}\n{% endfor %}"
    ),
    "tojson": "{{ messages | tojson }}",
    "tojson of nothing": "{{ tools | tojson }} {{ true | tojson }} {{ 1.0 | tojson }} {{ '</b>&' | tojson }}",
    "tojson indent": "{{ messages | tojson(indent=4) }}\n{{ messages | tojson(indent=none) }}",
    "tojson ensure_ascii": "{{ messages | tojson(ensure_ascii=True) }}\n{{ messages|tojson(true, 2) }}",
    "tojson positional": "{{ messages | tojson(False) }}\n{{ messages | tojson(False, 1) }}",
    "tojson separators": "{{ messages | tojson(separators=(',', ':')) }}",
    "tojson sort_keys": "{{ messages | tojson(sort_keys=True) }}",
    "tojson, its four arguments": (
        "{{ messages | tojson(ensure_ascii=True, indent=2, separators=(', ', '= '), sort_keys=true) }}"
        "{{ messages | tojson(false, none, (',', ':'), true) }}"
    ),
    "arguments of calls": (
        "{% for m in messages if m.tool_calls %}{% for call in m.tool_calls %}{% set f = call.function %}"
        '<tool_call>\n{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}\n</tool_call>\n'
        "{{ f.arguments is string }} {{ f.arguments is mapping }} {{ f.arguments.items()|list }}"
        "{% endfor %}{% endfor %}"
    ),
    "break and continue": (
        "{% for m in messages %}{% if m.role == 'system' %}{% continue %}{% endif %}{{ m.content|length }} "
        "{% if loop.index > 2 %}{% break %}{% endif %}{% endfor %}"
    ),
    "strftime_now": "{{ strftime_now('%Y-%m') }} {{ strftime_now is defined }}",
    "raise_exception for roles": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
        "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
        "{{ raise_exception('Roles must alternate: ' + m.role) }}{% endif %}{{ m.content }}{% endfor %}"
    ),
    "raise_exception in a branch": "{{ 'a' if messages else raise_exception('none') }}",
    "namespace": (
        "{% set ns = namespace(first=true, last=messages|length - 1) %}"
        "{% for m in messages[::-1] %}{% set index = (messages|length - 1) - loop.index0 %}"
        "{% if ns.first and m.role == 'user' and not (m.content.startswith('<tool_response>') and "
        "m.content.endswith('</tool_response>')) %}{% set ns.first = false %}{% set ns.last = index %}"
        "{% endif %}{% endfor %}{{ ns.last }}"
    ),
    "thoughts are cut off": (
        "{% for m in messages %}{% set text = m.content %}{% if '</think>' in text %}"
        "{% set text = text.split('</think>')[-1].lstrip('\\n') %}{% endif %}{{ text }}|{% endfor %}"
        "{{ messages[-1].content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].strip() }}"
    ),
    "macro with defaults": (
        "{% macro show(text, mark='#', times=2) -%} {{ mark * times }} {{ text }}{{ caller() if caller }}"
        "{%- endmacro %}{{ show('a') }}{{ show('b', times=1) }}{% call show('c', '-') %}d{% endcall %}"
    ),
    "recursive macro": (
        "{% macro walk(v) %}{% if v is mapping %}{{ '{' }}{% for k in v %}{{ k }}:{{ walk(v[k]) }},{% endfor %}"
        "{{ '}' }}{% elif v is iterable and v is not string %}[{% for x in v %}{{ walk(x) }};{% endfor %}]"
        "{% else %}{{ v }}{% endif %}{% endmacro %}{{ walk(messages) }}{{ walk(tools) }}"
    ),
    "recursive loop": (
        "{% for x in [[1, [2]], [3]] recursive %}{% if x is iterable %}<{{ loop(x) }}>{% else %}{{ x }}"
        "{% endif %}{{ loop.depth }}{% endfor %}"
    ),
    "whitespace control": (
        "  {%- for m in messages -%}\n    {{- m.role }}\n    {% if true %}\n  x\n    {% endif %}\n"
        "  {# a comment #}\n{%- endfor +%}\n  end\n\n"
    ),
    "loop variables": (
        "{% for m in messages %}{{ loop.first }}{{ loop.last }}{{ loop.revindex }}{{ loop.length }}"
        "{{ loop.previtem.role if loop.previtem }}{{ loop.nextitem.role if loop.nextitem is defined }}"
        "{{ loop.cycle('a', 'b') }}{{ loop.changed(m.role) }}\n{% else %}empty{% endfor %}"
    ),
    "special tokens": (
        "{{ bos_token }}|{{ eos_token }}|{{ pad_token }}|{{ unk_token }}|{{ sep_token }}|{{ cls_token }}|"
        "{{ mask_token }}|{{ additional_special_tokens }}|{{ bos_token is defined }}"
    ),
    "undefined": (
        "[{{ nothing }}][{{ messages[0].nothing }}][{{ nothing | default('d') }}]"
        "{{ (enable_thinking is defined and enable_thinking is false) or x is undefined }}"
    ),
    "undefined is used": "{{ nothing.at.all }}",
    "filters": (
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}"
        "{{ messages | map(attribute='role') | unique | sort | join(', ') }}{{ messages[-1].content | trim }}"
        "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | length }}{{ 'abc' | upper | title }}"
        "{{ messages | first | items | list }}{{ messages[0] | dictsort }}{{ 'a\nb' | indent(2, true) }}"
    ),
    "filters, further": (
        "{{ messages | groupby('role') }}{{ [3, 1, 2] | sort(reverse=true) | batch(2, 0) | list }}"
        "{{ 'a b' | replace(' ', '_') | capitalize | center(9) }}{{ '<a>' | e }}{{ 3.14159 | round(2) }}"
        "{{ messages | tojson | safe | length }}{{ 'x' | wordcount }}{{ messages[0].content | truncate(9) }}"
    ),
    "tests": (
        "{% for v in [1, 'a', none, [], {}, true, 1.5] %}{{ v is string }}{{ v is number }}{{ v is mapping }}"
        "{{ v is sequence }}{{ v is iterable }}{{ v is none }}{{ v is boolean }}{{ v is integer }} {% endfor %}"
    ),
    "slices and arithmetic": (
        "{{ messages[1:] | length }}{{ messages[:-1] | length }}{{ 7 // 2 }}{{ 7 % 3 }}{{ 2 ** 10 }}{{ -1 }}"
        "{{ 'a' ~ 1 ~ none }}{{ 'ab' * 3 }}{{ [1] + [2] }}{{ 1 < 2 <= 3 }}{{ 'x' in 'xyz' }}"
    ),
    "formats": (
        "{{ '%s has %d' % ('a', 3) }}{{ '{:>8}|{name}'.format('a', name='b') }}{{ '%05.1f' | format(2.25) }}"
    ),
    "text methods": (
        "{{ messages[-1].content.replace('a', 'b').strip().split('\\n')[0] }}{{ 'A,b'.lower().partition(',') }}"
        "{{ messages[0].content.upper().encode is defined }}{{ 'a'.ljust(3, '.') }}{{ ', '.join(['a', 'b']) }}"
    ),
    "dictionary methods": (
        "{{ messages[0].get('name', 'nobody') }}{{ messages[0].keys() | list }}{{ dict(a=1, b=2).items() | list }}"
    ),
    "set blocks": "{% set text %}{{ messages[0].role }}!{% endset %}{{ text }}{% set a, b = 1, 2 %}{{ a + b }}",
    "filter and with blocks": (
        "{% filter upper %}{{ messages[0].role }}{% endfilter %}{% with x = 1 %}{{ x }}{% endwith %}{{ x }}"
        "{% raw %}{{ raw }}{% endraw %}"
    ),
    "globals": "{{ range(3) | list }}{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ joiner(',')() }}",
    "lists are immutable": "{% set x = [1] %}{{ x.append(2) }}",
    "Python's objects": "{{ ''.__class__ }}{{ messages.__class__.__mro__ }}",
    "not a template": "{% if %}",
    "no such filter": "{{ 'a' | nosuchfilter }}",
    "the do tag, which is not there": "{% do messages %}",
    "wrong types": "{{ messages[0].content + 1 }}",
    "message is missing": "{{ messages[7].content }}",
    "html is not escaped": FOR + "{{ message.content }}{{ '<' }}" + END,
    "a line's end is kept": "{{ messages[0].role }}\n",
    "deeply nested": "{% if true %}" * 15 + "{{ messages | length }}" + "{% endif %}" * 15,
}
