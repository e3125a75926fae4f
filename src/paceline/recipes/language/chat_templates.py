"""Texts and loss masks of conversations, by a chat template.

The mask is found by rendering the beginnings of a conversation: what a template adds when the
assistant's message is appended is what the model has to write. Stock templates have no markers for
it, and a token's id does not tell who wrote it.
"""

from __future__ import annotations

import contextlib
import resource
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.language.conversations import Conversation, Message, common_length
from paceline.spec.errors import DataError

Render = Callable[[Sequence[Message], bool], str]
"""Renders messages, and on request the beginning of the assistant's next one.

It raises ValueError if the template refuses them.
"""
Span = tuple[int, int]
_MAX_RENDER_BYTES = 2 << 30  # of memory for a conversation


@dataclass(frozen=True, slots=True)
class Rendered:
    """A text for training.

    Attributes:
        spans: Start and end of the parts to train on, in characters.
    """

    text: str
    spans: tuple[Span, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Example:
    """Tokens of a text for training.

    Attributes:
        location: File and line of the data.
        tokens: Token ids, shape ``[n]``.
        targets: Which tokens are trained on, shape ``[n]``; never the first, which follows none.
    """

    location: str
    tokens: NDArray[np.int64]
    targets: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.tokens)


def render_conversation(conversation: Conversation, render: Render) -> list[Rendered]:
    """Returns the texts of a conversation: one, or one for each answer.

    There is one for each answer if the template renders answers differently once others follow, as
    those do that leave out earlier thoughts: each answer then has the context that it has in use.

    Raises:
        DataError: The template refuses the messages, drops one of them, or has no beginning of the
            conversation as the beginning of its text.
    """
    location, messages = conversation.location, conversation.messages
    if not messages:
        span = conversation.num_context, len(conversation.text)
        return [Rendered(conversation.text, (span,))]
    try:
        whole = render(messages, False)
        if messages[0].role == "system" and messages[0].content.strip() not in whole:
            raise DataError(
                f"{location}: the chat template drops the system message",
                remedy="--system merge puts it before the first message of the user; --system drop"
                " accepts it",
            )
        answers = [number for number, message in enumerate(messages) if message.is_target]
        spans = [_answer_span(messages, number, whole, render) for number in answers]
        present = [span for span in spans if span is not None]
        if len(present) == len(answers):
            check_complete(messages, whole, location)
            return [Rendered(whole, tuple(present))]
        rendered = []
        for number in answers:
            rendered.append(_render_answer(messages[: number + 1], location, render))
            check_complete(messages[: number + 1], rendered[-1].text, location)
        return rendered
    except ValueError as error:
        if render is plain_render:
            raise DataError(
                f"{location}: --chat-template none joins only a prompt and its completion",
                found=f"the roles are {', '.join(message.role for message in messages)}"[:200],
                remedy="--chat-template FILE with a template; --system merge puts a system message"
                " into the prompt",
            ) from None
        raise DataError(
            f"{location}: the chat template refuses the conversation",
            found=" ".join(str(error).split())[:200],
            remedy="--system merge if it knows no system message, or --chat-template FILE",
        ) from None


def check_complete(messages: Sequence[Message], text: str, location: str) -> None:
    """Raises DataError if the text lacks a message of the user or the assistant.

    White space may differ, and templates may leave out an answer's thoughts (``<think>``).
    """
    compact, position = "".join(text.split()), 0
    for number, message in enumerate(messages, 1):
        if message.role == "system":
            continue
        content = message.content
        if message.role == "assistant":
            content = content.rpartition("</think>")[2]
        content = "".join(content.split())
        start = compact.find(content, position)
        if start < 0:
            raise DataError(
                f"{location}, message {number}: the chat template drops or changes the message",
                found=f"{message.role}: {message.content[:60]!r}",
                remedy="--chat-template FILE with another template",
            )
        position = start + len(content)


def _render_answer(messages: Sequence[Message], location: str, render: Render) -> Rendered:
    """Renders the conversation up to its last message, which is the only one to train on."""
    text = render(messages, False)
    span = _answer_span(messages, len(messages) - 1, text, render)
    if span is None:
        raise DataError(
            f"{location}: the chat template renders a conversation differently once it goes on",
            found="the text of its beginning is not the beginning of its text",
            remedy="--chat-template FILE with another template",
        )
    return Rendered(text, (span,))


def _answer_span(
    messages: Sequence[Message], index: int, whole: str, render: Render
) -> Span | None:
    """Returns where the text of ``messages[index]`` is in the whole conversation's.

    ``None`` if the conversation's text does not begin with that of the messages so far.
    """
    before, after = render(messages[:index], False), render(messages[: index + 1], False)
    if not (whole.startswith(before) and whole.startswith(after)):
        return None
    # A template may end the request for an answer with what it removes from answers: <think>.
    prompt = render(messages[:index], True)
    start = max(common_length(prompt, whole), len(before))
    return (start, len(after)) if start < len(after) else None


def plain_render(messages: Sequence[Message], begins_answer: bool) -> str:
    """Joins prompt and completion as they are, without a template."""
    if len(messages) > 2 or messages[0].role == "system":
        raise ValueError("only a prompt and its completion can be joined without a template")
    return "".join(message.content for message in messages)


def template_render(tokenizer: Any) -> Render:
    """Returns what renders by the chat template of a tokenizer."""
    from jinja2 import TemplateError

    def render(messages: Sequence[Message], begins_answer: bool) -> str:
        try:
            with _limited_memory():
                text: str = tokenizer.apply_chat_template(
                    [message.to_json() for message in messages],
                    tokenize=False,
                    add_generation_prompt=begins_answer,
                )
        except TemplateError as error:
            raise ValueError(str(error)) from None
        except MemoryError:
            raise ValueError(
                f"it needs more than {_MAX_RENDER_BYTES >> 30} GiB of memory"
            ) from None
        return text

    return render


@contextlib.contextmanager
def _limited_memory() -> Iterator[None]:
    """Raises MemoryError once the process has allocated ``_MAX_RENDER_BYTES`` more.

    A template comes with the model, and may make a text of any size.
    """
    try:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    except OSError:  # no Linux
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    limits = [limit for limit in (soft, hard) if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([used + _MAX_RENDER_BYTES, *limits]), hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def encode(rendered: Rendered, location: str, tokenizer: Any, *, is_plain: bool) -> Example:
    """Returns the tokens of a text and which are trained on.

    An answer ends with the token that ends a turn, so that the model learns to stop; it is added at
    the end of a text whose template has none.

    Args:
        is_plain: The text has no template: what the tokenizer adds at a text's beginning is added.

    Raises:
        DataError: There is nothing to train on.
    """
    encoded = tokenizer(rendered.text, add_special_tokens=is_plain, return_offsets_mapping=True)
    tokens = np.asarray(encoded["input_ids"], dtype=np.int64)
    offsets = np.asarray(encoded["offset_mapping"], dtype=np.int64).reshape(-1, 2)
    # A token that begins before a part and ends in it belongs to the part.
    targets, special = np.zeros(len(tokens), dtype=np.bool_), special_tokens(tokenizer)
    for start, end in rendered.spans:
        visible_end = len(rendered.text[:end].rstrip())
        last = tokens[offsets[:, 1] == visible_end].tolist()
        if visible_end > start and special.intersection(last):
            end = visible_end  # the model stops there: white space after it is the template's
        targets |= (offsets[:, 1] > start) & (offsets[:, 0] < end)
    ends = rendered.spans[-1][1] == len(rendered.text)
    if ends and not _ends_turn(tokens, offsets, rendered.text, tokenizer):
        tokens = np.append(tokens, tokenizer.eos_token_id)
        targets = np.append(targets, True)
    elif ends and is_plain:  # the tokenizer may have added it
        targets[-1] |= int(tokens[-1]) in special
    targets[:1] = False
    if not targets.any():
        raise DataError(
            f"{location}: no token to train on",
            found=f"the example has {len(tokens)} tokens, and none of the assistant's",
        )
    return Example(location, tokens, targets)


def _ends_turn(
    tokens: NDArray[np.int64], offsets: NDArray[np.int64], text: str, tokenizer: Any
) -> bool:
    """Whether the last token that is no white space is a special one, or there is none to add."""
    if tokenizer.eos_token_id is None:
        return True
    end = len(text.rstrip())
    visible = tokens[offsets[:, 0] < end] if end else tokens
    special = special_tokens(tokenizer)
    return any(len(ids) and int(ids[-1]) in special for ids in (tokens, visible))


def special_tokens(tokenizer: Any) -> set[int]:
    """Returns the tokens that stand for no text."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    return {*tokenizer.all_special_ids, *(n for n, token in added.items() if token.special)}
