"""Conversations from rows of data, in whichever of the usual formats they are written.

Pure: rows are values, and every problem is a DataError that names the row.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from paceline.spec.errors import DataError

Format = Literal[
    "messages", "sharegpt", "alpaca", "prompt-completion", "text", "preference", "text-preference"
]
TEXT_FORMATS = ("text", "text-preference")
"""Formats without roles, for which no chat template is used."""
Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "model": "assistant",
}
_LISTS = ("messages", "conversations", "conversation")
_PAIRS = (("prompt", "completion"), ("prompt", "response"), ("question", "answer"))
_KNOWN = (
    '{"messages": [{"role": …, "content": …}]}, {"conversations": [{"from": …, "value": …}]},'
    ' {"instruction": …, "output": …}, {"prompt": …, "completion": …} or {"text": …}'
)
PREFERENCE = '{"prompt": …, "chosen": …, "rejected": …}'
"""A row with a pair of answers."""
_PROMPTS = ("prompt", "question")
_UNUSED_ROW_KEYS = ("tools", "functions", "history", "images", "videos", "audios")
_UNUSED_MESSAGE_KEYS = (
    "tool_calls", "function_call", "reasoning_content", "reasoning", "thinking",
)  # fmt: skip
"""Keys that would change what the model reads or writes. Other keys are the user's notes."""


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a conversation.

    Attributes:
        is_target: Whether the model is trained to write it.
    """

    role: Role
    content: str
    is_target: bool = False

    def to_json(self) -> dict[str, str]:
        """Returns the message as chat templates take it."""
        return {"role": self.role, "content": self.content}


@dataclass(frozen=True, slots=True)
class Conversation:
    """One example of the data.

    Attributes:
        location: File and line, for messages.
        messages: Turns; empty for a plain text.
        text: Plain text that is trained on; empty for a conversation.
        num_context: Characters at the start of ``text`` that are not trained on.
    """

    location: str
    messages: tuple[Message, ...] = ()
    text: str = ""
    num_context: int = 0


@dataclass(frozen=True, slots=True)
class Preference:
    """Two continuations of the same prompt, of which one is better.

    Both are conversations with the prompt; only what follows it is trained on.
    """

    chosen: Conversation
    rejected: Conversation


def detect_format(row: Mapping[str, Any], location: str) -> Format:
    """Returns the format of a row by its keys.

    Raises:
        DataError: The keys are those of no format.
    """
    if "chosen" in row and "rejected" in row:
        return "preference"
    for key in _LISTS:
        turns = row.get(key)
        if isinstance(turns, Sequence) and not isinstance(turns, str):
            first = turns[0] if turns else {}
            is_sharegpt = isinstance(first, Mapping) and "from" in first
            return "sharegpt" if is_sharegpt else "messages"
    if "instruction" in row and "output" in row:
        return "alpaca"
    if _pair(row) is not None:
        return "prompt-completion"
    if "text" in row:
        return "text"
    raise DataError(
        f"{location}: the format is not known",
        found=f"keys: {', '.join(map(str, row)) or 'none'}",
        remedy=f"rows like {_KNOWN}",
    )


def parse_row(row: Mapping[str, Any], data_format: Format, location: str) -> Conversation:
    """Returns the conversation of a row.

    Raises:
        DataError: The row is not in this format, has roles out of order, or nothing to train on.
    """
    if data_format == "preference":
        raise DataError(
            f"{location}: the rows are pairs of answers",
            found=_keys(row),
            remedy="--objective dpo trains on preferences",
        )
    if data_format == "text":
        text = _text(row.get("text"), "text", location)
        if not text.strip():
            raise DataError(f"{location}: the text is empty")
        return Conversation(location, text=text)
    parse = {
        "messages": _from_messages,
        "sharegpt": _from_sharegpt,
        "alpaca": _from_alpaca,
        "prompt-completion": _from_pair,
    }[data_format]
    _refuse_unused(row, _UNUSED_ROW_KEYS, location)
    messages = (*_system(row, location), *parse(row, location))
    _check(messages, location)
    return Conversation(location, messages)


def parse_preference(row: Mapping[str, Any], location: str) -> Preference:
    """Returns the pair of a row.

    Without a prompt, it is what both answers have in common at their beginning.

    Raises:
        DataError: The row holds no pair, an answer is empty, or both are equal.
    """
    if not ("chosen" in row and "rejected" in row):
        raise DataError(
            f"{location}: no pair of answers",
            found=_keys(row),
            remedy=f"rows like {PREFERENCE}; without --objective dpo, other formats are trained on",
        )
    _refuse_unused(row, _UNUSED_ROW_KEYS, location)
    chosen, rejected = row["chosen"], row["rejected"]
    if chosen == rejected:
        raise DataError(f"{location}: both answers are the same", found=repr(chosen)[:80])
    prompt_key = next((key for key in _PROMPTS if row.get(key) is not None), None)
    if isinstance(chosen, str) and isinstance(rejected, str) and prompt_key is None:
        return _from_texts(chosen, rejected, location)
    system = [*_system(row, location)]
    prompt = [] if prompt_key is None else [*_prompt(row[prompt_key], location)]
    pair = [
        [*system, *_continue(prompt, row[key], f"{location}, {key} answer")]
        for key in ("chosen", "rejected")
    ]
    num_shared = common_length(*pair)
    if num_shared < min(map(len, pair)) and any(
        turns[num_shared].role != "assistant" for turns in pair
    ):
        raise DataError(
            f"{location}: the answers have different prompts",
            found=f"message {num_shared + 1}: "
            + ", ".join(repr(turns[num_shared].content[:40]) for turns in pair),
        )
    conversations = [
        Conversation(
            location,
            tuple(
                replace(m, is_target=m.is_target and n >= num_shared) for n, m in enumerate(turns)
            ),
        )
        for turns in pair
    ]
    for name, conversation in zip(("chosen", "rejected"), conversations, strict=True):
        _check(conversation.messages, f"{location}, {name} answer")
    return Preference(*conversations)


def _from_texts(chosen: str, rejected: str, location: str) -> Preference:
    """Returns the pair of two whole texts, which are used without a chat template."""
    start = common_length(chosen, rejected)
    while start and not chosen[start - 1].isspace():  # a word belongs to one part as a whole
        start -= 1
    if chosen[start - 1 : start] == " ":  # tokens begin with the space before a word
        start -= 1
    if not (start and chosen[start:].strip() and rejected[start:].strip()):
        raise DataError(
            f"{location}: no prompt, or nothing after it",
            found=f"both texts begin with {chosen[:start]!r}"[:80],
            remedy='rows with "prompt"',
        )
    return Preference(
        Conversation(location, text=chosen, num_context=start),
        Conversation(location, text=rejected, num_context=start),
    )


def _system(row: Mapping[str, Any], location: str) -> Iterable[Message]:
    """Yields the system message that a row has beside its messages, if there is one."""
    if system := row.get("system"):
        yield Message("system", _text(system, "system", location))


def _prompt(prompt: Any, location: str) -> Iterable[Message]:
    if isinstance(prompt, str):
        yield Message("user", prompt)
    else:
        yield from _turns(prompt, location, "role", "content")


def _continue(prompt: Sequence[Message], answer: Any, location: str) -> list[Message]:
    """Returns a prompt with an answer: a text, messages, or a conversation with its prompt."""
    if isinstance(answer, str):
        return [*prompt, Message("assistant", answer, is_target=True)]
    turns = [*_turns(answer, location, "role", "content")]
    if turns[0].role == "assistant":
        return [*prompt, *turns]
    # Messages of a prompt are compared without their marks.
    start = [turn.to_json() for turn in turns[: len(prompt)]]
    if start != [message.to_json() for message in prompt]:
        raise DataError(
            f"{location}: it does not begin with the prompt of its row",
            found=f"prompt: {prompt[-1].content[:40]!r}; it begins: {turns[0].content[:40]!r}",
            remedy="the answer alone, or the same prompt in both places",
        )
    return turns


def common_length(first: Sequence[Any], second: Sequence[Any]) -> int:
    """Returns for how many elements two sequences are equal."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((n for n, (a, b) in pairs if a != b), min(len(first), len(second)))


def place_system(
    messages: Sequence[Message], placement: Literal["keep", "merge", "drop"]
) -> tuple[Message, ...]:
    """Returns the messages with the system message kept, put before the first user's, or dropped.

    The order of roles has been checked: a system message comes first, and a user's follows.
    """
    if placement == "keep" or messages[0].role != "system":
        return tuple(messages)
    if placement == "drop":
        return tuple(messages[1:])
    system, user, *following = messages
    return (Message("user", f"{system.content}\n\n{user.content}"), *following)


def _from_messages(row: Mapping[str, Any], location: str) -> Iterable[Message]:
    return _turns(_list(row, location), location, "role", "content")


def _from_sharegpt(row: Mapping[str, Any], location: str) -> Iterable[Message]:
    yield from _turns(_list(row, location), location, "from", "value")


def _from_alpaca(row: Mapping[str, Any], location: str) -> Iterable[Message]:
    parts = [_text(row.get(key) or "", key, location) for key in ("instruction", "input")]
    yield Message("user", "\n\n".join(part for part in parts if part.strip()))
    yield Message("assistant", _text(row.get("output"), "output", location), is_target=True)


def _from_pair(row: Mapping[str, Any], location: str) -> Iterable[Message]:
    pair = _pair(row)
    if pair is None:
        raise DataError(f"{location}: no prompt and completion", found=_keys(row))
    prompt, completion = (row[key] for key in pair)
    for key, value in zip(pair, (prompt, completion), strict=True):
        if value is None:
            raise DataError(f'{location}: "{key}" is missing', found=_keys(row))
    if isinstance(prompt, str):
        yield Message("user", prompt)
    else:
        turns = _turns(prompt, location, "role", "content")
        yield from (Message(turn.role, turn.content) for turn in turns)
    if isinstance(completion, str):
        yield Message("assistant", completion, is_target=True)
    else:
        yield from _turns(completion, location, "role", "content")


def _pair(row: Mapping[str, Any]) -> tuple[str, str] | None:
    return next((pair for pair in _PAIRS if pair[0] in row and pair[1] in row), None)


def _list(row: Mapping[str, Any], location: str) -> Any:
    for key in _LISTS:
        if key in row:
            return row[key]
    raise DataError(f"{location}: no list of messages", found=_keys(row))


def _turns(turns: Any, location: str, role_key: str, text_key: str) -> Iterable[Message]:
    """Yields the messages of a list."""
    if not isinstance(turns, Sequence) or isinstance(turns, str) or not len(turns):
        raise DataError(
            f"{location}: the list of messages is empty or no list", found=repr(turns)[:80]
        )
    for number, turn in enumerate(turns, 1):
        place = f"{location}, message {number}"
        if not isinstance(turn, Mapping):
            raise DataError(f"{place}: no message", found=repr(turn)[:80])
        _refuse_unused(turn, _UNUSED_MESSAGE_KEYS, place)
        role = _ROLES.get(str(turn.get(role_key)))
        if role is None:
            raise DataError(
                f"{place}: unknown role {turn.get(role_key)!r}",
                found=_keys(turn),
                remedy=f"one of {', '.join(_ROLES)}",
            )
        content = _text(turn.get(text_key), text_key, place)
        weight = turn.get("weight")
        if weight not in (None, 0, 1):
            raise DataError(
                f"{place}: the weight is neither 0 nor 1",
                found=repr(weight)[:80],
                remedy="1 trains on the answer, 0 leaves it out of the loss",
            )
        yield Message(role, content, is_target=role == "assistant" and weight != 0)


def _text(value: Any, key: str, location: str) -> str:
    """Returns a text; a list of text parts is joined, as the OpenAI format has it."""
    if isinstance(value, Sequence) and not isinstance(value, str):
        parts = [
            part.get("text")
            if isinstance(part, Mapping) and part.get("type", "text") == "text"
            else None
            for part in value
        ]
        if all(isinstance(part, str) for part in parts):
            return "".join(map(str, parts))
    if not isinstance(value, str):
        raise DataError(f'{location}: "{key}" is not a text', found=repr(value)[:80])
    return value


def _refuse_unused(values: Mapping[str, Any], keys: Iterable[str], location: str) -> None:
    """Raises DataError for a key that no example would show, unless it holds nothing."""
    for key in keys:
        if values.get(key):
            raise DataError(
                f'{location}: "{key}" cannot be trained on yet',
                found=repr(values[key])[:80],
                remedy="remove the key, or put its text into a message as the model should see it",
            )


def _keys(row: Mapping[str, Any]) -> str:
    return f"keys: {', '.join(map(str, row)) or 'none'}"


def _check(messages: Sequence[Message], location: str) -> None:
    """Raises DataError for roles out of order, empty answers, or nothing to train on."""
    turns = messages[1:] if messages[0].role == "system" else messages
    roles = [message.role for message in messages]
    for number, message in enumerate(turns):
        if message.role != ("assistant" if number % 2 else "user"):
            raise DataError(
                f"{location}: roles out of order",
                found=", ".join(roles),
                remedy="a system message if there is one, then user and assistant in turn",
            )
    if not any(message.is_target for message in messages):
        raise DataError(
            f"{location}: no message of the assistant to train on", found=", ".join(roles)
        )
    for number, message in enumerate(messages, 1):
        if message.is_target and not message.content.strip():
            raise DataError(f"{location}, message {number}: the answer is empty")
