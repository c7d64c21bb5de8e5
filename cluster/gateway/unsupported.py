"""Fields of OpenAI's API, and of its extensions, that would change the answer and that this server does not do.

They are refused by name: an answer that silently ignores them is wrong. All other unknown fields are left alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import orjson

from cluster.gateway.errors import InvalidRequest

Harmless = dict[str, tuple[Any, ...]]
"""Fields that this server does not do, and the values of them that ask for nothing. Null is always one."""

_BY_BOTH: Harmless = {
    "n": (1,),
    "use_beam_search": (False,),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "prompt_logprobs": (),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "logits_processors": ([],),
    "response_format": ({"type": "text"},),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
}
IN_CHAT: Harmless = _BY_BOTH | {
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "functions": ([],),
    "function_call": ("none", "auto"),
    "modalities": (["text"],),
    "audio": (),
    "web_search_options": (),
    "reasoning_effort": (),
    "verbosity": (),
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "echo": (False,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "documents": ([],),
}
IN_COMPLETIONS: Harmless = _BY_BOTH | {
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "prompt_embeds": (),
}
IN_MESSAGES: Harmless = {
    "tool_calls": ([],),
    "tool_call_id": (),
    "function_call": (),
    "audio": (),
}


def refuse(fields: Mapping[str, Any], unsupported: Harmless, prefix: str = "") -> None:
    """Raises InvalidRequest that names the first field which asks for something that this server does not do.

    prefix: where `fields` stand in the body.
    """
    for name, harmless in unsupported.items():
        value = fields.get(name)
        if value is None or any(type(value) is type(ok) and value == ok for ok in harmless):
            continue
        if name == "n" and not (isinstance(value, int) and value > 1):
            continue  # nonsense, which is refused in its own words
        raise InvalidRequest(
            "not supported by this server" + (", except null or " + _spelled(harmless) if harmless else ""),
            param=prefix + name,
            code="unsupported_parameter",
        )


def _spelled(values: tuple[Any, ...]) -> str:
    return " or ".join(orjson.dumps(value).decode() for value in values)
