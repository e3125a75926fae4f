"""Tests the parts of the translation recipe: data, tokenizers, network, search, scores."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from paceline.recipes import parse_options, tokens
from paceline.recipes.data.pairs import GENERATORS, PairData, load_pairs, spell_number
from paceline.recipes.options import TranslationOptions
from paceline.recipes.scores import edit_distance, error_rate, translation_scores
from paceline.recipes.tokens import padded, sentences
from paceline.recipes.transformer import (
    PAD,
    Cache,
    Search,
    Shape,
    Transformer,
    beam_search,
    decode,
    greedy,
)
from paceline.recipes.translation import balanced_order
from paceline.spec.errors import DataError, SettingError
from paceline.train.data.order import Order, group_by_length

WORDS = ["the", "quick", "brown", "fox,", "it's", "42", "(forty-two)", "dogs"]


def read(name: Path | str, languages: tuple[str, str] = ("", ""), target: str = "") -> PairData:
    source_lang, target_lang = languages
    return load_pairs(TranslationOptions(data=str(name), target=target, source_lang=source_lang,
                                         target_lang=target_lang))  # fmt: skip


# -- data ----------------------------------------------------------------------------------


def test_formats_have_equal_fingerprint(tmp_path: Path) -> None:
    pairs = [(f"eins {n}", f"one {n}") for n in range(20)]
    (tmp_path / "a.tsv").write_text("".join(f"{a}\t{b}\tmore\r\n" for a, b in pairs))
    (tmp_path / "a.de").write_text("".join(f"{a}\n" for a, _ in pairs))
    (tmp_path / "a.en").write_text("\n".join(b for _, b in pairs))
    rows = (f'{{"translation": {{"de": "{a}", "en": "{b}"}}}}\n' for a, b in pairs)
    (tmp_path / "a.jsonl").write_text("".join(rows))
    found = [
        read(tmp_path / "a.tsv"),
        read(tmp_path / "a.de", target=str(tmp_path / "a.en")),
        read(tmp_path / "a.jsonl", languages=("de", "en")),
    ]
    assert len({one.fingerprint for one in found}) == 1
    assert sorted(found[0].splits["train"] + found[0].splits["val"]) == sorted(pairs)
    assert len(found[0].splits["val"]) == 2


def test_skips_incomplete_rows(tmp_path: Path) -> None:
    rows = [{"de": f"eins {n}", "en": f"one {n}"} for n in range(4)]
    rows += [{"de": "zwei"}, {"translation": "three", "de": "drei", "en": "three"}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = read(tmp_path / "a.jsonl", languages=("de", "en"))
    assert (sum(map(len, data.splits.values())), data.skipped) == (5, 1)


def test_folder_with_splits(tmp_path: Path) -> None:
    for name in ("train", "valid", "test"):
        (tmp_path / f"{name}.de").write_text("ja\n\nnein\n")
        (tmp_path / f"{name}.en").write_text("yes\nmaybe\nno\n")
    data = read(tmp_path, languages=("de", "en"))
    pairs = [("ja", "yes"), ("nein", "no")]
    assert data.splits == {"train": pairs, "val": pairs, "test": pairs}
    assert (data.held_out, data.skipped) == ("val", 3)


@pytest.mark.parametrize(
    ("content", "words"),
    [("", "is empty"), ("a\tb\nno tab here\n", "line 2 has no tab"), ("a\t\n", "no pairs")],
)
def test_invalid_tsv_error_names_file(tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "p.tsv").write_text(content)
    with pytest.raises(DataError, match=words) as error:
        read(tmp_path / "p.tsv")
    assert str(tmp_path / "p.tsv") in str(error.value)


def test_rejects_files_of_different_length(tmp_path: Path) -> None:
    (tmp_path / "a").write_text("1\n2\n")
    (tmp_path / "b").write_text("1\n")
    with pytest.raises(DataError, match="lines: 2 and 1"):
        read(tmp_path / "a", target=str(tmp_path / "b"))


def test_generated_corpora() -> None:
    assert spell_number(0) == "zero"
    assert spell_number(19) == "nineteen"
    assert spell_number(20) == "twenty"
    assert spell_number(342) == "three hundred forty-two"
    assert spell_number(999_999).startswith("nine hundred ninety-nine thousand nine hundred")
    for maker in GENERATORS.values():
        assert maker(1) == maker(1) != maker(2)


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--model=huge"], "--model huge: unknown"),
        (["--heads=3"], "multiple of --heads 3"),
        (["--data=number"], "did you mean --data numbers"),
        (["--data=my-pairs"], "there is no folder, file or data set of this name"),
        (["--target=x"], "has both sides"),
        (["--source-lang=en"], "need each other"),
        (["--dropout=1"], "--dropout"),
        (["--beam=0"], "--beam 0 must be at least 1"),
    ],
)
def test_rejects_invalid_settings(flags: list[str], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        parse_options("translation", flags)


# -- tokenizers ----------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["word", "bpe", "char"])
@given(words=st.lists(st.sampled_from(WORDS), min_size=1, max_size=8))
def test_tokenizer_round_trip(kind: tokens.Kind, words: list[str]) -> None:
    text = " ".join(words)
    tokenizer = _tokenizer(kind)
    rows = tokenizer.encode([text])
    assert tokenizer.decode(rows) == [text]
    assert tokens.from_json(tokenizer.to_json()).encode([text]) == rows


_tokenizers: dict[str, tokens.Tokenizer] = {}


def _tokenizer(kind: tokens.Kind) -> tokens.Tokenizer:
    if kind not in _tokenizers:
        _tokenizers[kind] = tokens.train_tokenizer(kind, [" ".join(WORDS), *WORDS], min_frequency=1)
    return _tokenizers[kind]


def test_rare_words_are_unknown() -> None:
    tokenizer = tokens.train_tokenizer("word", ["a b", "a c"], min_frequency=2)
    assert tokenizer.decode(tokenizer.encode(["a b"])) == ["a[UNK]"]
    assert tokenizer.encode(["a"])[0][0] >= len(tokens.SPECIAL)


def test_long_sentences() -> None:
    both = (_tokenizer("char"), _tokenizer("char"))
    pairs = [("the", "fox"), ("the quick", "fox")]
    assert sentences(pairs, both, 5, "drop").num_dropped == 1
    assert [len(row) for row in sentences(pairs, both, 5, "cut").source] == [4, 6]
    with pytest.raises(DataError, match="--seq-len 5"):
        sentences(pairs, both, 5, "refuse")
    with pytest.raises(DataError, match="no pair"):
        sentences(pairs, both, 2, "drop")


# -- order ---------------------------------------------------------------------------------


@given(size=st.integers(1, 300), batch=st.integers(1, 40), epoch=st.integers(0, 3))
def test_grouped_order_is_a_permutation(size: int, batch: int, epoch: int) -> None:
    lengths = np.random.default_rng(size).integers(1, 50, size).tolist()
    order = group_by_length(Order(size, 7), lengths, batch)
    ids = order.epoch(epoch)
    assert sorted(ids.tolist()) == list(range(size))
    assert (group_by_length(Order(size, 7), lengths, batch).epoch(epoch) == ids).all()
    whole = [np.ptp(np.array(lengths)[ids[i : i + batch]]) for i in range(0, size, batch)]
    assert size <= batch or np.mean(whole) <= np.ptp(lengths)


@given(st.lists(st.integers(1, 9), max_size=20), st.integers(1, 5))
def test_balanced_order_is_permutation(lengths: list[int], ranks: int) -> None:
    assert sorted(balanced_order(lengths, ranks)) == list(range(len(lengths)))


# -- network and search --------------------------------------------------------------------


@pytest.fixture(scope="module")
def network() -> Transformer:
    torch.manual_seed(1)
    return Transformer(Shape(20, 23, 16, 2, 4, 32)).double().eval()


SOURCE = padded([[5, 6, 7, 8, 3], [9, 3], [4, 4, 3]])
SEARCH = Search(start=2, end=3, limit=12)


@torch.no_grad()
def test_cached_decoding_equals_full_pass(network: Transformer) -> None:
    target = torch.randint(4, 23, (3, 6), generator=torch.Generator().manual_seed(2))
    whole = network(SOURCE, target)
    memory, mask = network.encode(SOURCE)
    cache = Cache()
    for position in range(6):
        step = network.step(target[:, position], memory, mask, cache)
        assert torch.allclose(step, whole[:, position], atol=1e-12)


@torch.no_grad()
def test_padding_does_not_change_output(network: Transformer) -> None:
    target = torch.tensor([[2, 5, 6]])
    unpadded = network(SOURCE[1:2, :2], target)
    assert torch.allclose(network(SOURCE[1:2], target), unpadded, atol=1e-12)
    assert decode(network, SOURCE[1:2, :2], SEARCH) == decode(network, SOURCE, SEARCH)[1:2]


@torch.no_grad()
def test_beam_search_equals_or_beats_greedy(network: Transformer) -> None:
    one = beam_search(network, SOURCE, SEARCH)
    assert [row[: row.index(3)] if 3 in row else row for row in one.tolist()] == [
        row[: row.index(3)] if 3 in row else row for row in greedy(network, SOURCE, SEARCH).tolist()
    ]
    log_likelihoods = [
        _log_likelihood(network, beam_search(network, SOURCE, _search(k)), SOURCE) for k in (1, 8)
    ]
    assert bool((log_likelihoods[1] >= log_likelihoods[0] - 1e-9).all())


def _search(beam: int) -> Search:
    return Search(2, 3, 4, beam, length_penalty=0.0)


def _log_likelihood(
    network: Transformer, found: torch.Tensor, source: torch.Tensor
) -> torch.Tensor:
    given = torch.cat((torch.full((len(found), 1), 2), found[:, :-1]), 1)
    log_probs = network(source, given).log_softmax(2).gather(2, found[:, :, None])[:, :, 0]
    return (log_probs * (found != PAD)).sum(1)


def test_post_norm_trains() -> None:
    network = Transformer(Shape(9, 9, 8, 1, 2, 16, pre_norm=False))
    network(torch.tensor([[4, 3]]), torch.tensor([[2, 5]])).sum().backward()
    assert all(one.grad is not None for one in network.parameters())


# -- scores --------------------------------------------------------------------------------


def test_edit_distance_matches_dynamic_programming() -> None:
    draw = random.Random(0)
    for _ in range(500):
        a, b = ("".join(draw.choices("abc", k=draw.randrange(12))) for _ in range(2))
        assert edit_distance(a, b) == _reference_distance(a, b)


def _reference_distance(a: str, b: str) -> int:
    row = list(range(len(b) + 1))
    for i, x in enumerate(a, 1):
        new = [i]
        for j, y in enumerate(b, 1):
            new.append(min(row[j] + 1, new[-1] + 1, row[j - 1] + (x != y)))
        row = new
    return row[-1]


def test_error_rate_and_translation_scores() -> None:
    assert error_rate(["kitten"], ["sitting"]) == 3 / 7
    found = translation_scores(["a b c d", "e f g h"], ["a b c d", "e f g i"])
    assert found["wer"] == 1 / 8
    assert found["exact"] == 0.5
    assert 0 < found["bleu"] < 100
    assert translation_scores(["a b c d e"], ["a b c d e"])["bleu"] == pytest.approx(100)
