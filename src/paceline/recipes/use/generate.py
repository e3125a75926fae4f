"""Write text with a language model: ``paceline generate RUN PROMPT…``, or from standard input.

Standard output gets the new text as it is written, and nothing else.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from paceline import train
from paceline.program import library
from paceline.recipes.argv import check_at_least, run_command
from paceline.recipes.language.conversations import Message
from paceline.recipes.language.sft import generate as continue_tokens
from paceline.recipes.language.sft import num_free
from paceline.recipes.use import GenerateOptions, prompt_texts
from paceline.recipes.use.evaluate import local_session, module_of
from paceline.recipes.use.language_models import Generator
from paceline.spec.errors import DataError, SettingError
from paceline.spec.terminal import clean


def generate(options: GenerateOptions) -> None:
    """Continues texts, or holds a conversation."""
    check_at_least("--max-tokens", options.max_tokens, 1)
    check_at_least("--temperature", options.temperature, 0)
    if not 0 < options.top_p <= 1:
        raise SettingError(f"--top-p {options.top_p} must be above 0 and at most 1")
    module = module_of(options.run)
    if not hasattr(module, "load_generator"):
        raise SettingError(
            f"{options.run} holds no language model",
            remedy="paceline predict or translate uses other models",
        )
    config = train.load_config(Path(options.run))
    with local_session(options.device, config) as session, session.autocast():
        generator: Generator = module.load_generator(options.run, session)
        torch.manual_seed(options.seed)
        if generator.is_chat if options.chat is None else options.chat:
            converse(generator, options)
            return
        if options.system:
            raise SettingError("--system has no effect without --chat", remedy="leave it out")
        for text in valid_texts(prompt_texts(options.prompts) or whole_input()):
            write(generator, generator.encode(text), options)


def converse(generator: Generator, options: GenerateOptions) -> None:
    """Answers one message after the other; each answer sees all earlier messages."""
    if generator.encode_chat is None:
        raise SettingError(
            f"--chat: the model of {options.run} has no chat template",
            found="it was trained on texts",
            remedy="--no-chat continues a text",
        )
    messages = [Message("system", text) for text in valid_texts([options.system]) if text]
    for text in valid_texts(prompt_texts(options.prompts) or lines()):
        messages.append(Message("user", text))
        try:
            tokens = generator.encode_chat(messages)
        except ValueError as error:
            raise DataError("the chat template refuses a message", found=str(error)) from None
        messages.append(Message("assistant", write(generator, tokens, options)))


def valid_texts(texts: Iterable[str]) -> Iterator[str]:
    """Yields texts as they are read; DataError for one that is not in UTF-8."""
    try:
        for text in texts:
            text.encode()
            yield text
    except UnicodeError as error:
        raise DataError(
            "a prompt is not in UTF-8",
            found=str(error),
            remedy="convert it: iconv -f WINDOWS-1252 -t UTF-8 OLD > NEW",
        ) from None


def whole_input() -> Iterator[str]:
    """Yields all of standard input as one text."""
    yield sys.stdin.read()


def lines() -> Iterator[str]:
    """Yields the lines of standard input that are not blank, after a sign on a terminal."""
    while True:
        if sys.stdin.isatty():
            print("> ", end="", file=sys.stderr, flush=True)
        if not (line := sys.stdin.readline()):
            return
        if line.strip():
            yield line.rstrip("\n")


def write(generator: Generator, tokens: Sequence[int], options: GenerateOptions) -> str:
    """Continues tokens, prints the new text as it comes, and returns it.

    Raises:
        DataError: There are no tokens, or more than the model can read.
    """
    if not tokens:
        raise DataError("the prompt is empty", remedy="type how the text begins")
    if (num_more := num_free(generator.model, tokens)) < 1:
        raise DataError(
            f"the text has {len(tokens):,} tokens, which leave no room for more",
            found=f"the model can read {num_more + len(tokens):,}",
            remedy="a shorter text",
        )
    transformers = library("transformers", "text is generated")
    streamer = transformers.TextStreamer(
        generator.tokenizer, skip_prompt=True, skip_special_tokens=True
    )
    streamer.on_finalized_text = show
    choice: dict[str, Any] = {
        "temperature": options.temperature, "top_p": options.top_p, "top_k": 0,
    }  # fmt: skip
    return continue_tokens(
        generator.model,
        generator.tokenizer,
        tokens,
        options.max_tokens,
        streamer=streamer,
        **({"do_sample": True, **choice} if options.temperature else {}),
    )


def show(text: str, stream_end: bool = False) -> None:
    """Prints a part of a text."""
    print(clean(text), end="\n" if stream_end else "", flush=True)


main = partial(run_command, generate, GenerateOptions, "paceline generate")


if __name__ == "__main__":
    sys.exit(main())
