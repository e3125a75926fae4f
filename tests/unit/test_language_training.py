"""Tests training a tiny language model from scratch: data, tokens, network and checkpoints."""

from __future__ import annotations

import copy
import gzip
import io
import json
import math
import stat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from recipe_tools import config, hub_variables, one_thread, records  # noqa: F401 - fixtures
from safetensors.torch import load_file
from tokenizers import Tokenizer
from torch.nn.functional import cross_entropy

from command_lines import overridden
from paceline.recipes.language import memory
from paceline.recipes.language.corpus import PIECE_CHARACTERS, Corpus, cut
from paceline.recipes.language.decoder import Decoder, Shape
from paceline.recipes.language.language import (
    derive,
    describe_corpus,
    describe_training,
    main,
    read_once_per_host,
)
from paceline.recipes.language.muon import MuonWithAuxiliary, orthogonalize
from paceline.recipes.language.options import LanguageOptions
from paceline.recipes.language.token_files import (
    TokenRows,
    encode,
    encoded_rows,
    token_folder,
    train_bpe,
    write_tokens,
)
from paceline.recipes.optimization import Curve
from paceline.recipes.tokens import read_tokenizer
from paceline.recipes.use import evaluate, export, generate, predict
from paceline.spec.errors import DataError, SettingError

BASE = (
    *("--device=cpu", "--dtype=float64", "--log-every=1", "--depth=1", "--vocab-size=300"),
    *("--max-length=16", "--global-batch=8", "--steps=6", "--evaluate-every=99"),
)


def lines(count: int, start: int = 0) -> str:
    return "".join(f"{n} and {n + 1} make {2 * n + 1}.\n" for n in range(start, start + count))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Writes a text of a few kilobytes; returns its path."""
    path = tmp_path_factory.mktemp("data") / "sums.txt"
    path.write_text(lines(200))
    return path


def train(data: Path, run: Path, *flags: str) -> int:
    return main(overridden([f"--data={data}", f"--run-dir={run}", *BASE], flags))


def corpus(data: Path, **options: Any) -> Corpus:
    return Corpus(LanguageOptions(data=str(data), **options))


def texts(loaded: Corpus) -> dict[str, list[str]]:
    return {part: [*loaded.texts(part)] for part in loaded.splits}


def test_held_out_pieces_are_removed_from_training(data: Path) -> None:
    complete = data.read_text()
    parts = texts(corpus(data, val_fraction=0.1))
    joined = "".join(parts["train"])
    held_out = "".join(parts["val"])
    assert len(held_out) == pytest.approx(0.1 * len(complete), rel=0.3)
    assert sorted(joined.splitlines() + held_out.splitlines()) == sorted(complete.splitlines())
    assert len(parts["train"]) in (len(parts["val"]), len(parts["val"]) + 1)


def test_cut_prefers_line_and_word_boundaries() -> None:
    assert [*cut("aaa bbb\nccc ddd\neee", 4)] == ["aaa bbb\n", "ccc ddd\n", "eee"]
    assert [*cut("aaaaa bbbbb ccccc", 4)] == ["aaaaa ", "bbbbb ", "ccccc"]
    assert [*cut("a" * 10, 4)] == ["aaaa", "aaaaaa"]
    assert [*cut("a" * 5, PIECE_CHARACTERS)] == ["aaaaa"]


def test_reads_texts_and_tables_of_folder(tmp_path: Path) -> None:
    (tmp_path / "deep/er").mkdir(parents=True)
    (tmp_path / "deep/er/a.rst").write_text("first")
    (tmp_path / "b.jsonl").write_text('{"text": "second"}\n{"text": "third"}\n')
    (tmp_path / "c.png").write_bytes(b"\x89PNG\0")
    (tmp_path / ".git").mkdir()
    (tmp_path / ".git/config").write_text("hidden")
    loaded = corpus(tmp_path)
    assert loaded.skipped == ["c.png"]
    assert sorted("".join(map("".join, texts(loaded).values()))) == sorted("firstsecondthird")


def test_folder_and_file_names_define_splits(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    (tmp_path / "data").mkdir()
    (tmp_path / "train").mkdir()
    table = pyarrow.table({"body": ["one", "two"]})
    parquet.write_table(table, tmp_path / "train/0.parquet")
    parquet.write_table(table, tmp_path / "val-00000-of-00001.parquet")
    loaded = corpus(tmp_path, text_column="body")
    assert texts(loaded) == {"train": ["one", "two"], "val": ["one", "two"]}
    assert loaded.split == {"method": "as in the files"}
    with pytest.raises(DataError, match="row 1 has no text in the column text") as caught:
        corpus(tmp_path)
    assert "--text-column" in caught.value.remedy


def test_tests_folder_of_code_is_training_data(tmp_path: Path) -> None:
    (tmp_path / "test").mkdir()
    (tmp_path / "test/test_a.py").write_text("assert True\n" * 50)
    (tmp_path / "a.py").write_text("pass\n" * 50)
    assert corpus(tmp_path).splits == ("train", "val")


def test_held_out_files_are_excluded_from_training(tmp_path: Path) -> None:
    for name in ("book.txt", "valid_1.txt", "more-test.jsonl", "a.py", "test_a.py", "testing.md"):
        (tmp_path / name).write_text(json.dumps({"text": name}))
    parts = {part: "".join(loaded) for part, loaded in texts(corpus(tmp_path)).items()}
    assert list(parts) == ["train", "val", "test"]
    assert [name for name in ("valid_1.txt", "more-test.jsonl") if name in parts["train"]] == []
    assert all(name in parts["train"] for name in ("book.txt", "a.py", "test_a.py", "testing.md"))
    (tmp_path / "book.txt").rename(tmp_path / "train0.txt")
    assert texts(corpus(tmp_path))["train"] == ['{"text": "book.txt"}']


def test_separate_test_file_is_held_out(data: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.txt"
    other.write_text("other")
    parts = texts(corpus(data, test_data=str(other)))
    assert parts == {"train": [data.read_text()], "test": ["other"]}


@pytest.mark.parametrize("content", ["schöne Größe\n".encode("latin-1"), "Größe".encode("utf-16")])
@pytest.mark.parametrize("name", ["b.txt", "val/b.txt", "train/b"])
def test_text_in_other_encoding_is_refused_in_folder(
    name: str, content: bytes, tmp_path: Path
) -> None:
    for path in (tmp_path / "train/a.txt", tmp_path / name):
        path.parent.mkdir(exist_ok=True)
    (tmp_path / "train/a.txt").write_text("one")
    (tmp_path / name).write_bytes(content * 1000)
    if name == "b.txt":
        (tmp_path / "train/a.txt").rename(tmp_path / "a.txt")
    with pytest.raises(DataError, match=f"{name} is not in UTF-8") as caught:
        corpus(tmp_path)
    assert "iconv" in caught.value.remedy


def test_binary_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.gz").write_bytes(gzip.compress(b"two", 9, mtime=0x10101010))
    for name in ("c.png", "d.png", "e.png"):
        (tmp_path / name).write_bytes(b"\x89PNG\0")
    described = describe_corpus(corpus(tmp_path))
    assert described.endswith("4 files left out, not text: b.gz, c.png, d.png and 1 more")


@pytest.mark.parametrize("start", [b"%PDF-1.4\n%\xe2\xe3", b"BZh91AY&SY\xe2", b"\x28\xb5\x2f\xfd"])
def test_binary_files_without_nul_are_left_out(start: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b").write_bytes(start + b"\n1 0 obj" * 9)
    assert corpus(tmp_path).skipped == ["b"]


@pytest.mark.parametrize(
    ("names", "binary", "parts"),
    [
        (["input.txt", "readme.md"], ["train.bin", "val.bin"], ["train", "val"]),
        (["a.txt", "b.txt"], ["train-loss.png"], ["train", "val"]),
        (["train.txt"], ["test.png", "plots/test-loss.png"], ["train", "val"]),
        (["train.txt", "test/a.txt"], ["val.png", "test/b.png"], ["train", "test"]),
        (["a.py", "b.py"], ["test/c.bin"], ["train", "val"]),
    ],
)
def test_binary_files_define_no_splits(
    names: list[str], binary: list[str], parts: list[str], tmp_path: Path
) -> None:
    for name in (*names, *binary):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(b"\0" if name in binary else b"text of a part")
    loaded = corpus(tmp_path)
    assert [*loaded.splits] == parts
    assert sorted(loaded.skipped) == sorted(binary)


@pytest.mark.parametrize("part", ["train", "val"])
def test_part_without_text_is_refused(part: str, tmp_path: Path) -> None:
    for name in ("train", "val"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "a.txt").write_bytes(b"\0" if name == part else b"text")
    with pytest.raises(DataError, match=f"holds no text for {part}") as caught:
        corpus(tmp_path)
    assert caught.value.found == f"1 file left out, not text: {part}/a.txt"


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "holds no text"),
        (b"caf\xe9 au lait, more than four bytes", "convert it: iconv -f WINDOWS-1252 -t UTF-8"),
        ("text of Windows".encode("utf-16"), "convert it: iconv -f UTF-16 -t UTF-8"),
        (b"ab", "the train part of the data is too short"),
    ],
)
def test_rejects_unusable_data(
    content: bytes, problem: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "bad.txt"
    path.write_bytes(content)
    assert train(path, tmp_path / "run") == 1

    assert problem in capsys.readouterr().err


def test_invalid_row_error_names_line(tmp_path: Path) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"text": "a"}\n{\n')
    with pytest.raises(DataError, match=r"bad.jsonl line 2 is not valid JSON"):
        corpus(path)
    with pytest.raises(DataError, match="no such file or folder"):
        corpus(tmp_path / "missing")


def test_token_folder_is_private(tmp_path: Path, data: Path) -> None:
    tmp_path.chmod(0o755)
    write_tokens(corpus(data), 280, tmp_path)
    assert stat.S_IMODE(tmp_path.stat().st_mode) == 0o700


@pytest.mark.parametrize(
    "text", ["Añejo  wine,\r\n\t12345 l \n\n\U0001f377 'tis.", " leading", "\x00\u2028", "x" * 999]
)
def test_tokenizer_is_lossless(text: str) -> None:
    tokenizer = train_bpe([lines(50)], 280)
    ((tokens, num_bytes),) = encode(tokenizer, [text])
    assert tokens[0] == 0
    assert Tokenizer.from_str(tokenizer.to_json()).decode(list(tokens[1:])) == text
    assert num_bytes == len(text.encode())


def test_rows_are_contiguous_and_cover_held_out_tokens() -> None:
    tokens = np.arange(12, dtype=np.uint16)
    training = TokenRows(tokens, 4, 99, is_whole=False)
    held_out = TokenRows(tokens, 4, 99, is_whole=True)
    assert (len(training), training.num_targets) == (2, 8)
    assert (len(held_out), held_out.num_targets) == (3, 11)
    inputs, labels = training.batch(np.array([1, 0]), None)
    assert inputs.tolist() == [[4, 5, 6, 7], [0, 1, 2, 3]]
    assert labels.tolist() == [[5, 6, 7, 8], [1, 2, 3, 4]]
    inputs, labels = held_out.batch(np.array([2]), None)
    assert inputs.tolist() == [[8, 9, 10, 11]]
    assert labels.tolist() == [[9, 10, 11, -100]]


@pytest.mark.parametrize("depth", [1, 2, 3, 4, 5])
def test_decoder_matches_llama_of_transformers(depth: int) -> None:
    transformers = pytest.importorskip("transformers")
    shape = Shape(depth, 50, 24)
    network = Decoder(shape)
    for parameter in network.parameters():  # initially, layers add zero
        torch.nn.init.normal_(parameter, std=0.1)
    assert sum(p.numel() for p in network.parameters()) == shape.parameters
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**shape.config(0)))
    missing, unexpected = llama.load_state_dict(network.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    tokens = torch.arange(48).view(2, 24)
    with torch.no_grad():
        expected = llama.eval()(tokens).logits
        torch.testing.assert_close(network(tokens), expected, rtol=1e-4, atol=1e-4)
    assert shape.heads % shape.groups == 0


def test_muon_matches_torch_and_restores_state() -> None:
    torch.manual_seed(0)
    values = torch.randn(3, 24, 12)
    matrix, other, torch_matrix = (torch.nn.Parameter(value.clone()) for value in values)
    torch_matrix.data.copy_(matrix)
    auxiliary = torch.optim.AdamW([other], 0.01, weight_decay=0.1)
    optimizer = MuonWithAuxiliary([matrix], auxiliary)
    reference = torch.optim.Muon(
        [torch_matrix], 0.01, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"
    )
    for _ in range(3):
        gradient = torch.randn(24, 12)
        matrix.grad, torch_matrix.grad, other.grad = gradient, gradient.clone(), gradient.clone()
        optimizer.step()
        reference.step()
    changed = (matrix - values[0]).norm()
    assert (matrix - torch_matrix).norm() < 0.02 * changed
    singular = torch.linalg.svdvals(orthogonalize(values[2], (3.4445, -4.775, 2.0315)))
    assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3

    copies = [torch.nn.Parameter(p.detach().clone()) for p in (matrix, other)]
    restored = MuonWithAuxiliary([copies[0]], torch.optim.AdamW([copies[1]], 0.5))
    restored.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for copied, original in zip(copies, (matrix, other), strict=True):
        copied.grad = original.grad = torch.ones(24, 12)
    optimizer.step()
    restored.step()
    for copied, original in zip(copies, (matrix, other), strict=True):
        assert torch.equal(copied, original)


def rows(num_rows: int, length: int = 512) -> TokenRows:
    tokens = np.zeros(num_rows * length + 1, dtype=np.uint16)
    return TokenRows(tokens, length, 4 * num_rows * length, is_whole=False)


def test_describes_small_network_in_the_singular() -> None:
    options, shape = LanguageOptions(data="a", epochs=1), Shape(1, 1024, 512)
    described = describe_training(options, shape, rows(2_000))
    assert described.startswith("1 layer of width 64 with 1 head, 1 of keys and values, 1,024 tok")


def test_derives_hyperparameters_from_depth_and_data() -> None:
    shape = Shape(4, 4096, 512)
    small = derive(LanguageOptions(data="a"), shape, rows(2_000), rows(100))
    large = derive(LanguageOptions(data="a"), shape, rows(1_000_000), rows(1_000))
    assert (small.epochs, large.epochs) == (4, 1)
    assert small.global_batch < large.global_batch
    assert math.log2(large.global_batch).is_integer()
    assert small.lr > large.lr > 1e-3
    assert small.micro_batch == "16"
    steps = 4 * 2_000 // small.global_batch
    assert steps / small.evaluate_every == pytest.approx(0.15 * 4 * 20, abs=1)
    explicit = LanguageOptions(data="a", epochs=2, global_batch=8, lr=0.5, evaluate_every=7)
    unchanged = derive(explicit, shape, rows(2_000), rows(100))
    assert (unchanged.epochs, unchanged.global_batch, unchanged.lr, unchanged.evaluate_every) == (
        2,
        8,
        0.5,
        7,
    )


def test_stable_schedule_warms_up_and_cools_down() -> None:
    curve = Curve("stable", 100, 0.1, cool_down=0.4)
    assert [curve(step) for step in (4, 10, 59, 60, 80, 99, 100)] == [
        0.5, 1, 1, 1, 0.5, pytest.approx(0.025), 0,
    ]  # fmt: skip


def test_reported_metrics_match_reference(data: Path, tmp_path: Path) -> None:
    assert train(data, tmp_path) == 0
    assert len(records(tmp_path, "train")) == 6
    (final,) = records(tmp_path, "val")
    assert final["loss"] < records(tmp_path, "train")[0]["loss"]

    # evaluate the saved model on the whole text, row by row
    saved_config = config(tmp_path)
    network = Decoder(Shape(1, saved_config["vocab_size"], 16)).double()
    network.load_state_dict(load_file(tmp_path / "model/model.safetensors"))
    tokenizer = Tokenizer.from_file(str(tmp_path / "model/tokenizer.json"))
    held_out = texts(corpus(data))["val"]
    stream = [token for text in held_out for token in (0, *tokenizer.encode(text).ids)]
    nats = 0.0
    for start in range(0, len(stream) - 1, 16):
        part = torch.tensor(stream[start : start + 17])
        with torch.no_grad():
            scores = network(part[None, :-1])[0]
        nats += float(cross_entropy(scores, part[1:], reduction="sum"))
    num_bytes = sum(len(text.encode()) for text in held_out)
    assert final["loss"] == pytest.approx(nats / (len(stream) - 1), abs=1e-12)
    assert final["bits_per_byte"] == pytest.approx(nats / math.log(2) / num_bytes, abs=1e-12)
    assert saved_config["metrics"]["val"]["bits_per_byte"] == final["bits_per_byte"]
    assert saved_config["data"]["sizes"]["val"] == num_bytes


def test_tokens_are_cached(data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert train(data, tmp_path / "a", "--steps=1") == 0

    def fail_if_called(*_: object) -> None:
        raise AssertionError("the tokens are there")

    monkeypatch.setattr("paceline.recipes.language.token_files.train_bpe", fail_if_called)
    assert train(data, tmp_path / "b", "--steps=1", "--no-muon") == 0
    folder = token_folder(corpus(data), 300)
    assert not [path for path in folder.parent.iterdir() if path.name.startswith(".")]
    summary = (folder / "summary.json").read_text()
    (folder / "summary.json").write_text("{}")
    assert train(data, tmp_path / "c", "--steps=1") == 1
    (folder / "summary.json").write_text(summary)


def test_rejects_conflicting_options() -> None:
    for flags, problem in (
        ({"shard": True}, "--shard cannot be combined with --muon"),
        ({"model": "big"}, "--model has no effect"),
        ({"mirror": "http://a"}, "--mirror has no effect"),
        ({"vocab_size": 100}, "--vocab-size 100 must be at least 257"),
    ):
        with pytest.raises(SettingError, match=problem):
            LanguageOptions(data="a", **flags).validate()  # type: ignore[arg-type]


@pytest.fixture
def run(data: Path, tmp_path: Path) -> Path:
    assert train(data, tmp_path / "run", "--dtype=float32") == 0
    return tmp_path / "run"


def test_model_folder_loads_in_transformers(run: Path) -> None:
    transformers = pytest.importorskip("transformers")
    folder = str(run / "model")
    llama = transformers.AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    text = " 12 and\n 13"
    ids = tokenizer(text)["input_ids"]
    assert tokenizer.decode(ids) == text
    network = Decoder(Shape(1, llama.config.vocab_size, 16))
    network.load_state_dict(load_file(run / "model/model.safetensors"))
    with torch.no_grad():
        expected = network(torch.tensor([ids]))
        torch.testing.assert_close(llama(torch.tensor([ids])).logits, expected)
    assert json.loads((run / "model/config.json").read_text())["task"] == "language"


def test_evaluation_reproduces_training_metrics(
    run: Path, tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "figures.json"
    assert evaluate.main([f"--run={run}", f"--figures={result}", "--device=cpu"]) == 0
    figures = json.loads(result.read_text())
    assert figures["bits_per_byte"] == records(run, "val")[-1]["bits_per_byte"]
    assert (figures["split"], figures["samples"]) == ("val", len(rows_of(run, data)))

    other = tmp_path / "other.txt"
    other.write_text(lines(30))
    assert evaluate.main([f"--run={run}", f"--figures={result}", f"--data={other}"]) == 0
    assert json.loads(result.read_text())["split"] == "test"
    assert f"{len(other.read_bytes()):,} held-out bytes" in capsys.readouterr().out


def rows_of(run: Path, data: Path) -> TokenRows:
    tokenizer = read_tokenizer(run / "model/tokenizer.json")
    return encoded_rows(tokenizer, corpus(data).texts("val"), 16)


def test_generation_is_deterministic_for_seed(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    flags = [f"--run={run}", "--max-tokens=6", "--device=cpu"]
    outputs = []
    for extra_flags in (["--seed=1"], ["--seed=1"], ["--seed=2"], ["--temperature=0"]):
        assert generate.main([*flags, "12 and", *extra_flags]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]
    assert all("12 and" not in output for output in outputs)
    for dash in ((), ("-",)):
        monkeypatch.setattr("sys.stdin", io.StringIO("12 and"))
        assert generate.main([*flags, *dash, "--temperature=0"]) == 0
        assert capsys.readouterr().out == outputs[3]
    assert _greedy(run, "12 and", 6) == outputs[3].rstrip("\n")

    assert generate.main([*flags, "1" * 99]) == 1
    assert "which leave no room for more" in capsys.readouterr().err
    assert generate.main([*flags, "--chat", "Hello"]) == 2
    assert "has no chat template" in capsys.readouterr().err
    assert predict.main([f"--run={run}", "text"]) == 2
    assert f"paceline generate {run}" in capsys.readouterr().err


def _greedy(run: Path, text: str, count: int) -> str:
    """Returns the network's greedy continuation of a text, computed without a cache."""
    saved_config = config(run)
    network = Decoder(Shape(1, saved_config["vocab_size"], 16))
    network.load_state_dict(load_file(run / "model/model.safetensors"))
    tokenizer = Tokenizer.from_file(str(run / "model/tokenizer.json"))
    tokens = [0, *tokenizer.encode(text).ids]
    start = len(tokens)
    with torch.no_grad():
        for _ in range(count):
            tokens.append(int(network(torch.tensor([tokens]))[0, -1].argmax()))
    return tokenizer.decode(tokens[start:])


def test_exports_transformers_folder(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers = pytest.importorskip("transformers")
    assert export.main([f"--run={run}"]) == 0
    folder = str(run / "export/transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    weights = load_file(run / "model/model.safetensors")
    assert torch.equal(model.model.embed_tokens.weight, weights["model.embed_tokens.weight"])
    assert transformers.AutoTokenizer.from_pretrained(folder)("a b")["input_ids"]
    assert export.main([f"--run={run}", "--format=adapter"]) == 2
    assert "has no adapters" in capsys.readouterr().err
    assert export.main([f"--run={run}", "--format=onnx"]) == 2
    assert "--format transformers" in capsys.readouterr().err


def test_rejects_training_beyond_device_memory(
    tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "device_memory", lambda device, local_size: (6e8, 6e8))

    assert train(data, tmp_path / "run") == 2

    error = capsys.readouterr().err
    assert "the training does not fit into the memory of" in error
    assert "a smaller model, or a host with more memory" in error


@pytest.mark.parametrize(
    ("local_rank", "host", "num_read"),
    [(0, "n1", 1), (1, "n1", 0), (1, "n2", 1)],
    ids=["first", "second", "without its host's first"],
)
def test_single_process_per_host_reads_corpus(
    local_rank: int, host: str, num_read: int, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    complete, read = corpus(data), []
    lazy = Corpus(LanguageOptions(data=str(data)), reads=False)
    assert not lazy.fingerprint
    monkeypatch.setattr(lazy, "read", lambda: (read.append(1), Corpus.read(lazy)))
    first = json.dumps(["n1", complete.fingerprint, complete.num_characters])
    session: Any = SimpleNamespace(
        world=SimpleNamespace(local_rank=local_rank, host=host),
        comms=SimpleNamespace(texts=lambda report: [first, report]),
        together=lambda act: act(),
        phase=lambda name: None,
    )

    read_once_per_host(session, lazy)

    assert len(read) == num_read
    assert (lazy.fingerprint, lazy.num_characters) == (
        complete.fingerprint,
        complete.num_characters,
    )
    assert texts(lazy) == texts(complete)
