"""Pretrained models: loading from Hugging Face, runs and files; freezing of the backbone."""

from __future__ import annotations

import copy
import io
import json
import sys
import tarfile
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.program import library
from paceline.recipes.data import local_path
from paceline.recipes.data.hub import fetch, prepare_environment
from paceline.recipes.data.pickle_limits import check_pickle
from paceline.recipes.heads import backbone_names, reset_head
from paceline.recipes.optimization import Curve
from paceline.recipes.pretrained_list import (
    IMAGENET,
    IMAGENET_PREPROCESSING,
    TORCHVISION,
    torch_file,
)
from paceline.spec.errors import DataError, SettingError
from paceline.train import files
from paceline.train.data.disk_lock import exclusive_lock
from paceline.train.weights import MAX_TENSORS, check_size, saved_state

Kind = Literal["text", "image"]
_DESCRIPTIONS = (".json", ".txt", ".model", ".jinja")  # configurations and tokenizers
_CLASSES = {
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}

_NO_CODE = {"trust_remote_code": False}
"""For every loader of transformers, which otherwise asks on standard input whether to run the code
that a model brings."""

_ZIP_MAGIC = b"PK\x03\x04"
_NUM_LEGACY_PICKLES = 5  # magic number, version, system, content, names of storages


@dataclass(frozen=True, slots=True)
class Origin:
    """Origin of a training's initial weights.

    Attributes:
        source: Name or path as typed; empty for random weights.
        missing: Keys of the backbone's tensors that the source lacks.
        head_is_reset: Whether the head has random weights, because the classes differ.
    """

    source: str = ""
    missing: tuple[str, ...] = ()
    head_is_reset: bool = True

    def is_frozen(self, freeze: bool | None) -> bool:
        """Tells whether to freeze the backbone; by default if only the head is new.

        Raises:
            SettingError: A backbone with random weights would be frozen.
        """
        if freeze and self.missing:
            raise SettingError(
                f"--freeze would keep {len(self.missing)} tensors with random weights",
                found=f"{self.source} has no {self._list_missing()}",
                remedy="--no-freeze, or the --model and --image-size that it was made with",
            )
        if freeze is not None:
            return freeze
        return bool(self.source) and self.head_is_reset and not self.missing

    def describe(self, frozen: bool) -> str:
        """Returns a one-line description."""
        head = "a new head" if self.head_is_reset else "their own head"
        missing = f", random where they have none ({self._list_missing()})" if self.missing else ""
        frozen_note = "the backbone is frozen (--no-freeze trains it, too)"
        trained = frozen_note if frozen else "all of it is trained (--freeze trains the head only)"
        return f"weights of {self.source} with {head}{missing}; {trained}"

    def _list_missing(self) -> str:
        suffix = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
        return ", ".join(self.missing[:3]) + suffix


@dataclass(frozen=True, slots=True)
class HubModel:
    """A classifier of Hugging Face.

    Attributes:
        name: Id (``user/name``) or folder.
    """

    kind: Kind
    name: str
    offline: bool = False
    from_scratch: bool = False

    @property
    def path(self) -> Path:
        """The folder on this host, if the name is that of one."""
        return local_path(Path(self.name).expanduser())

    @property
    def source(self) -> str:
        """Argument of the library's loaders."""
        return str(self.path) if self.folder else self.name

    @property
    def folder(self) -> bool:
        return self.path.is_dir()

    @property
    def local(self) -> bool:
        return self.offline or self.folder

    def check(self) -> None:
        """Raises DataError for a path without a folder, which cannot be an id of the hub.

        Also for a folder with a pipe, a device or an endless description: the library reads all.
        """
        path = self.path
        an_id = self.name.count("/") <= 1 and not self.name.startswith(("/", "./", "../", "~"))
        if not path.is_dir() and (path.exists() or not an_id):
            raise DataError(
                f"--model {self.name} could not be loaded",
                found=f"there is no folder {path.absolute()}"
                + (", but a file" if path.exists() else ""),
                remedy="give the folder of a saved model, or the id of one on the hub: USER/NAME",
            )
        check_folder(path, self.name)


def check_folder(path: Path, name: str) -> None:
    """Raises DataError for a folder with a pipe, a device or an endless description.

    Args:
        path: A folder, or anything else, which is not checked.
        name: The model, as typed.
    """
    try:
        for file in (*path.glob("*"), *path.glob("*/*")) if path.is_dir() else ():
            if file.exists() and not file.is_dir():
                is_limited = file.suffix in _DESCRIPTIONS
                limit = files.MAX_DESCRIPTION_BYTES if is_limited else sys.maxsize
                files.check_regular(file, limit)
    except OSError as error:
        raise DataError(f"--model {name} could not be loaded", found=str(error)) from None


def check_adapters(config_file: str | None, name: str) -> None:
    """Raises DataError for adapters: their configuration names a model and modules to load.

    Args:
        config_file: What transformers takes for their configuration, if it finds one.
        name: The model, as typed.
    """
    if config_file:
        raise DataError(
            f"--model {name} has adapters, which are not loaded",
            found="its adapter_config.json names another model and modules to load",
            remedy="merge them into their model first (merge_and_unload of peft), or remove"
            " adapter_config.json",
        )


def load_model(hub_model: HubModel, classes: Sequence[str]) -> tuple[nn.Module, Origin]:
    """Loads a model with a head for the given classes, new if it was for others.

    Raises:
        DataError: The model is not found, refused, or not a classifier of this kind.
    """
    hub_model.check()
    transformers = _import_transformers(hub_model.kind, hub_model.offline, hub_model.folder)
    kind = getattr(transformers, _CLASSES[hub_model.kind])
    names: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }

    location = {"local_files_only": hub_model.local, **_NO_CODE}
    find_adapters = transformers.utils.find_adapter_config_file
    adapters = fetch(
        f"--model {hub_model.name}",
        lambda: find_adapters(hub_model.source, local_files_only=hub_model.local),
    )
    check_adapters(adapters, hub_model.name)
    load_config = transformers.AutoConfig.from_pretrained

    def get() -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        if hub_model.from_scratch:
            return kind.from_config(config, **_NO_CODE), {}, ()
        old_classes = getattr(load_config(hub_model.source, **location), "id2label", None) or {}
        arguments = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = kind.from_pretrained(
            hub_model.source, config=config, **location, **arguments
        )
        return model, report, tuple(old_classes[number] for number in sorted(old_classes))

    def read_config() -> Any:
        check_sizes(transformers, hub_model.source, location)
        return load_config(hub_model.source, **location, **names)

    config = fetch(f"--model {hub_model.name}", read_config)
    check_config(config)
    check_size(lambda: kind.from_config(copy.deepcopy(config), **_NO_CODE))
    model, report, old_classes = fetch(f"--model {hub_model.name}", get)
    if not isinstance(model, nn.Module):
        raise DataError(f"--model {hub_model.name} is no {hub_model.kind} classifier")
    # The library loads models in evaluation mode.
    model = model.float().train()
    if hub_model.from_scratch:
        return model, Origin()
    backbone = split_backbone(model)
    backbone_keys, missing = backbone_names(model, backbone), set(report["missing_keys"])
    keeps_head = old_classes == tuple(classes) and missing <= backbone_keys
    if not keeps_head:
        reset_head(model, backbone)
    return model, Origin(hub_model.name, tuple(sorted(missing & backbone_keys)), not keeps_head)


def split_backbone(model: Any) -> Sequence[nn.Module]:
    """Returns the modules of the library's classifier without its head."""
    inner = getattr(model, "timm_model", None)
    if inner is not None:
        head = inner.get_classifier()
        return [child for child in inner.children() if child is not head]
    if model.base_model is model:
        return list(model.children())[:-1]
    return [model.base_model]


def build_from_description(kind: Kind, description: dict[str, Any]) -> nn.Module:
    """Builds a model from :func:`describe_config`, with initial weights, without the network."""
    transformers = _import_transformers(kind, offline=False, folder=True)
    # timm has its own key for the number of labels, and may have names of another task.
    count = {"num_labels": description["num_classes"]} if "num_classes" in description else {}
    check_description(description)
    kind_of_config = type(transformers.AutoConfig.for_model(description["model_type"]))
    config = kind_of_config.from_dict(dict(description), **count)
    check_config(config)
    model: nn.Module = getattr(transformers, _CLASSES[kind]).from_config(config, **_NO_CODE)
    return model.float()


def check_sizes(transformers: Any, source: str, location: Mapping[str, Any]) -> None:
    """Raises DataError if a model's ``config.json`` counts more parts than a network can have.

    transformers makes lists of that length when it reads the file.

    Args:
        source: Folder or id, and ``location`` the other arguments of the library's loaders.
    """
    check_description(transformers.PreTrainedConfig.get_config_dict(source, **location)[0])


def check_description(description: Mapping[str, Any]) -> None:
    """Raises DataError if a model's description counts more parts than a network can have."""
    for key, value in _settings(description):
        if key.endswith(_SIZES) and isinstance(value, (int, float)) and value > MAX_TENSORS:
            raise DataError(
                "the described network is larger than its weights or than the memory of this"
                " machine",
                found=f"{key}: {value:,}",
                remedy="copy the model again from where it was trained",
            )


_SIZES = ("blocks", "labels", "layer", "layers")


def check_config(config: Any) -> None:
    """Raises DataError if timm or a part of the model would load further files.

    timm unpickles the file ``checkpoint_path``, and takes an ``architecture`` with a prefix
    (``local-dir:``, ``hf-hub:``) from a folder or the hub. transformers takes the code of a kernel
    from the hub (``ORGANISATION/REPOSITORY``).
    """
    for name, value in _settings(config):
        key = name.strip("_").removesuffix("_internal")
        is_source = key in _TIMM_NAMES and ":" in str(value)
        is_kernel = key in _KERNEL_NAMES and "/" in str(value)
        if is_source or is_kernel or (key in _FURTHER_FILES and value):
            raise DataError(
                "the model's config.json names further files to load, which is refused",
                found=f"{key}: {str(value)[:200]}",
                remedy="remove that setting: weights are read from the model's own files",
            )


_KERNEL_NAMES = frozenset({"attn_implementation", "experts_implementation"})
_TIMM_NAMES = frozenset({"architecture", "backbone"})
_FURTHER_FILES = frozenset({"checkpoint_path", "use_pretrained_backbone"})


def _settings(value: Any, key: str = "") -> Iterator[tuple[str, Any]]:
    """Yields the settings of a configuration and of all its parts."""
    if hasattr(value, "to_dict"):
        value = vars(value)
    if isinstance(value, Mapping):
        for name, item in value.items():
            yield from _settings(item, str(name))
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _settings(item, key)
    else:
        yield key, value


def describe_config(model: Any) -> dict[str, Any]:
    """Returns a model's configuration as JSON values."""
    content: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return content


def load_tokenizer(hub_model: HubModel) -> Any:
    """Loads the tokenizer of a model."""
    hub_model.check()
    transformers = _import_transformers(hub_model.kind, hub_model.offline, hub_model.folder)

    load = transformers.AutoTokenizer.from_pretrained
    return fetch(
        f"the tokenizer of --model {hub_model.name}",
        lambda: load(hub_model.source, local_files_only=hub_model.local, **_NO_CODE),
    )


def load_preprocessing(hub_model: HubModel) -> dict[str, Any]:
    """Loads the preprocessing of a model's images, with the keys of ``preprocessor_config.json``.

    Models of timm have it in their ``config.json``. Empty if there is none.
    """
    return _load_json(hub_model, "preprocessor_config.json") or timm_preprocessing(
        _load_json(hub_model, "config.json")
    )


def timm_preprocessing(description: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the preprocessing in the ``config.json`` of a timm model."""
    timm_config = description.get("pretrained_cfg") or {}
    names = {"mean": "image_mean", "std": "image_std"}
    settings = {name: timm_config[key] for key, name in names.items() if key in timm_config}
    if "input_size" in timm_config:
        settings["size"] = timm_config["input_size"][-1]
    return settings


def _load_json(hub_model: HubModel, name: str) -> dict[str, Any]:
    """Loads a JSON file of a model; empty if there is none of that name."""
    hub_model.check()
    path = hub_model.path / name
    if not path.parent.is_dir():
        prepare_environment(hub_model.offline)
        hub = library("transformers.utils", "models are loaded")
        cached = fetch(
            f"--model {hub_model.name}",
            lambda: hub.cached_file(
                hub_model.name,
                name,
                local_files_only=hub_model.local,
                _raise_exceptions_for_missing_entries=False,
            ),
        )
        path = Path(cached) if cached else path
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(files.read_bytes_limited(path))
    return content


def _import_transformers(kind: Kind, offline: bool, folder: bool = False) -> Any:
    prepare_environment(offline, folder)
    transformers = library("transformers", f"Hugging Face's {kind} models are loaded")
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def load_backbone(
    network: nn.Module, backbone: Sequence[nn.Module], source: str, classes: Sequence[str]
) -> Origin:
    """Loads every tensor whose name and shape match; the others keep their initial values.

    The head is loaded only if it is complete and not known to be for other classes.

    Args:
        network: Network, changed in place.
        backbone: Its modules without the head.
        source: Run directory, or ``.safetensors``, ``.pth`` or ``.pt`` file.

    Raises:
        DataError: The source is unreadable, or no tensor matches.
    """
    state, target = read_weights(source), network.state_dict()
    backbone_keys = backbone_names(network, backbone)
    matching = {n: t for n, t in state.items() if n in target and target[n].shape == t.shape}
    if not backbone_keys & set(matching):
        raise DataError(
            f"--weights {source} do not fit the model",
            found=f"of its {len(state)} tensors none has the name and shape of one of the model's",
            remedy="name the --model that they were made with",
        )
    old_classes = load_description(source).get("classes") or [*classes]
    keeps_head = old_classes == [*classes] and set(target) - backbone_keys <= set(matching)
    loaded = (
        matching if keeps_head else {name: matching[name] for name in backbone_keys & set(matching)}
    )
    network.load_state_dict(loaded, strict=False)
    missing = (
        n for n in sorted(backbone_keys - set(loaded)) if not n.endswith("num_batches_tracked")
    )
    return Origin(source, tuple(missing), not keeps_head)


def load_description(source: str) -> dict[str, Any]:
    """Loads the description of a run's model; empty for a file."""
    path = local_path(Path(source).expanduser())
    return train.load_config(path) if path.is_dir() else {}


def saved_preprocessing(source: str) -> dict[str, Any]:
    """Returns the preprocessing of a run's images, like :func:`load_preprocessing`."""
    if source == IMAGENET:
        return dict(IMAGENET_PREPROCESSING)
    description = load_description(source)
    try:
        moments, (channels, size, _) = description["normalisation"], description["shape"]
        means, deviations = moments["mean"], moments["deviation"]
    except (KeyError, TypeError, ValueError):
        return {}
    return {"size": size, "image_mean": means, "image_std": deviations, "channels": channels}


def ensure_torch_file(name: str, offline: bool) -> Path:
    """Returns a file of torchvision's weights, downloaded by one process if it is missing.

    Raises:
        DataError: The file is missing and cannot be downloaded.
    """
    path, url = torch_file(name), TORCHVISION + name
    remedy = f"fetch {url} elsewhere, and put it into {path.parent}"
    if path.is_file():
        return path
    if offline:
        raise DataError(f"{path} is not there, and --offline forbids fetching it", remedy=remedy)
    digest = path.stem.rpartition("-")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with exclusive_lock(path.parent / f"{name}.lock"):
            if not path.is_file():
                torch.hub.download_url_to_file(url, str(path), digest, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: wrong checksum
        reason = f"{type(error).__name__}: {error}"
        raise DataError(f"{url} could not be fetched", found=reason, remedy=remedy) from None
    return path


def read_weights(source: str) -> dict[str, Tensor]:
    """Reads tensors by name, without running code from the file."""
    path = local_path(Path(source).expanduser())
    if path.is_dir():
        return saved_state(path)[1]
    try:
        files.check_regular(path)
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        _check_torch_file(path)
        content: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise anything
        raise DataError(
            f"--weights {source} cannot be read",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="a run directory, or a safetensors file",
        ) from None
    state = content.get("state_dict", content) if isinstance(content, dict) else {}
    return {n.removeprefix("module."): t for n, t in state.items() if isinstance(t, Tensor)}


def _check_torch_file(path: Path) -> None:
    """Raises an exception if loading the file would take far more time or memory than its size."""
    with path.open("rb") as file:
        if file.read(len(_ZIP_MAGIC)) != _ZIP_MAGIC:  # the test of torch.load
            if tarfile.is_tarfile(path):
                raise ValueError("a tar file of torch 0.1")
            file.seek(0)
            for _ in range(_NUM_LEGACY_PICKLES):
                check_pickle(file)
            return
    with zipfile.ZipFile(path) as archive:  # torch does not compress
        if sum(entry.file_size for entry in archive.infolist()) > path.stat().st_size:
            raise ValueError("it announces more than it holds")
    # Like torch.load: another reader may find another record of this name.
    content = torch._C.PyTorchFileReader(str(path)).get_record("data.pkl")
    check_pickle(io.BytesIO(content))


def freeze(modules: Sequence[nn.Module]) -> None:
    """Freezes modules: no gradients, and no updates of running statistics.

    They stay in evaluation mode, even when the network is set to training mode.
    """
    for module in modules:
        module.requires_grad_(False)
        module.eval()
        object.__setattr__(module, "train", lambda mode=True, frozen=module: frozen)


def release(module: nn.Module) -> None:
    """Ends the evaluation mode of :func:`freeze`."""
    vars(module).pop("train", None)


def stages_of(backbone: Sequence[nn.Module]) -> list[nn.Module]:
    """Splits the backbone into stages from input to output, and lists of layers into layers."""
    children = list(backbone[0].children()) if len(backbone) == 1 else backbone
    parts = [part for child in children for part in _layers(child)]
    return [part for part in parts if next(part.parameters(), None) is not None]


def _layers(child: nn.Module) -> list[nn.Module]:
    """Returns the layers of the outermost list that holds all of the child's parameters."""
    count = len(list(child.parameters()))
    for module in child.modules():
        is_complete = len(list(module.parameters())) == count
        if isinstance(module, (nn.ModuleList, nn.Sequential)) and len(module) > 1 and is_complete:
            return list(module)
    return [child]


def gradual_unfreezing(
    optimizer: Optimizer, curve: Curve, stages: Sequence[nn.Module], interval: int
) -> LambdaLR:
    """Creates a schedule that unfreezes one more stage, from the last, every ``interval`` steps.

    Frozen stages have a learning rate of 0, which leaves their parameters unchanged.

    Args:
        optimizer: Optimizer with one group; gets one for each stage.
        stages: From input to output.
        interval: Global steps between two stages.
    """
    (group,) = optimizer.param_groups
    stage_numbers = {
        id(p): n for n, stage in enumerate(reversed(stages), 1) for p in stage.parameters()
    }
    groups: dict[int, list[Tensor]] = {}
    for parameter in group["params"]:
        groups.setdefault(stage_numbers.get(id(parameter), 0), []).append(parameter)
    order = sorted(groups)
    optimizer.param_groups[:] = [{**group, "params": groups[number]} for number in order]
    # The schedule saves the curve, which is the head's factor; the others depend on it.
    factors = [_delayed(curve, number * interval) if number else curve for number in order]
    return LambdaLR(optimizer, factors)


def _delayed(curve: Curve, start: int) -> Callable[[int], float]:
    return lambda step: curve(step) if step + curve.step_offset >= start else 0.0


class Freezing:
    """Freezes the backbone and unfreezes it stage by stage.

    Args:
        backbone: Modules of the network without its head.
        interval: Epochs after which one more stage trains; 0 for never.

    Raises:
        SettingError: The backbone has no stages to unfreeze.
    """

    def __init__(self, backbone: Sequence[nn.Module], frozen: bool, interval: int) -> None:
        self._interval = interval if frozen else 0
        self._stages = stages_of(backbone) if self._interval else []
        if self._interval and not self._stages:
            raise SettingError(f"--unfreeze-every {interval}: this model has no stages to unfreeze")
        if frozen:
            freeze([*backbone, *self._stages])
        for stage in self._stages:  # its learning rate is 0 as yet
            stage.requires_grad_(True)

    def schedule(self, optimizer: Optimizer, curve: Curve, epoch_steps: int) -> LambdaLR:
        """Creates the schedule of the learning rates; an epoch has ``epoch_steps`` global steps."""
        if not self._interval:
            return LambdaLR(optimizer, curve)
        return gradual_unfreezing(optimizer, curve, self._stages, self._interval * epoch_steps)

    def start_epoch(self, epoch: int) -> None:
        """Unfreezes the stages that are due; called at the start of each epoch."""
        for number, stage in enumerate(reversed(self._stages), 1):
            if epoch >= number * self._interval:
                release(stage)
                stage.train()


def make_freezing(
    session: train.Session, options: Any, origin: Origin, backbone: Sequence[nn.Module]
) -> Freezing:
    """Freezes the backbone as the options and the weights' origin require, and reports it."""
    frozen = origin.is_frozen(True if options.unfreeze_every else options.freeze)
    if origin.source:
        session.say(origin.describe(frozen))
    return Freezing(backbone, frozen, options.unfreeze_every)
