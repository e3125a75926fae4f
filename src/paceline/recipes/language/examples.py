"""Examples for training from rows of data: parsed, rendered, as tokens, within a length."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from paceline.recipes.language.chat_templates import (
    Example,
    Render,
    encode,
    render_conversation,
    special_tokens,
)
from paceline.recipes.language.conversations import (
    Conversation,
    Format,
    Message,
    Preference,
    detect_format,
    parse_preference,
    parse_row,
    place_system,
)
from paceline.recipes.language.records import Record
from paceline.recipes.language.rows import Rows, make_rows, pack
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize
from paceline.train import Draws
from paceline.train.data.order import Ids

R = TypeVar("R", Conversation, Preference)


def parse_records(
    records: Sequence[Record], *, skip_damaged: bool
) -> tuple[Format, list[Conversation], list[DataError]]:
    """Returns format and conversations of the rows, and the errors of those that were left out.

    The first row decides the format.

    Raises:
        DataError: A row is damaged (unless ``skip_damaged``), or there are none.
    """
    formats = list[Format]()

    def parse(row: Mapping[str, Any], location: str) -> Conversation:
        if not formats:
            formats.append(detect_format(row, location))
        return parse_row(row, formats[0], location)

    conversations, errors = _parse_rows(records, parse, skip_damaged)
    return formats[0], conversations, errors


def parse_preferences(
    records: Sequence[Record], *, skip_damaged: bool
) -> tuple[Format, list[Preference], list[DataError]]:
    """Returns format and pairs of the rows, and the errors of those that were left out.

    Raises:
        DataError: A row is damaged (unless ``skip_damaged``), or there are none.
    """
    pairs, errors = _parse_rows(records, parse_preference, skip_damaged)
    has_roles = any(pair.chosen.messages for pair in pairs)
    return "preference" if has_roles else "text-preference", pairs, errors


def _parse_rows(
    records: Sequence[Record], parse: Callable[[Mapping[str, Any], str], R], skip_damaged: bool
) -> tuple[list[R], list[DataError]]:
    """Parses each row; also returns the errors of those that are left out.

    Raises:
        DataError: A row is damaged (unless ``skip_damaged``), or there are none.
    """
    parsed, errors = list[R](), list[DataError]()
    for location, row in records:
        try:
            if isinstance(row, DataError):
                raise row
            parsed.append(parse(row, location))
        except DataError as error:
            if not skip_damaged:
                if parsed or isinstance(row, DataError):  # not all rows are of another kind
                    correction = error.remedy or "correct or remove the row"
                    error.remedy = f"{correction}; or --skip-damaged leaves such rows out"
                raise
            errors.append(error)
    if not parsed:
        raise errors[0] if errors else DataError("the data hold no examples")
    return parsed, errors


@dataclass(frozen=True)
class Encoder:
    """Turns conversations into tokens.

    Attributes:
        render: Chat template.
        has_template: Whether conversations are rendered by a template.
        limit: Largest number of tokens of an example.
        too_long: What to do with longer ones.
    """

    tokenizer: Any
    render: Render
    has_template: bool
    system: Literal["keep", "merge", "drop"]
    limit: int
    too_long: Literal["refuse", "cut", "drop"]

    def encode(
        self, conversations: Sequence[Conversation], *, skip_damaged: bool = False
    ) -> ExampleSet:
        """Returns the examples of conversations.

        Raises:
            DataError: An example cannot be trained on (unless ``skip_damaged``), or is too long and
                ``too_long`` is ``refuse``.
        """
        examples, errors = list[Example](), list[DataError]()
        for conversation in conversations:
            try:
                examples += self.encode_one(conversation)
            except DataError as error:
                if not skip_damaged:
                    raise
                errors.append(error)
        num_long = self._count_long(examples)
        fitting = [fitted for example in examples if (fitted := self._fit(example)) is not None]
        if not fitting:
            raise errors[0] if errors else self._nothing_fits()
        return ExampleSet(
            fitting,
            pad=self.pad,
            num_cut=num_long - (len(examples) - len(fitting)),
            num_dropped=len(examples) - len(fitting),
            num_lost_tokens=sum(map(len, examples)) - sum(map(len, fitting)),
            errors=errors,
        )

    def encode_pairs(
        self, preferences: Sequence[Preference], *, skip_damaged: bool = False
    ) -> PairSet:
        """Returns the pairs of examples of preferences.

        A pair is left out if one of its examples is dropped, or if both are equal once cut.

        Raises:
            DataError: As of :meth:`encode`, or an answer would be several examples.
        """
        pairs, errors = list[tuple[Example, Example]](), list[DataError]()
        for preference in preferences:
            try:
                pairs.append(self._encode_pair(preference))
            except DataError as error:
                if not skip_damaged:
                    raise
                errors.append(error)
        examples = [example for pair in pairs for example in pair]
        self._count_long(examples)
        fitting, num_cut = list[Example](), 0
        for pair in pairs:
            chosen, rejected = map(self._fit, pair)
            if chosen is None or rejected is None:
                continue
            if np.array_equal(chosen.tokens, rejected.tokens):
                continue
            fitting += [chosen, rejected]
            num_cut += (chosen, rejected) != pair
        if not fitting:
            raise errors[0] if errors else self._nothing_fits()
        return PairSet(
            fitting,
            pad=self.pad,
            num_cut=num_cut,
            num_dropped=len(pairs) - len(fitting) // 2,
            num_lost_tokens=sum(map(len, examples)) - sum(map(len, fitting)),
            errors=errors,
        )

    def _encode_pair(self, preference: Preference) -> tuple[Example, Example]:
        examples = list[Example]()
        conversations = {"chosen": preference.chosen, "rejected": preference.rejected}
        for name, conversation in conversations.items():
            location = f"{conversation.location}, {name} answer"
            encoded = self.encode_one(replace(conversation, location=location))
            if len(encoded) > 1:
                raise DataError(
                    f"{location}: the chat template changes earlier answers",
                    found=f"there are {len(encoded)} answers after what both have in common",
                    remedy="pairs with one answer each, or --chat-template FILE with another"
                    " template",
                )
            examples += encoded
        return examples[0], examples[1]

    @property
    def pad(self) -> int:
        """Token that fills rows up."""
        token: int = self.tokenizer.pad_token_id or self.tokenizer.eos_token_id or 0
        return token

    def _count_long(self, examples: Sequence[Example]) -> int:
        """Returns the number of examples beyond the limit; DataError if they are refused."""
        long = [example for example in examples if len(example) > self.limit]
        if long and self.too_long == "refuse":
            longest, first = max(long, key=len), long[0].location
            raise DataError(
                f"{len(long):,} of {len(examples):,} examples are longer than --max-length"
                f" {self.limit}",
                found=f"{longest.location} has {len(longest):,} tokens, {first} is the first",
                remedy=f"--max-length {len(longest)}, or --too-long cut or drop",
            )
        return len(long)

    def _nothing_fits(self) -> DataError:
        return DataError(f"no example has anything to train on within --max-length {self.limit}")

    def encode_one(self, conversation: Conversation) -> list[Example]:
        """Returns the examples of one conversation, of any length.

        Raises:
            DataError: It cannot be rendered, or has no target.
        """
        location, is_plain = (
            conversation.location,
            not conversation.messages or not self.has_template,
        )
        if conversation.messages:
            placed = place_system(conversation.messages, self.system)
            conversation = Conversation(location, placed)
        return [
            encode(rendered, location, self.tokenizer, is_plain=is_plain)
            for rendered in render_conversation(conversation, self.render)
        ]

    def encode_prompt(self, messages: Sequence[Message]) -> tuple[str, list[int]]:
        """Returns text and tokens of the beginning of a conversation, up to the next answer."""
        prompt = self.render(place_system(messages, self.system), True)
        tokens = self.tokenizer(prompt, add_special_tokens=not self.has_template)["input_ids"]
        return prompt, list(tokens)

    def end_tokens(self) -> list[int]:
        """Returns the tokens that end an answer in this chat template, and a text."""
        ends, eos = set[int](), self.tokenizer.eos_token_id
        messages = Message("user", "Hi"), Message("assistant", "Hello", is_target=True)
        if self.has_template and self.tokenizer.chat_template:
            with suppress(DataError):  # the template may refuse such a conversation
                (example,) = self.encode_one(Conversation("the chat template", messages))
                special = special_tokens(self.tokenizer)
                for token in reversed(example.tokens[example.targets].tolist()):
                    if token in special:
                        ends.add(token)
                    elif self.tokenizer.decode([token]).strip():
                        break
        return sorted(ends if eos is None else {*ends, eos})

    def _fit(self, example: Example) -> Example | None:
        """Returns the example within the limit; ``None`` if it is dropped."""
        if len(example) <= self.limit:
            return example
        tokens, targets = example.tokens[: self.limit], example.targets[: self.limit]
        if self.too_long == "drop" or not targets.any():
            return None
        return Example(example.location, tokens, targets)


@dataclass
class ExampleSet:
    """A part of the data, which makes batches of rows.

    Attributes:
        pad: Token that fills rows up.
        capacity: Tokens of a row that holds several examples; 0 for one example a row.
        num_cut: Examples that were cut, and ``num_dropped`` those left out for their length.
        errors: Why others were left out.
    """

    examples: Sequence[Example]
    pad: int
    num_cut: int = 0
    num_dropped: int = 0
    num_lost_tokens: int = 0
    errors: Sequence[DataError] = ()
    capacity: int = 0
    targets: NDArray[np.int64] = field(init=False)

    def __post_init__(self) -> None:
        self.targets = np.array([int(example.targets.sum()) for example in self.examples])

    def __len__(self) -> int:
        return len(self.examples)

    def lengths(self) -> list[int]:
        """Returns the number of tokens of each example."""
        return [len(example) for example in self.examples]

    def batch(self, ids: Ids, draws: Draws | None) -> Rows:
        """Returns the rows of these examples."""
        chosen = [self.examples[number] for number in ids.tolist()]
        lengths = [len(example) for example in chosen]
        layout = (
            pack(lengths, self.capacity) if self.capacity else [[n] for n in range(len(chosen))]
        )
        return make_rows(chosen, layout, self.pad)

    def check_fit(self, size: int, window: int, tokenizer: Any) -> None:
        """Checks that a model can compute the examples.

        Args:
            size: Tokens that the model knows.
            window: Largest number of tokens of a text; 0 if it is not limited.

        Raises:
            DataError: An example has an unknown token, or is longer.
        """
        for example in self.examples:
            if 0 < window < len(example):
                raise DataError(
                    f"{example.location}: {len(example):,} tokens are more than the model can read",
                    found=f"the model was made for {window:,}",
                    remedy=f"--max-length {window}, with --too-long cut or drop",
                )
            if (largest := int(example.tokens.max())) >= size:
                token = tokenizer.convert_ids_to_tokens(largest)
                raise DataError(
                    f"{example.location}: token {largest} ({token!r}) is none of the model's",
                    found=f"the model has {size:,} tokens",
                    remedy="a --model whose tokenizer belongs to its weights",
                )

    def fingerprint(self) -> str:
        """Returns a hash of tokens and targets."""
        digest = hashlib.sha256()
        for example in self.examples:
            digest.update(len(example).to_bytes(8, "little"))
            digest.update(example.tokens.tobytes() + example.targets.tobytes())
        return digest.hexdigest()[:16]

    def describe(self, name: str, noun: str = "example") -> str:
        """Returns a line about number, lengths and losses by length."""
        lengths, num_targets = np.array([*map(len, self.examples)]), int(self.targets.sum())
        num_tokens, median = int(lengths.sum()), int(np.median(lengths))
        losses = [f"{self.num_cut:,} cut"] if self.num_cut else []
        losses += [f"{self.num_dropped:,} too long, left out"] if self.num_dropped else []
        losses += [f"{self.num_lost_tokens:,} tokens lost by that"] if losses else []
        losses += [f"{len(self.errors):,} damaged, left out"] if self.errors else []
        return "; ".join((
            f"{pluralize(len(self), noun)} for {name}: {num_tokens:,} tokens, {num_targets:,} of"
            f" them trained on ({num_targets / num_tokens:.0%}); length median {median}, longest"
            f" {lengths.max()}",
            *losses,
        ))  # fmt: skip


class PairSet(ExampleSet):
    """Pairs of examples: the chosen one and the rejected one in turn, each in a row of its own.

    Its length, and ``lengths``, count pairs; ``targets`` has those of each pair.
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        self.targets = self.targets.reshape(-1, 2).sum(1)

    def __len__(self) -> int:
        return len(self.examples) // 2

    def lengths(self) -> list[int]:
        """Returns the tokens that each pair takes in rows of equal length."""
        lengths = np.array([*map(len, self.examples)]).reshape(-1, 2)
        doubled: list[int] = (2 * lengths.max(1)).tolist()
        return doubled

    def batch(self, ids: Ids, draws: Draws | None) -> Rows:
        """Returns the rows of these pairs: example ``2 n`` is chosen, ``2 n + 1`` rejected."""
        chosen = [self.examples[2 * n + side] for n in ids.tolist() for side in (0, 1)]
        return make_rows(chosen, [[n] for n in range(len(chosen))], self.pad)

    def describe(self, name: str, noun: str = "pair") -> str:
        """Returns a line about number, lengths and losses by length."""
        return super().describe(name, noun)


def show_example(example: Example, decode: Callable[[Sequence[int]], str]) -> str:
    """Returns an example's text; lines that are trained on begin with ``>``, others with ``|``.

    A line break of the text ends in ``↵``, which belongs to the part before it.
    """
    changes = np.flatnonzero(np.diff(example.targets)) + 1
    lines = [
        f"{example.location}: {len(example)} tokens, {int(example.targets.sum())} trained on (>)"
    ]
    for part in np.split(np.arange(len(example)), changes):
        mark = ">" if example.targets[part[0]] else "|"
        text = decode(example.tokens[part].tolist()).replace("\n", "↵\n").removesuffix("\n")
        lines += [f"  {mark} {line}" for line in text.split("\n")]
    return "\n".join(lines)
