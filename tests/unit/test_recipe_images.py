"""Tests the image recipe with other networks, fine-tuning, data sources, presets and errors."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hub_folders import convnext, images, vit
from PIL import Image
from recipe_tools import config, hub_variables, one_thread  # noqa: F401 - fixtures
from safetensors.torch import load_file
from torch.testing._internal.distributed.fake_pg import FakeStore

from command_lines import overridden
from paceline.recipes import image, parse_options, pretrained, pretrained_list
from paceline.recipes.catalogue import catalogue
from paceline.recipes.common import cpu_flags
from paceline.recipes.data import hub
from paceline.recipes.data.hub import fetch
from paceline.recipes.data.images import load
from paceline.recipes.networks import MODELS, backbone
from paceline.recipes.options import IMAGE_PRESETS, ImageOptions
from paceline.recipes.preprocessing import augmented, input_format
from paceline.recipes.pretrained import Origin, freeze, release
from paceline.recipes.pretrained_list import RESNET_FILES, torch_file
from paceline.recipes.use import evaluate, predict
from paceline.rundir.records import read_object
from paceline.spec.errors import DataError, SettingError
from paceline.train import Draws
from paceline.train.parallel import Replica


def train(folder: Path, *flags: str) -> int:
    return image.main([f"--run-dir={folder}", "--device=cpu", "--checkpoint-every=never", *flags])


def class_folders(folder: Path, count: int = 12) -> Path:
    """Creates two folders of dark and light images that are wider than high."""
    draw = np.random.default_rng(0)
    for name, shade in (("dark", 0), ("light", 130)):
        (folder / name).mkdir(parents=True)
        for number in range(count):
            pixels = (draw.integers(0, 120, (20, 30, 3)) + shade).astype(np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    return folder


# -- networks ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "millions"), [("resnet18", 11.69), ("resnet34", 21.80), ("resnet50", 25.56)]
)
def test_resnets_match_published_size_and_names(name: str, millions: float) -> None:
    network = MODELS[name]((3, 224, 224), 1000)
    assert sum(item.numel() for item in network.parameters()) / 1e6 == pytest.approx(
        millions, abs=0.01
    )
    names = set(network.state_dict())
    assert {"conv1.weight", "layer1.0.bn1.running_mean", "layer4.1.conv2.weight"} <= names
    assert {"layer2.0.downsample.0.weight", "fc.bias"} <= names


@pytest.mark.parametrize("size", [8, 28, 33, 65])
def test_resnets_accept_any_image_size(size: int) -> None:
    network = MODELS["resnet18"]((1, size, size), 4).eval()
    assert network(torch.zeros(1, 1, size, size)).shape == (1, 4)


def test_cpu_flags(tmp_path: Path) -> None:
    (tmp_path / "cpuinfo").write_text("processor: 0\nflags\t\t: fpu avx512_bf16\n")
    assert "avx512_bf16" in cpu_flags(tmp_path / "cpuinfo")
    assert cpu_flags(tmp_path / "none") == frozenset()


# -- fine-tuning ---------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("image") / "run"
    assert train(folder, "--epochs=4") == 0
    return folder


def test_frozen_weights_train_in_fewer_steps(trained_run: Path, tmp_path: Path) -> None:
    short_flags = ["--steps=15", "--seed=9"]
    assert train(tmp_path / "tuned", f"--weights={trained_run}", "--freeze", *short_flags) == 0
    assert train(tmp_path / "scratch", *short_flags) == 0
    runs = [config(tmp_path / name)["metrics"]["test"]["accuracy"] for name in ("tuned", "scratch")]
    assert runs[0] > config(trained_run)["metrics"]["test"]["accuracy"] - 0.02 > runs[1]
    old, new = (
        load_file(run / "model/model.safetensors") for run in (trained_run, tmp_path / "tuned")
    )
    moved = {name for name in old if not torch.equal(old[name], new[name])}
    last = max({name.split(".")[0] for name in old}, key=int)
    assert moved == {f"{last}.weight", f"{last}.bias"}


def test_different_classes_replace_head_and_freeze_backbone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """From colour photos of two classes to grey digits; batch normalisation is frozen, too."""
    first, tuned, unfrozen = (tmp_path / name for name in ("first", "tuned", "whole"))
    flags = ["--model=resnet18", "--steps=2", "--global-batch=8"]
    photos = f"--data={class_folders(tmp_path / 'photos')}"
    assert train(first, photos, "--image-size=8", *flags) == 0
    assert train(tuned, f"--weights={first}", "--add-layers", "24", "16", *flags) == 0
    assert "a new head; the backbone is frozen" in capsys.readouterr().out
    assert train(unfrozen, f"--weights={first}", "--no-freeze", *flags) == 0
    assert "a new head; all of it is trained" in capsys.readouterr().out
    old, new, moved = (
        load_file(item / "model/model.safetensors") for item in (first, tuned, unfrozen)
    )
    backbone = {name for name in old if not name.startswith("fc.")}
    assert {"bn1.running_mean", "layer4.1.bn2.num_batches_tracked"} <= backbone
    assert all(torch.equal(old[name], new[name]) for name in backbone)
    head = {name: tuple(new[name].shape) for name in sorted(set(new) - backbone) if "w" in name}
    assert head == {"fc.0.weight": (24, 512), "fc.2.weight": (16, 24), "fc.4.weight": (10, 16)}
    assert moved["fc.weight"].shape == (10, 512)
    assert not any(torch.equal(old[n], moved[n]) for n in ("conv1.weight", "bn1.running_mean"))
    before, after = config(first), config(tuned)
    assert (after["shape"], after["decoded"]) == ([3, 8, 8], [1, 8, 8])
    assert after["normalisation"] == before["normalisation"]
    assert evaluate.main([f"--run={tuned}"]) == 0
    assert f"accuracy {after['metrics']['test']['accuracy']:.4f}" in capsys.readouterr().out
    other = ["--model=resnet34", "--freeze", f"--weights={first}", "--steps=1"]
    assert train(tmp_path / "no", *other) == 2
    assert "would keep" in capsys.readouterr().err


def test_default_freezing() -> None:
    for origin, wanted in (
        (Origin(), False),  # from scratch
        (Origin("run"), True),
        (Origin("run", head_is_reset=False), False),  # the same classes: no transfer
        (Origin("run", missing=("conv1.weight",)), False),
    ):
        assert origin.is_frozen(None) is wanted
        assert origin.is_frozen(False) is False
    with pytest.raises(SettingError, match="1 tensors with random weights"):
        Origin("run", missing=("conv1.weight",)).is_frozen(True)


def test_frozen_layers_are_not_communicated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither gradients nor batch statistics are exchanged until a stage is unfrozen."""
    sent: list[int] = []
    shared: list[tuple[int, ...]] = []

    def reduce(_, bucket):  # type: ignore[no-untyped-def]  # DDP reads the annotations
        shared.extend(tuple(item.shape) for item in bucket.parameters())
        future: Any = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    network = MODELS["resnet18"]((1, 8, 8), 3)
    freeze(backbone(network))
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    try:
        model = Replica(network)
        monkeypatch.setattr(dist, "_broadcast_coalesced", lambda _, all, *__: sent.append(len(all)))
        model.register_comm_hook(None, reduce)
        model(torch.zeros(2, 1, 8, 8)).sum().backward()
        assert (sent, shared) == ([], [(3, 512), (3,)])
        release(network.layer4)
        network.layer4.train()
        model(torch.zeros(2, 1, 8, 8))
        assert sent == []  # a training pass only updates them
        network.layer4.eval()
        model(torch.zeros(2, 1, 8, 8))
        assert sent == [15]  # three buffers for each of the five batch normalisations
    finally:
        dist.destroy_process_group()


def test_rejects_incompatible_weights(trained_run: Path, tmp_path: Path) -> None:
    assert train(tmp_path / "x", f"--weights={trained_run}", "--model=resnet18", "--steps=1") == 1
    (tmp_path / "w.safetensors").write_bytes(b"no weights")
    assert train(tmp_path / "x", f"--weights={tmp_path}/w.safetensors", "--steps=1") == 1


def test_torchvision_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Covers a file in torch's cache in torchvision's format, and its download if it is missing."""
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    with pytest.raises(DataError, match="--offline forbids"):
        pretrained.ensure_torch_file(RESNET_FILES["resnet18"], offline=True)
    urls: list[str] = []

    def fetch(url: str, path: str, *_: object, **__: object) -> None:
        urls.append(url)
        torch.save(MODELS["resnet18"]((3, 224, 224), 1000).state_dict(), path)

    monkeypatch.setattr(torch.hub, "download_url_to_file", fetch)
    photos = f"--data={class_folders(tmp_path / 'photos')}"
    flags = ["--model=resnet18", "--weights=imagenet", "--steps=1", "--global-batch=4"]
    assert train(tmp_path / "run", photos, *flags) == 0
    assert urls == ["https://download.pytorch.org/models/resnet18-f37072fd.pth"]
    result = config(tmp_path / "run")
    assert result["shape"] == [3, 224, 224]
    assert result["normalisation"]["mean"] == [0.485, 0.456, 0.406]
    old = torch.load(torch_file(RESNET_FILES["resnet18"]), weights_only=True)
    new = load_file(tmp_path / "run/model/model.safetensors")
    assert {n for n in old if not torch.equal(old[n], new[n])} == {"fc.weight", "fc.bias"}
    with pytest.raises(SettingError, match="there are none for --model cnn"):
        parse_options("image", ["--weights=imagenet"])


def test_pretrained_models_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list has local models, models to download, and models trained here."""
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    monkeypatch.delenv("HF_HUB_CACHE", raising=False)
    for name, kind in (("microsoft--resnet-50", "ResNet"), ("me--mine", "ViT"), ("x--y", "")):
        folder = tmp_path / f"hub/models--{name}/snapshots/1"
        folder.mkdir(parents=True)
        named = {"architectures": [f"{kind}ForImageClassification" if kind else "GPT2LMHeadModel"]}
        (folder / "config.json").write_text(json.dumps(named))
        (folder / "model.safetensors").write_bytes(b"")
    run = tmp_path / "runs/image-1"
    (run / "model").mkdir(parents=True)
    (run / "model/config.json").write_text(
        json.dumps({"task": "image", "model": "cnn", "shape": [1, 28, 28]})
    )
    result = {
        item.flags: item for item in pretrained_list.list_pretrained(read_object, tmp_path / "runs")
    }
    assert result["--model microsoft/resnet-50"].state == "on this disk"
    assert result["--model microsoft/resnet-18"].state == "47 MB to be downloaded"
    assert result["--model resnet50 --weights imagenet"].state == "102 MB to be downloaded"
    assert result["--model me/mine"].recipe == "image"
    assert "--model x/y" not in result
    assert result[f"--model cnn --weights {run}"].image_size == 28
    for item in pretrained_list.POPULAR:
        parse_options(item.recipe, item.flags.split())
        assert item.line().startswith(f"{item.parameters:g} million parameters")


# -- Hugging Face --------------------------------------------------------------------------


@pytest.mark.parametrize("make", [vit, convnext])
def test_pretrained_network_from_folder(make, tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    folder = make(tmp_path / "model")
    flags = [f"--model={folder}", "--steps=3", "--global-batch=16", "--add-layers=8"]
    wanted = pretrained.HubModel("image", str(folder))
    before = pretrained.load_model(wanted, ("LABEL_0", "LABEL_1"))[0].state_dict()
    assert train(tmp_path / "run", *flags, f"--data={images(tmp_path / 'data')}") == 0
    assert "a new head; the backbone is frozen" in capsys.readouterr().out
    after = load_file(tmp_path / "run/model/model.safetensors")
    same = {n for n in before if torch.equal(before[n], after.get(f"model.{n}", torch.zeros(0)))}
    assert set(before) - same == {"classifier.weight", "classifier.bias"}
    assert after["model.classifier.2.weight"].shape == (2, 8)
    result = config(tmp_path / "run")
    assert result["classes"] == ["dark", "light"]
    assert result["shape"] == [3, 16, 16] if make is vit else [3, 64, 64]
    (tmp_path / "model/config.json").unlink()  # the run does not need it
    capsys.readouterr()
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert f"accuracy {result['metrics']['test']['accuracy']:.4f}" in capsys.readouterr().out


def test_grayscale_images_in_color_network(tmp_path: Path) -> None:
    assert train(tmp_path / "run", f"--model={vit(tmp_path / 'm')}", "--steps=2") == 0
    result = config(tmp_path / "run")
    assert (result["decoded"], result["shape"]) == ([1, 8, 8], [1, 16, 16])
    input_spec = input_format(ImageOptions(model=str(tmp_path / "m")))
    grey = input_spec.normalise(1)
    assert grey is not None
    assert grey.mean == (0.5,)


def test_image_size_enlarges_images(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    flags = ["--image-size=12", "--steps=2", "--augment", "flip"]
    assert train(tmp_path / "run", *flags) == 0
    result = config(tmp_path / "run")
    assert result["shape"] == [1, 12, 12]
    capsys.readouterr()
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    assert f"accuracy {result['metrics']['test']['accuracy']:.4f}" in capsys.readouterr().out


def test_timm_preprocessing() -> None:
    carried = {"input_size": [3, 160, 160], "mean": [0.5, 0.4, 0.3], "std": [0.2, 0.2, 0.2]}
    result = pretrained.timm_preprocessing({"architecture": "resnet18", "pretrained_cfg": carried})
    assert result == {
        "size": 160,
        "image_mean": [0.5, 0.4, 0.3],
        "image_std": [0.2, 0.2, 0.2],
    }
    assert pretrained.timm_preprocessing({"model_type": "vit"}) == {}


def test_offline_error_for_missing_model(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    assert train(tmp_path / "run", "--model=nobody/nothing", "--offline") == 1
    assert "nobody/nothing could not be loaded" in capsys.readouterr().err


def test_unreachable_hub_is_not_queried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error says what failed, what is in the cache and what to type, not --offline."""
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.setenv(name, "")
    for name in ("HF_HUB_DISABLE_TELEMETRY", "TOKENIZERS_PARALLELISM"):
        monkeypatch.setenv(name, "1")
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "hub/models--somebody--other").mkdir(parents=True)
    hub.connection_error.cache_clear()
    try:
        hub.prepare_environment(offline=False, local=True)
        assert os.environ["HF_HUB_OFFLINE"] == ""
        hub.prepare_environment(offline=False)
        assert os.environ["HF_HUB_OFFLINE"] == "1"

        def get() -> None:
            raise OSError("offline")

        delays: list[float] = []
        with pytest.raises(DataError) as caught:
            fetch("--model a/b", get, delays.append)
        message = caught.value.render()
        assert (
            "--model a/b is no local path and not in the cache, and the hub cannot be reached"
            in message
        )
        assert "tried 127.0.0.1: Connection refused; the cache" in message
        assert "holds somebody/other" in message
        assert "HTTPS_PROXY=" in message
        assert "--offline" not in message
        assert not delays
        monkeypatch.setenv("http_proxy", "http://127.0.0.1:2")
        hub.connection_error.cache_clear()
        assert hub.connection_error().startswith("127.0.0.1: ")
    finally:
        hub.connection_error.cache_clear()


def test_unwritable_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "file"))
    with pytest.raises(DataError, match="cannot be written"):
        hub.fetch("x", lambda: None)


def test_rejects_torchvision_models_without_torchvision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "torchvision", None)
    assert train(tmp_path, "--model=torchvision/vit_b_16") == 2
    assert "pip install torchvision" in capsys.readouterr().err


# -- data ----------------------------------------------------------------------------------


def test_damaged_images_are_named_or_skipped(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    folder = class_folders(tmp_path / "d")
    broken = folder / "dark/0.png"
    broken.write_bytes(broken.read_bytes()[:200])
    flags = [f"--data={folder}", "--steps=2", "--image-size=16"]
    assert train(tmp_path / "a", *flags) == 1
    assert str(broken) in capsys.readouterr().err
    assert train(tmp_path / "b", *flags, "--skip-damaged") == 0
    printed = capsys.readouterr().out
    assert f"1 damaged image in {folder} left out" in printed
    assert "23 images of 2 classes: light 12, dark 11\n" in printed
    assert sum(config(tmp_path / "b")["data"]["sizes"].values()) == 23


def test_other_files_are_counted_and_named(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    folder = class_folders(tmp_path / "d")
    (folder / "dark/0.png").rename(folder / "dark/0")
    (folder / "dark/1.png").rename(folder / "dark/1.JFIF")
    (folder / "light/0.png").rename(folder / "loose.png")
    for name in ("light/a.heic", "light/README"):
        (folder / name).write_bytes(b"....ftypheic")
    flags = [f"--data={folder}", "--steps=2", "--image-size=16", f"--run-dir={tmp_path / 'run'}"]
    assert image.main(flags) == 0
    printed = capsys.readouterr().out
    assert "23 images of 2 classes: dark 12, light 11\n" in printed
    others = f"3 other files, such as {folder / 'light/README'}, left out: not named like an image"
    assert others in printed
    assert predict.main([f"--run={tmp_path / 'run'}", str(folder)]) == 0
    result = capsys.readouterr()
    assert len(result.out.splitlines()) == 24
    assert f"2 other files, such as {folder / 'light/README'}, left out" in result.err


def test_accuracy_of_constant_answer_gets_a_hint() -> None:
    options = ImageOptions(data="digits")
    data = load(options)
    largest = int(np.bincount(data.splits["test"].labels).max())
    hint = image.describe_chance(options, data, largest, 45)
    assert f"no better than always answering 1 ({largest} of 450)" in hint
    assert "45 steps may be too few; try --epochs 60 or --global-batch 16" in hint
    assert not image.describe_chance(options, data, largest + 1, 45)
    dummy = ImageOptions(data="dummy", image_size=8)
    assert not image.describe_chance(dummy, load(dummy), 0, 45)


def test_random_resized_crops(tmp_path: Path, capsys) -> None:  # type: ignore[no-untyped-def]
    folder = class_folders(tmp_path / "d")
    flags = [f"--data={folder}", "--steps=3", "--image-size=28", "--workers=1"]
    assert train(tmp_path / "kept", *flags) == 2
    assert "--workers 1: processes have nothing to do" in capsys.readouterr().err
    flags += ["--augment", "resized-crop"]
    assert train(tmp_path / "run", *flags) == 0
    result = config(tmp_path / "run")
    assert (result["shape"], result["decoded"], result["crop"]) == ([3, 28, 28], [3, 32, 32], True)
    assert evaluate.main([f"--run={tmp_path / 'run'}"]) == 0
    capsys.readouterr()
    assert predict.main([f"--run={tmp_path / 'run'}", "--json", str(folder / "dark")]) == 0
    assert len([json.loads(line) for line in capsys.readouterr().out.splitlines()]) == 12


def test_vflip_flips_half_of_images() -> None:
    ramp = torch.arange(8, dtype=torch.float64)[:, None].expand(40, 1, 8, 8)
    transformed = augmented(ramp, ["vflip"], Draws(0, 0, np.arange(40)))
    turned = [torch.allclose(item, ramp[0].flip(1)) for item in transformed]
    assert 10 < sum(turned) < 30
    assert all(
        torch.allclose(item, ramp[0])
        for item, up in zip(transformed, turned, strict=True)
        if not up
    )


def test_resized_crop_shows_part_of_image() -> None:
    ramp = torch.arange(32, dtype=torch.float64).expand(50, 1, 32, 32)
    transformed = augmented(ramp, ["resized-crop"], Draws(0, 0, np.arange(50)), 28)
    assert transformed.shape == (50, 1, 28, 28)
    steps = transformed.diff(dim=3)[:, 0, 5, 5:-5]  # only inner pixels, without padding
    assert bool((steps > 0).all())
    assert float(steps.min()) < 0.5 < float(steps.max()) <= 32 / 28 + 1e-9
    same = augmented(ramp[7:8], ["resized-crop"], Draws(0, 0, np.array([7])), 28)
    assert torch.equal(same[0], transformed[7])


def test_dummy_data(tmp_path: Path) -> None:
    flags = ["--data=dummy", "--image-size=8", "--steps=1", "--global-batch=8"]
    assert train(tmp_path, *flags) == 0
    assert config(tmp_path)["data"]["sizes"] == {"train": 12_800, "test": 1_280}
    assert "top5" in config(tmp_path)["metrics"]["test"]


# -- settings ------------------------------------------------------------------------------


DUMMY = "--data=dummy"


def test_flags_override_preset() -> None:
    options = parse_options("image", ["--epochs=2", "--preset=imagenet", "--lr", "0.5", DUMMY])
    assert isinstance(options, ImageOptions)
    assert (options.epochs, options.lr, options.model) == (2, 0.5, "resnet50")
    assert options.augment == ("resized-crop", "flip")
    explicit_options = parse_options(
        "image", overridden(IMAGE_PRESETS["imagenet"], ["--epochs=2", "--lr=0.5", DUMMY])
    )
    assert options == explicit_options


@pytest.mark.parametrize(
    ("flags", "expected_error"),
    [
        (["--model=resnet51"], "did you mean --model resnet5"),
        (["--preset=imagnet"], "did you mean --preset imagenet"),
        (["--augment", "resize-crop"], "did you mean --augment resized-crop"),
        (["--freeze"], "would keep random weights"),
    ],
)
def test_rejects_invalid_settings(flags: list[str], expected_error: str) -> None:
    with pytest.raises(SettingError, match=expected_error):
        parse_options("image", flags)


def test_catalogue_lists_named_items() -> None:
    result = {(item.kind, item.recipe, item.name) for item in catalogue()}
    assert ("models", "image", "resnet50") in result
    assert ("data", "translation", "numbers") in result
    assert len(result) == len(catalogue())
    assert all(item.summary for item in catalogue())
