"""The Jinja text of the chat template for a tokenizer: with its turn pieces, or in plain text.

With the reserved pieces of step 1, a turn begins with the piece of its role, and an answer ends with ``</s>``::

    <|user|>How are you?<|assistant|>Fine.</s><|user|>…

Without them, a turn begins with a line that names the role. Text that follows a line end has ids of its own, so that
the answer can be learned by itself::

    user:
    How are you?
    assistant:
    Fine.</s>user:
    …

A tokenizer that step 1 did not make encodes line ends with the text around them; there ``</s>`` takes the place of the
line end before the answer, being a control piece that every tokenizer has. For an encoder-decoder it stands there in
any case, since every input of an encoder ends with it.

The names of all control pieces, where a message spells them, get a space behind their first character. A message may
still spell what begins a turn in plain text; it is text there, to the model as to a reader.
"""

from __future__ import annotations

import json
import re
from itertools import groupby

from zerokara.config.tokenizer_config import TURN_PIECES
from zerokara.tokenizer.encoder import Encoder

LINE_END = "\n"
_NUMBERED = re.compile(r"(.*\D)\d+\D*")


def source_for(encoder: Encoder, is_encoder_decoder: bool) -> str:
    """Return the Jinja text for this tokenizer."""
    controls = {encoder.piece(i) for i in encoder.control_ids}
    end = encoder.piece(encoder.eos_id)
    has_pieces = controls.issuperset(TURN_PIECES.values())
    begins = TURN_PIECES if has_pieces else {role: f"{role}:{LINE_END}" for role in TURN_PIECES}
    answer = begins["assistant"]
    if is_encoder_decoder:
        answer += end
    elif not has_pieces and not encoder.by_line:
        answer = answer.removesuffix(LINE_END) + end
    after = "" if has_pieces else f" + {_quoted(LINE_END)}"
    lines = [
        "{%- for message in messages -%}",
        "    {%- set text = message['content']",
        *(f"        | replace({_quoted(name)}, {_quoted(name[0] + ' ' + name[1:])})" for name in _spelt(encoder)),
        "    -%}",
        "    {%- if message['role'] == 'assistant' -%}",
        f"        {{{{- {_quoted(answer)} -}}}}",
        "        {%- generation -%}",
        f"            {{{{- text + {_quoted(end)} -}}}}",
        "        {%- endgeneration -%}",
        *(
            line
            for role in ("user", "system")
            for line in (
                f"    {{%- elif message['role'] == '{role}' -%}}",
                f"        {{{{- {_quoted(begins[role])} + text{after} -}}}}",
            )
        ),
        "    {%- else -%}",
        "        {{- raise_exception(\"the role '\" + message['role'] + \"' is none of system, user, assistant\") -}}",
        "    {%- endif -%}",
        "{%- endfor -%}",
        "{%- if add_generation_prompt -%}",
        f"    {{{{- {_quoted(answer)} -}}}}",
        "{%- endif -%}",
    ]
    return "\n".join(lines) + "\n"


def _quoted(text: str) -> str:
    """A string of Jinja, whose escapes are Python's."""
    return json.dumps(text, ensure_ascii=False)


def _spelt(encoder: Encoder) -> list[str]:
    """What of the names of control pieces to replace: the name, or what numbered ones share before their numbers."""
    names = sorted(encoder.piece(i) for i in {*encoder.control_ids, encoder.unk_id})
    groups = [list(group) for _, group in groupby(sorted(names, key=_stem), key=_stem)]
    found = [[_stem(group[0])] if len(group) > 1 else group for group in groups]
    return [name for names in found for name in names if len(name) > 1]


def _stem(name: str) -> str:
    numbered = _NUMBERED.fullmatch(name)
    return numbered[1] if numbered else name
