"""The bundled model with a context that coding agents' prompts fit into, and a template that knows tools.

Both are keys of the file: SmolLM2 was trained on 8,192 tokens, and the engine refuses longer prompts, while
the ten clients send up to 14,000. What the model says beyond its training is of no use, and need not be: the
clients' protocol is what is looked at.
"""

from __future__ import annotations

import struct
from pathlib import Path

import gguf

TEMPLATE = """\
{%- set ns = namespace(system='You are a helpful assistant.') -%}
{%- for message in messages if message.role == 'system' -%}
{%- set ns.system = message.content -%}
{%- endfor -%}
<|im_start|>system
{{ ns.system }}
{%- if tools %}

You may call these functions:
<tools>
{%- for tool in tools %}
{{ tool | tojson }}
{%- endfor %}
</tools>

A call is one JSON object between these tags:
<tool_call>
{"name": "the function's name", "arguments": {"of": "the call"}}
</tool_call>
{%- endif %}<|im_end|>
{% for message in messages -%}
{%- if message.role == 'assistant' -%}
<|im_start|>assistant
{{ message.content or '' }}
{%- for call in message.tool_calls or [] %}
<tool_call>
{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}
</tool_call>
{%- endfor %}<|im_end|>
{% elif message.role == 'tool' -%}
<|im_start|>user
<tool_response>
{{ message.content }}
</tool_response><|im_end|>
{% elif message.role != 'system' -%}
<|im_start|>{{ message.role }}
{{ message.content }}<|im_end|>
{% endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
<|im_start|>assistant
{% endif -%}
"""


def with_long_context(source: Path, target: Path, context: int) -> Path:
    """Write the model again as one trained on `context` tokens, with `TEMPLATE`. Returns `target`."""
    reader = gguf.GGUFReader(source)
    raw = source.read_bytes()
    header = bytearray(raw[: max(_end(tensor.field) for tensor in reader.tensors)])
    length = reader.fields["llama.context_length"]
    struct.pack_into("<I", header, _end(length) - 4, context)
    template = reader.fields["tokenizer.chat_template"]
    text = TEMPLATE.encode()
    # A string's parts: length and text of the key, its type, length and text of the value.
    value_at = _end(template) - template.parts[-1].nbytes - 8
    header[value_at : _end(template)] = struct.pack("<Q", len(text)) + text
    header += bytes(-len(header) % reader.alignment)
    target.write_bytes(bytes(header) + raw[reader.data_offset :])
    return target


def _end(field: gguf.ReaderField) -> int:
    return int(field.offset + sum(part.nbytes for part in field.parts))
