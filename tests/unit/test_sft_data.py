"""Tests data for fine-tuning language models: formats, templates, masks, lengths and packing."""

from __future__ import annotations

import json
import resource
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tiny_language_model import CHATML, chats, make_tokenizer, write_jsonl

from each_case import each_case
from paceline.recipes.data import splits_in_name
from paceline.recipes.language.chat_templates import (
    Example,
    encode,
    plain_render,
    render_conversation,
    template_render,
)
from paceline.recipes.language.conversations import (
    Conversation,
    Message,
    detect_format,
    parse_row,
    place_system,
)
from paceline.recipes.language.examples import Encoder, parse_records, show_example
from paceline.recipes.language.options import SftOptions
from paceline.recipes.language.records import read_file, read_splits
from paceline.recipes.language.rows import IGNORED, make_rows, pack
from paceline.recipes.language.sft import encode_parts, load_conversations
from paceline.spec.errors import DataError

AS = resource.RLIMIT_AS
USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]
# a template that removes thoughts from earlier answers and adds an empty one to the last
THINKING = (
    "{% for m in messages %}<|start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and loop.last %}<think>\n</think>\n{% endif %}"
    "{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)
NO_SYSTEM = CHATML.replace(
    "{% for m in messages %}", "{% for m in messages if m.role != 'system' %}"
)
REFUSES_SYSTEM = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('No system') }}{% endif %}" + CHATML
)
ENDS_PROMPT_WITH_THOUGHT = CHATML.replace("assistant\n{% endif", "assistant\n<think>\n{% endif")
SHOUTS_ONCE_ANSWERED = (
    "{% for m in messages %}"
    "{{ m.content | upper if messages | length > 1 else m.content }} {% endfor %}"
)


def conversation(*turns: tuple[str, str]) -> Conversation:
    messages = (Message(role, text, role == "assistant") for role, text in turns)  # type: ignore[arg-type]
    return Conversation("f line 1", tuple(messages))


def trained_texts(template: str, *turns: tuple[str, str]) -> list[list[str]]:
    tokenizer = make_tokenizer(template)
    rendered = render_conversation(conversation(*turns), template_render(tokenizer))
    return [[one.text[start:end] for start, end in one.spans] for one in rendered]


# -- formats -------------------------------------------------------------------------------


@each_case(
    ("name", "row"),
    [
        ("messages", {"messages": [USER, ANSWER]}),
        ("messages", {"conversations": [USER, ANSWER]}),
        (
            "messages",
            {"messages": [USER, {**ANSWER, "content": [{"type": "text", "text": "Hello"}]}]},
        ),
        ("sharegpt", {"conversations": SHAREGPT}),
        ("alpaca", {"instruction": "Hi", "input": "", "output": "Hello"}),
        ("prompt-completion", {"prompt": "Hi", "completion": "Hello"}),
        ("prompt-completion", {"prompt": [USER], "completion": [ANSWER]}),
        ("prompt-completion", {"question": "Hi", "answer": "Hello"}),
    ],
)
def test_formats_parse_to_equal_conversation(name: Any, row: dict[str, Any]) -> None:
    assert detect_format(row, "f line 1") == name
    expected = conversation(("user", "Hi"), ("assistant", "Hello"))
    assert parse_row(row, name, "f line 1") == expected


def test_system_messages_and_inputs_of_all_formats() -> None:
    alpaca = {"instruction": "Add", "input": "1 1", "output": "2", "system": "S"}
    assert [m.content for m in parse_row(alpaca, "alpaca", "f").messages] == [
        "S",
        "Add\n\n1 1",
        "2",
    ]
    row = {"system": "S", "conversations": SHAREGPT}
    assert parse_row(row, "sharegpt", "f").messages[0] == Message("system", "S")
    text = parse_row({"text": "Once"}, "text", "f line 3")
    assert (text.text, text.messages) == ("Once", ())


def test_weight_zero_and_prompt_messages_are_no_targets() -> None:
    turns = [USER, {**ANSWER, "weight": 0}, USER, ANSWER]
    parsed = parse_row({"messages": turns}, "messages", "f").messages
    assert [message.is_target for message in parsed] == [False, False, False, True]
    row = {"prompt": [USER, ANSWER, USER], "completion": [ANSWER]}
    parsed = parse_row(row, "prompt-completion", "f").messages
    assert [message.is_target for message in parsed] == [False, False, False, True]


@each_case(
    ("turns", "problem"),
    [
        ([ANSWER, USER], "roles out of order"),
        ([USER, USER, ANSWER], "roles out of order"),
        ([USER, ANSWER, {"role": "system", "content": "S"}, ANSWER], "roles out of order"),
        ([USER], "no message of the assistant"),
        ([USER, {"role": "assistant", "content": " \n"}], "message 2: the answer is empty"),
        ([USER, {"role": "assistant", "content": None}], 'message 2: "content" is not a text'),
        ([USER, {"role": "narrator", "content": "x"}], "message 2: unknown role 'narrator'"),
        ([USER, "Hello"], "message 2: no message"),
        ([USER, {**ANSWER, "tool_calls": [{}]}], '"tool_calls" cannot be trained on'),
        ([], "the list of messages is empty"),
    ],
)
def test_rejects_invalid_conversation_with_line(turns: Any, problem: str) -> None:
    with pytest.raises(DataError, match=r"^chat\.jsonl line 7") as caught:
        parse_row({"messages": turns}, "messages", "chat.jsonl line 7")
    assert problem in caught.value.message


@each_case(
    ("row", "problem"),
    [
        ({"messages": [USER, ANSWER], "tools": [{"type": "function"}]}, '"tools" cannot'),
        ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, '"history" cannot'),
        ({"messages": [USER, {**ANSWER, "reasoning_content": "Hm"}]}, 'message 2: "reasoning_c'),
        ({"messages": [USER, {**ANSWER, "function_call": {"name": "f"}}]}, '"function_call" ca'),
        ({"messages": [USER, {**ANSWER, "weight": 0.5}]}, "neither 0 nor 1"),
        ({"prompt": "a", "completion": None}, '"completion" is missing'),
        (
            {"messages": [{**USER, "content": [{"type": "image_url", "text": "a"}]}, ANSWER]},
            '"content" is not a text',
        ),
    ],
)
def test_rejects_unsupported_fields(row: dict[str, Any], problem: str) -> None:
    with pytest.raises(DataError, match=f"f line 1.*{problem}"):
        parse_row(row, detect_format(row, "f line 1"), "f line 1")


def test_accepts_system_message_as_field() -> None:
    for row in ({"messages": [USER, ANSWER]}, {"prompt": "Hi", "completion": "Hello"}):
        with_system = {**row, "system": "S", "tools": None, "history": []}
        messages = parse_row(with_system, detect_format(with_system, "f"), "f").messages
        assert messages[0] == Message("system", "S")
        assert messages[1:] == parse_row(row, detect_format(row, "f"), "f").messages


def test_rejects_unknown_or_mismatched_format() -> None:
    with pytest.raises(DataError, match="f line 1: the format is not known"):
        detect_format({"label": 1}, "f line 1")
    for data_format in ("messages", "sharegpt", "alpaca", "prompt-completion", "text"):
        with pytest.raises(DataError, match="f line 2"):
            parse_row({"label": 1}, data_format, "f line 2")  # type: ignore[arg-type]


# -- files ---------------------------------------------------------------------------------


def test_reads_equal_rows_from_all_file_types(tmp_path: Path) -> None:
    rows = [{"prompt": f"{n}, or\nnot?", "completion": str(n)} for n in range(3)]
    write_jsonl(tmp_path / "a.jsonl", rows)
    (tmp_path / "a.json").write_text(json.dumps({"data": rows}, indent=2))
    cells = "".join(f'"{row["prompt"]}",{row["completion"]}\r\n' for row in rows)
    (tmp_path / "a.csv").write_text("Prompt,completion\r\n" + cells)
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(__import__("pyarrow").Table.from_pylist(rows), tmp_path / "a.parquet")
    for suffix in ("jsonl", "json", "csv", "parquet"):
        assert [row for _, row in read_file(tmp_path / f"a.{suffix}")] == rows
    (tmp_path / "a.txt").write_text("one\n\ntwo\n")
    assert [*read_file(tmp_path / "a.txt")] == [
        (f"{tmp_path}/a.txt line 1", {"text": "one"}), (f"{tmp_path}/a.txt line 3", {"text": "two"})
    ]  # fmt: skip


def test_json_file_has_single_list_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps({"languages": ["en", "it"], "data": chats(2)}))
    assert [row for _, row in read_file(path)] == chats(2)
    path.write_text(json.dumps({"train": chats(3), "test": chats(1)}))
    with pytest.raises(DataError, match=r"a.json holds several lists") as caught:
        read_file(path)
    assert caught.value.found == "train with 3 items, test with 1 items"


def test_rejects_duplicate_json_key(tmp_path: Path) -> None:
    row = '{"prompt": "a", "completion": "b", "prompt": "c"}'
    (tmp_path / "a.jsonl").write_text(row)
    (tmp_path / "a.json").write_text(f"[{row}]")
    for name in ("a.jsonl line 1", "a.json"):
        with pytest.raises(DataError, match=rf"{name} is not valid JSON") as caught:
            parse_records([*read_file(tmp_path / name.split()[0])], skip_damaged=False)
        assert "the key 'prompt' is there twice" in caught.value.found


@pytest.mark.parametrize(
    ("table", "problem"),
    [
        ('prompt,completion\na,b\n"c,d\ne,f\n', "line 3 cannot be read as a table"),
        ('prompt,completion\na,"b\n"c",d\n', "line 2 cannot be read as a table"),
        ("prompt,completion,Prompt,,\na,b,c,,\n", "line 1 names two columns prompt"),
    ],
)
def test_rejects_malformed_table(table: str, problem: str, tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(table)
    with pytest.raises(DataError, match=rf"a\.csv {problem}"):
        [*read_file(tmp_path / "a.csv")]


def test_file_names_define_splits(tmp_path: Path) -> None:
    for name, count in (("train", 3), ("valid", 2), ("test", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(count))
    for form in ("{}", "{}-00001-of-00002", "{}_1", "{}.1", "chat-{}", "chat_{}2"):
        for path in [*tmp_path.iterdir()]:
            (split,) = splits_in_name(path.stem)
            path.rename(path.with_stem(form.format(split)))
        parts = read_splits(str(tmp_path), "", "", True)
        sizes = {name: len(rows) for name, rows in parts.items()}
        assert sizes == {"train": 3, "val": 2, "test": 1}


def test_held_out_files_are_not_trained_on(tmp_path: Path) -> None:
    for name, count in (("chat", 3), ("evaluation-0", 2), ("test-0", 1)):
        write_jsonl(tmp_path / f"{name}.jsonl", chats(count))
    parts = read_splits(str(tmp_path), "", "", True)
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 3, "test": 3}
    (tmp_path / "chat.jsonl").rename(tmp_path / "train-test.jsonl")
    with pytest.raises(DataError, match=r"train-test.jsonl may be of train or test"):
        read_splits(str(tmp_path), "", "", True)
    (tmp_path / "train-test.jsonl").unlink()
    with pytest.raises(DataError, match="has no file to train on") as caught:
        read_splits(str(tmp_path), "", "", True)
    assert caught.value.found.endswith("evaluation-0.jsonl, test-0.jsonl")


def test_invalid_json_is_named_or_skipped(tmp_path: Path) -> None:
    lines = [json.dumps(row) for row in chats(1)] * 70_000
    lines[69_999] = '{"messages": ['
    lines[3] = "[]"
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(lines))
    records = [*read_file(path)]
    with pytest.raises(DataError, match=r"chat.jsonl line 4 is not a JSON object"):
        parse_records(records, skip_damaged=False)
    _, conversations, errors = parse_records(records, skip_damaged=True)
    assert len(conversations) == 69_998
    assert [error.message.split("jsonl ")[1] for error in errors] == [
        "line 4 is not a JSON object", "line 70000 is not valid JSON"
    ]  # fmt: skip


def test_error_names_original_path_of_copy(tmp_path: Path) -> None:
    copy = tmp_path / "input0"
    copy.mkdir()
    write_jsonl(copy / "chat.jsonl", [*chats(1), {"messages": []}])
    records = read_splits("/home/me/chat.jsonl", str(copy), "", True)["train"]
    with pytest.raises(DataError, match=r"^/home/me/chat.jsonl line 2") as caught:
        parse_records(records, skip_damaged=False)
    assert "--skip-damaged" in caught.value.remedy


@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_lone_surrogate_error_names_row(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"a.{suffix}"
    rows = [json.dumps({"prompt": text, "completion": "b"}) for text in ("\U0001f600", "\ud83d")]
    path.write_text(f"[{','.join(rows)}]" if suffix == "json" else "\n".join(rows))
    records = [*read_file(path)]
    with pytest.raises(DataError, match=r"(item|line) 2 has half of a character"):
        parse_records(records, skip_damaged=False)
    assert len(parse_records(records, skip_damaged=True)[1]) == 1


def test_rejects_data_without_usable_rows(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text("{}\n[]\n")
    with pytest.raises(DataError, match="line 1: the format is not known"):
        parse_records([*read_file(tmp_path / "a.jsonl")], skip_damaged=True)
    (tmp_path / "b.jsonl").write_text("\n")
    with pytest.raises(DataError, match="no examples"):
        parse_records([*read_file(tmp_path / "b.jsonl")], skip_damaged=True)


def test_rejects_split_with_too_few_rows(tmp_path: Path) -> None:
    one = write_jsonl(tmp_path / "one.jsonl", chats(1))
    none = write_jsonl(tmp_path / "none.jsonl", [])
    options = SftOptions(model="m", data=str(one))
    with pytest.raises(DataError, match=r"one.jsonl has a single example") as caught:
        encode_parts(encoder(200), load_conversations(options), options)
    assert "--test-data" in caught.value.remedy
    with pytest.raises(DataError, match=r"none.jsonl has no rows for test"):
        load_conversations(replace(options, test_data=str(none)))
    with pytest.raises(DataError, match=r"none.jsonl has no rows for train"):
        load_conversations(replace(options, data=str(none)))
    encoded_parts = encode_parts(
        encoder(200), load_conversations(replace(options, test_data=str(one))), options
    )
    assert [len(part) for part in encoded_parts] == [1, 1]


# -- templates and masks -------------------------------------------------------------------


def test_targets_include_answers_and_end_tokens() -> None:
    turns = [("system", "S"), ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    assert trained_texts(CHATML, *turns) == [["b<|end|>\n", "d<|end|>\n"]]


def test_splits_conversation_if_template_changes_answers() -> None:
    turns = [("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d")]
    thought_format = "<think>\n</think>\n{}<|end|>\n"
    assert trained_texts(THINKING, *turns) == [
        [thought_format.format("b")],
        [thought_format.format("d")],
    ]
    assert trained_texts(THINKING, *turns[:2]) == [[thought_format.format("b")]]


def test_templates_may_drop_thoughts_and_whitespace() -> None:
    trims = CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[-1] | trim }}")
    turns = [("user", " a  b\n"), ("assistant", "<think>\nSo\n</think>\n\nc")]
    assert trained_texts(trims, *turns, *turns) == [["c<|end|>\n"] * 2]


def test_generation_prompt_may_add_text_absent_from_answers() -> None:
    turns = [("user", "a"), ("assistant", "b")]
    assert trained_texts(ENDS_PROMPT_WITH_THOUGHT, *turns) == [["b<|end|>\n"]]


def test_rejects_lossy_templates() -> None:
    turns = [("system", "Be brief."), ("user", "a"), ("assistant", "b")]
    with pytest.raises(DataError, match="f line 1: the chat template drops the system message"):
        trained_texts(NO_SYSTEM, *turns)
    for condition, number in (
        ("m.role != 'user'", 2),
        ("m.role != 'assistant'", 3),
        ("m.role != 'user' or loop.revindex < 3", 2),
    ):
        lossy = CHATML.replace("{{ m.content }}", f"{{{{ m.content if {condition} }}}}")
        longer = [("user", "A longer question"), ("assistant", "Yes, so"), *turns[1:]]
        problem = f"f line 1, message {number}: the chat template drops or changes the message"
        with pytest.raises(DataError, match=problem):
            trained_texts(lossy, turns[0], *longer)
    with pytest.raises(DataError, match="f line 1: the chat template refuses") as caught:
        trained_texts(REFUSES_SYSTEM, *turns)
    assert caught.value.found == "No system"
    assert "--system merge" in caught.value.remedy
    with pytest.raises(DataError, match="f line 1: the chat template renders a conversation diff"):
        trained_texts(SHOUTS_ONCE_ANSWERED, *turns[1:])


def test_system_messages_can_be_merged_or_dropped() -> None:
    messages = conversation(("system", "S"), ("user", "a"), ("assistant", "b")).messages
    assert place_system(messages, "keep") == messages
    assert [m.content for m in place_system(messages, "merge")] == ["S\n\na", "b"]
    assert place_system(messages, "drop") == place_system(messages[1:], "merge") == messages[1:]


def example(*turns: tuple[str, str], template: str = CHATML) -> Example:
    tokenizer = make_tokenizer(template)
    (rendered,) = render_conversation(conversation(*turns), template_render(tokenizer))
    return encode(rendered, "f line 1", tokenizer, is_plain=False)


def decoded_targets(built: Example) -> str:
    text: str = make_tokenizer().decode(built.tokens[built.targets].tolist())
    return text


def test_targets_are_answer_tokens() -> None:
    built = example(("user", "Größe?"), ("assistant", "100 €"))
    assert decoded_targets(built) == "100 €<|end|>"


def test_targets_end_with_the_token_that_ends_a_turn() -> None:
    turns = [("user", "a"), ("assistant", "b\n"), ("user", "c"), ("assistant", "d")] * 2
    for space in ("", "\n", " \n\n"):
        built = example(*turns, template=CHATML.replace("<|end|>\n", f"<|end|>{space}"))
        assert decoded_targets(built) == "b\n<|end|>d<|end|>" * 2
        plain = Conversation("f", text=f"a<|end|>{space}")
        (rendered,) = render_conversation(plain, plain_render)
        assert decoded_targets(encode(rendered, "f", make_tokenizer(), is_plain=True)) == "<|end|>"


def test_empty_answer_without_end_token_is_a_target() -> None:
    template = CHATML.replace("<|end|>\n", "\n")
    turns = [("user", "a"), ("assistant", ""), ("user", "c"), ("assistant", "d")]
    header = template.replace("{{ m.role }}\n", "{{ m.role }}<|start|>\n")
    header = header.replace("assistant\n{%", "assistant<|start|>\n{%")
    assert decoded_targets(example(*turns, template=header)) == "\nd\n<|end|>"
    assert decoded_targets(example(*turns[:2], template=header)) == "\n"


def test_adds_end_token_if_template_has_none() -> None:
    template_without_end = CHATML.replace("<|end|>\n", "\n")
    built = example(("user", "a"), ("assistant", "b"), template=template_without_end)
    assert decoded_targets(built) == "b\n<|end|>"
    tokenizer = make_tokenizer(None)
    plain_example = render_conversation(Conversation("f", text="Once"), plain_render)[0]
    assert (
        decoded_targets(encode(plain_example, "f", tokenizer, is_plain=True)) == "nce<|end|>"
    )  # no "O" before


def test_end_tokens_follow_template() -> None:
    cases = {
        CHATML: [1],
        CHATML.replace("{{ m.content }}<|end|>", "{{ m.content }}<|start|>"): [0, 1],
        CHATML + "{% if not add_generation_prompt %}<|start|>{% endif %}": [0, 1],
        REFUSES_SYSTEM.replace("'system'", "'user'"): [1],
        ENDS_PROMPT_WITH_THOUGHT: [1],
    }
    for template, ends in cases.items():
        tokenizer = make_tokenizer(template)
        built = Encoder(tokenizer, template_render(tokenizer), True, "keep", 99, "refuse")
        assert built.end_tokens() == ends
    assert replace(built, has_template=False).end_tokens() == [1]


def test_plain_render_joins_prompt_and_completion() -> None:
    pair = conversation(("user", "1, 2, "), ("assistant", "3"))
    (rendered,) = render_conversation(pair, plain_render)
    assert decoded_targets(encode(rendered, "f", make_tokenizer(None), is_plain=True)) == "3<|end|>"
    with pytest.raises(DataError, match="--chat-template none joins only") as caught:
        render_conversation(conversation(*[("user", "a"), ("assistant", "b")] * 2), plain_render)
    assert caught.value.found == "the roles are user, assistant, user, assistant"


def test_rejects_example_without_targets() -> None:
    user_only_template = "{% for m in messages %}{{ m.content if m.role == 'user' }}{% endfor %}"
    with pytest.raises(DataError, match=r"^f line 1"):
        example(("user", "a"), ("assistant", "b"), template=user_only_template)
    tokenizer = make_tokenizer(None)
    tokenizer.eos_token = None
    plain_example = render_conversation(Conversation("f line 9", text="x"), plain_render)[0]
    with pytest.raises(DataError, match="f line 9: no token to train on"):
        encode(plain_example, "f line 9", tokenizer, is_plain=True)


def test_show_example_marks_targets() -> None:
    built = example(("user", "a\nb"), ("assistant", "c\nd"))
    listing = show_example(built, make_tokenizer().decode)
    assert listing.splitlines()[1:] == [
        *("  | <|start|>user↵", "  | a↵", "  | b<|end|>↵", "  | <|start|>assistant↵"),
        *("  > c↵", "  > d<|end|>", "  | ↵"),
    ]


# -- lengths -------------------------------------------------------------------------------


def encoder(limit: int, too_long: Any = "refuse") -> Encoder:
    tokenizer = make_tokenizer()
    return Encoder(tokenizer, template_render(tokenizer), True, "keep", limit, too_long)


def test_oversized_examples_are_rejected_cut_or_dropped() -> None:
    texts = [Conversation(f"f line {n}", text="x" * n) for n in (5, 90, 20, 30)]
    with pytest.raises(
        DataError, match="3 of 4 examples are longer than --max-length 10"
    ) as caught:
        encoder(10).encode(texts)
    assert caught.value.found == "f line 90 has 91 tokens, f line 90 is the first"
    assert "--max-length 91" in caught.value.remedy
    cut = encoder(10, "cut").encode(texts)
    assert (cut.lengths(), cut.num_cut, cut.num_dropped) == ([6, 10, 10, 10], 3, 0)
    assert cut.num_lost_tokens == 81 + 11 + 21
    dropped = encoder(10, "drop").encode(texts)
    assert (dropped.lengths(), dropped.num_cut, dropped.num_dropped) == ([6], 0, 3)
    description = dropped.describe("training")
    assert description.startswith("1 example for training: 6 tokens")
    assert "3 too long, left out; 143 tokens lost by that" in description


def test_drops_example_without_targets_after_cut() -> None:
    rows = [conversation(("user", "x" * n), ("assistant", "yes")) for n in (1, 100)]
    built = encoder(40, "cut").encode(rows)
    assert (len(built), built.num_cut, built.num_dropped) == (1, 0, 1)
    with pytest.raises(DataError, match="no example has anything to train on within"):
        encoder(40, "cut").encode(rows[1:])


def test_check_fit_rejects_large_tokens_and_lengths() -> None:
    built = encoder(99).encode([conversation(("user", "a"), ("assistant", "b"))])
    built.check_fit(258, 64, make_tokenizer())
    built.check_fit(258, 0, make_tokenizer())
    with pytest.raises(DataError, match=r"f line 1: token \d+ \('.'\) is none of the model's"):
        built.check_fit(60, 64, make_tokenizer())
    with pytest.raises(DataError, match=r"f line 1: \d+ tokens are more than the model can read"):
        built.check_fit(258, 8, make_tokenizer())


# -- packing -------------------------------------------------------------------------------


@given(st.lists(st.integers(1, 20), min_size=1, max_size=60))
def test_packing_uses_all_examples_within_capacity(lengths: list[int]) -> None:
    rows = pack(lengths, 20)
    assert sorted(n for row in rows for n in row) == [*range(len(lengths))]
    fill = [sum(lengths[n] for n in row) for row in rows]
    assert max(fill) <= 20
    # at most one row is half empty, otherwise two rows could be merged
    assert sum(2 * filled <= 20 for filled in fill) <= 1


def masked_example(length: int, targets: Sequence[int]) -> Example:
    mask = np.isin(np.arange(length), targets)
    return Example("f", np.arange(length) + 10, mask)


def test_rows_restart_positions_and_label_targets_only() -> None:
    rows = make_rows(
        [masked_example(3, [2]), masked_example(2, [1]), masked_example(4, [1, 3])],
        [[0, 1], [2]],
        pad=7,
    )
    assert rows.tokens.tolist() == [[10, 11, 12, 10, 11], [10, 11, 12, 13, 7]]
    assert rows.positions.tolist() == [[0, 1, 2, 0, 1], [0, 1, 2, 3, 0]]
    none = IGNORED
    assert rows.labels.tolist() == [[none, none, 12, none, 11], [none, 11, none, 13, none]]
    assert rows.examples.tolist() == [[0, 0, 0, 1, 1], [2, 2, 2, 2, 0]]


@pytest.mark.parametrize("template", [
    "{{ 'x' * 6000000000 }}",
    "{% set n = namespace(x='x' * 1000) %}"
    "{% for i in range(40) %}{% set n.x = n.x ~ n.x %}{% endfor %}",
])  # fmt: skip
def test_template_memory_is_limited(template: str) -> None:
    render, limits = template_render(make_tokenizer(template)), resource.getrlimit(AS)
    with pytest.raises(ValueError, match="more than 2 GiB of memory"):
        render(conversation(("user", "hello")).messages, False)
    assert resource.getrlimit(AS) == limits
