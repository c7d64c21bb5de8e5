"""A model's chat template: messages to text, in Jinja's sandbox, with what Hugging Face's templates expect around
them."""

from __future__ import annotations

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from engine.errors import BrokenChat

_TEMPLATE_ERRORS = (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError)
"""What foreign template code raises on messages that it was not made for."""


class ChatTemplate:
    """Compiled once; rendering is pure but for `strftime_now`."""

    def __init__(self, template: str, special_tokens: Mapping[str, str]) -> None:
        """special_tokens: variables of the template such as `bos_token`. Raises BrokenChat if it does not compile."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(template)
        except jinja2.TemplateError as error:
            raise BrokenChat(f"the model's chat template does not compile: {error}") from error
        self._special_tokens = dict(special_tokens)

    def render(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """The prompt that asks for the assistant's next message. Raises BrokenChat if the template refuses."""
        try:
            return self._template.render(
                messages=list(messages),
                tools=None,
                documents=None,
                add_generation_prompt=True,
                **self._special_tokens,
            )
        except _TEMPLATE_ERRORS as error:
            raise BrokenChat(f"the model's chat template refused the messages: {error}") from error


def _raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _strftime_now(format: str) -> str:
    return datetime.datetime.now().strftime(format)


def _to_json(value: Any, indent: int | None = None) -> str:
    # Jinja's own filter escapes HTML characters, which models were not trained on.
    return json.dumps(value, ensure_ascii=False, indent=indent)
