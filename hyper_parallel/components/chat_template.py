"""Where the assistant speaks in a chat that a template has written out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from hyper_parallel.config.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

Span = tuple[int, int]


def answer_spans(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], template: str | None
) -> tuple[str, list[Span]]:
    """The text of a chat, and from which character to which each turn of the assistant goes in it.

    A turn begins where the template lets the model begin to answer, and ends where a chat would that ended with it, or
    with an EOS token before that. A template that marks the assistant's part itself, with ``{% generation %}``, is
    asked for that.

    Raises:
        ConfigError: the tokenizer has no template, the template fails, or it writes the beginning of a chat otherwise
            when more follows, and so hides where an answer begins or ends.
    """
    from jinja2.exceptions import TemplateError

    template = template or tokenizer.chat_template
    if template is None:
        raise ConfigError.one(
            "tokenizer", "it has no chat template", "give dataloader.transform.template, or a tokenizer with one"
        )
    try:
        if "{% generation" in template or "{%- generation" in template:
            return _marked_spans(tokenizer, messages, template)
        text = _render(tokenizer, messages, template)
        spans = []
        for i, message in enumerate(messages):
            if message["role"] == "assistant":
                prompt = _render(tokenizer, messages[:i], template, add_generation_prompt=True)
                answered = _render(tokenizer, messages[: i + 1], template)
                for part, edge in ((prompt, "begins"), (answered, "ends")):
                    if not text.startswith(part):
                        raise ConfigError.one(
                            "dataloader.transform.template",
                            f"it does not tell where turn {i + 1} of a chat {edge}: {part[-40:]!r} is not in the whole",
                            "mark the assistant's part with {% generation %} in it",
                        )
                spans.append((len(prompt), _end(text, len(prompt), len(answered), str(tokenizer.eos_token))))
    except TemplateError as error:
        raise ConfigError.one(
            "dataloader.transform.template", f"it refuses a chat ({error})", "mend the template or the data"
        ) from error
    return text, spans


def _render(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], template: str, **options: Any
) -> str:
    return tokenizer.apply_chat_template(list(messages), chat_template=template, tokenize=False, **options)  # type: ignore[return-value,arg-type]


def _end(text: str, start: int, end: int, eos_token: str) -> int:
    found = text.find(eos_token, start, end)
    return end if found < 0 else found + len(eos_token)


def _marked_spans(
    tokenizer: PreTrainedTokenizerFast, messages: Sequence[Mapping[str, Any]], template: str
) -> tuple[str, list[Span]]:
    from transformers.utils.chat_template_utils import render_jinja_template

    texts, spans = render_jinja_template(
        conversations=[list(messages)],
        chat_template=template,
        return_assistant_tokens_mask=True,
        **tokenizer.special_tokens_map,
    )
    return texts[0], [tuple(span) for span in spans[0]]
