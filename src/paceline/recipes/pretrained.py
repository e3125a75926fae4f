"""Starting from weights that exist: Hugging Face's models and files; what is loaded, what stays
frozen, and when it thaws.
"""

from __future__ import annotations

import fcntl
import json
import zipfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR

from paceline import train
from paceline.program import library
from paceline.recipes.data import on_this_host
from paceline.recipes.data.hub import fetched, prepare_environment
from paceline.recipes.heads import names_within, renew
from paceline.recipes.optimization import Curve
from paceline.recipes.published import AS_TRAINED, IMAGENET, TORCHVISION, torch_file
from paceline.spec.errors import DataError, SettingError
from paceline.train.weights import saved_state

Kind = Literal["text", "image"]
_CLASSES = {
    "text": "AutoModelForSequenceClassification",
    "image": "AutoModelForImageClassification",
}


@dataclass(frozen=True, slots=True)
class Origin:
    """Where the weights come from with which a training starts.

    Attributes:
        source: As typed; empty for random weights.
        missing: The backbone's tensors that it does not have.
        new_head: The head was made anew, because it was for other classes.
    """

    source: str = ""
    missing: tuple[str, ...] = ()
    new_head: bool = True

    def frozen(self, asked: bool | None) -> bool:
        """Whether the backbone stays as it is: unless said otherwise where only the head is new.

        Raises:
            SettingError: It is to be frozen, and has random weights.
        """
        if asked and self.missing:
            raise SettingError(
                f"--freeze would keep {len(self.missing)} tensors with random weights",
                found=f"{self.source} has no {self._named()}",
                remedy="--no-freeze, or the --model and --image-size that it was made with",
            )
        if asked is not None:
            return asked
        return bool(self.source) and self.new_head and not self.missing

    def describe(self, frozen: bool) -> str:
        """One line for people."""
        head = "a new head" if self.new_head else "their own head"
        missing = f", random where they have none ({self._named()})" if self.missing else ""
        rest = "the backbone is frozen (--no-freeze trains it, too)"
        trained = rest if frozen else "all of it is trained (--freeze trains the head only)"
        return f"weights of {self.source} with {head}{missing}; {trained}"

    def _named(self) -> str:
        more = f" and {len(self.missing) - 3} more" if len(self.missing) > 3 else ""
        return ", ".join(self.missing[:3]) + more


@dataclass(frozen=True, slots=True)
class HubModel:
    """Which model.

    Attributes:
        kind: What it classifies.
        name: Id (``user/name``) or folder.
        offline: Whether the network must not be touched.
        from_scratch: Takes the architecture, and new weights.
    """

    kind: Kind
    name: str
    offline: bool = False
    from_scratch: bool = False

    @property
    def source(self) -> str:
        """What the library is given."""
        path = Path(self.name).expanduser()
        return str(path) if path.is_dir() else self.name

    @property
    def folder(self) -> bool:
        return Path(self.name).expanduser().is_dir()

    @property
    def local(self) -> bool:
        return self.offline or self.folder

    def check(self) -> None:
        """DataError for a path at which there is no folder: the hub has no such id."""
        path = Path(self.name).expanduser()
        an_id = self.name.count("/") <= 1 and not self.name.startswith(("/", "./", "../", "~"))
        if not path.is_dir() and (path.exists() or not an_id):
            raise DataError(
                f"--model {self.name} could not be loaded",
                found=f"there is no folder {path.absolute()}"
                + (", but a file" if path.exists() else ""),
                remedy="give the folder of a saved model, or the id of one on the hub: USER/NAME",
            )


def load_model(wanted: HubModel, classes: Sequence[str]) -> tuple[nn.Module, Origin]:
    """The model with a head for these classes; one that was for others is made anew.

    Raises:
        DataError: Not found, refused, or no such classifier.
    """
    wanted.check()
    transformers = _library(wanted.kind, wanted.offline, wanted.folder)
    kind = getattr(transformers, _CLASSES[wanted.kind])
    names: dict[str, Any] = {
        "num_labels": len(classes),
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }

    def get() -> tuple[Any, dict[str, Any], tuple[str, ...]]:
        at = {"local_files_only": wanted.local}
        described = transformers.AutoConfig.from_pretrained
        if wanted.from_scratch:
            return kind.from_config(described(wanted.source, **at, **names)), {}, ()
        before = getattr(described(wanted.source, **at), "id2label", None) or {}
        more = {"ignore_mismatched_sizes": True, "output_loading_info": True}
        model, report = kind.from_pretrained(wanted.source, **at, **names, **more)
        return model, report, tuple(before[number] for number in sorted(before))

    model, report, before = fetched(f"--model {wanted.name}", get)
    if not isinstance(model, nn.Module):
        raise DataError(f"--model {wanted.name} is no {wanted.kind} classifier")
    # The library gives what it has loaded in evaluation mode.
    model = model.float().train()
    if wanted.from_scratch:
        return model, Origin()
    backbone = backbone_of(model)
    inside, missing = names_within(model, backbone), set(report["missing_keys"])
    same = before == tuple(classes) and missing <= inside
    if not same:
        renew(model, backbone)
    return model, Origin(wanted.name, tuple(sorted(missing & inside)), not same)


def backbone_of(model: Any) -> Sequence[nn.Module]:
    """The parts of the library's classifier without its head."""
    inner = getattr(model, "timm_model", None)
    if inner is not None:
        head = inner.get_classifier()
        return [child for child in inner.children() if child is not head]
    if model.base_model is model:
        return list(model.children())[:-1]
    return [model.base_model]


def rebuilt(kind: Kind, description: dict[str, Any]) -> nn.Module:
    """The architecture that a saved description tells, with initial weights; nothing is fetched."""
    transformers = _library(kind, offline=False, folder=True)
    # timm's descriptions have their own word for it, and class names that may be another task's.
    count = {"num_labels": description["num_classes"]} if "num_classes" in description else {}
    kind_of_config = type(transformers.AutoConfig.for_model(description["model_type"]))
    config = kind_of_config.from_dict(dict(description), **count)
    made: nn.Module = getattr(transformers, _CLASSES[kind]).from_config(config)
    return made.float()


def description(model: Any) -> dict[str, Any]:
    """What :func:`rebuilt` needs, as JSON values."""
    found: dict[str, Any] = json.loads(model.config.to_json_string(use_diff=False))
    return found


def load_tokenizer(wanted: HubModel) -> Any:
    """The tokenizer that belongs to the model."""
    wanted.check()
    transformers = _library(wanted.kind, wanted.offline, wanted.folder)

    def get() -> Any:
        return transformers.AutoTokenizer.from_pretrained(
            wanted.source, local_files_only=wanted.local
        )

    return fetched(f"the tokenizer of --model {wanted.name}", get)


def load_preprocessing(wanted: HubModel) -> dict[str, Any]:
    """How images are prepared for the model, in the words of ``preprocessor_config.json``.

    Models of timm have no such file, but a part of their description; empty where nothing is said.
    """
    return _content(wanted, "preprocessor_config.json") or of_timm(_content(wanted, "config.json"))


def of_timm(description: Mapping[str, Any]) -> dict[str, Any]:
    """The preprocessing that timm's models carry in their description."""
    carried = description.get("pretrained_cfg") or {}
    names = {"image_mean": "mean", "image_std": "std"}
    found = {ours: carried[theirs] for ours, theirs in names.items() if theirs in carried}
    return found | ({"size": carried["input_size"][-1]} if "input_size" in carried else {})


def _content(wanted: HubModel, name: str) -> dict[str, Any]:
    """A JSON file of the model; empty when it has none of that name."""
    wanted.check()
    path = Path(wanted.name).expanduser() / name
    if not path.parent.is_dir():
        prepare_environment(wanted.offline)
        hub = library("transformers.utils", "models are loaded")
        found = fetched(
            f"--model {wanted.name}",
            lambda: hub.cached_file(
                wanted.name,
                name,
                local_files_only=wanted.local,
                _raise_exceptions_for_missing_entries=False,
            ),
        )
        path = Path(found) if found else path
    if not path.is_file():
        return {}
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _library(kind: Kind, offline: bool, folder: bool = False) -> Any:
    prepare_environment(offline, folder)
    found = library("transformers", f"Hugging Face's {kind} models are loaded")
    found.utils.logging.set_verbosity_error()
    found.utils.logging.disable_progress_bar()
    return found


def load_backbone(
    network: nn.Module, backbone: Sequence[nn.Module], source: str, classes: Sequence[str]
) -> Origin:
    """Loads every tensor that fits by name and shape; the others keep their initial values.

    The head is loaded only where it is whole, and not known to be for other classes.

    Args:
        network: Changed in place.
        backbone: Its parts without the head.
        source: A run directory, or a ``.safetensors`` or ``.pth``/``.pt`` file.
        classes: That the network shall tell.

    Raises:
        DataError: Unreadable, or nothing in it fits.
    """
    state, mine = read_weights(source), network.state_dict()
    inside = names_within(network, backbone)
    fits = {n: t for n, t in state.items() if n in mine and mine[n].shape == t.shape}
    if not inside & set(fits):
        raise DataError(
            f"--weights {source} do not fit the model",
            found=f"of its {len(state)} tensors none has the name and shape of one of the model's",
            remedy="name the --model that they were made with",
        )
    before = described(source).get("classes") or [*classes]
    same = before == [*classes] and set(mine) - inside <= set(fits)
    loaded = fits if same else {name: fits[name] for name in inside & set(fits)}
    network.load_state_dict(loaded, strict=False)
    missing = (n for n in sorted(inside - set(loaded)) if not n.endswith("num_batches_tracked"))
    return Origin(source, tuple(missing), not same)


def described(source: str) -> dict[str, Any]:
    """What a run says of its model; empty for a file.

    Raises:
        DataError: The folder holds no run with a model or a checkpoint.
    """
    path = on_this_host(Path(source).expanduser())
    return train.load_config(path) if path.is_dir() else {}


def preprocessing_of(source: str) -> dict[str, Any]:
    """How a run's images were prepared, as :func:`load_preprocessing` says it, and the channels."""
    if source == IMAGENET:
        return dict(AS_TRAINED)
    found = described(source)
    try:
        moments, (channels, size, _) = found["normalisation"], found["shape"]
        means, deviations = moments["mean"], moments["deviation"]
    except (KeyError, TypeError, ValueError):
        return {}
    return {"size": size, "image_mean": means, "image_std": deviations, "channels": channels}


def torch_file_here(name: str, offline: bool) -> Path:
    """A file of torchvision's weights; downloaded where it is not on this disk, by one process.

    Raises:
        DataError: It is not here, and must not or cannot be fetched.
    """
    path, url = torch_file(name), TORCHVISION + name
    remedy = f"fetch {url} elsewhere, and put it into {path.parent}"
    if path.is_file():
        return path
    if offline:
        raise DataError(f"{path} is not there, and --offline forbids fetching it", remedy=remedy)
    beginning = path.stem.rpartition("-")[2]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with (path.parent / f"{name}.lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.is_file():
                torch.hub.download_url_to_file(url, str(path), beginning, progress=False)
    except (OSError, RuntimeError) as error:  # RuntimeError: of another content
        said = f"{type(error).__name__}: {error}"
        raise DataError(f"{url} could not be fetched", found=said, remedy=remedy) from None
    return path


def read_weights(source: str) -> dict[str, Tensor]:
    """Tensors by name. Nothing in the file is run."""
    path = on_this_host(Path(source).expanduser())
    if path.is_dir():
        return saved_state(path)[1]
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        if zipfile.is_zipfile(path):  # torch packs nothing
            with zipfile.ZipFile(path) as packed:
                if sum(one.file_size for one in packed.infolist()) > path.stat().st_size:
                    raise ValueError("it announces more than it holds")
        found: Any = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # damaged files raise anything
        raise DataError(
            f"--weights {source} cannot be read",
            found=f"{type(error).__name__}: {str(error)[:200]}",
            remedy="a run directory, or a safetensors file",
        ) from None
    state = found.get("state_dict", found) if isinstance(found, dict) else {}
    return {n.removeprefix("module."): t for n, t in state.items() if isinstance(t, Tensor)}


def freeze(modules: Sequence[nn.Module]) -> None:
    """Keeps modules exactly as they are: no gradients, and no running statistics either."""
    for module in modules:
        module.requires_grad_(False)
        hold(module)


def hold(module: nn.Module) -> None:
    """Keeps a module in evaluation mode, also when the whole network goes to training mode."""
    module.eval()
    object.__setattr__(module, "train", lambda mode=True: module)


def let_go(module: nn.Module) -> None:
    """Ends :func:`hold`."""
    vars(module).pop("train", None)


def stages_of(backbone: Sequence[nn.Module]) -> list[nn.Module]:
    """The backbone in stages from input to output; lists of layers are taken apart."""
    children = list(backbone[0].children()) if len(backbone) == 1 else backbone
    parts = [part for child in children for part in _layers(child)]
    return [part for part in parts if next(part.parameters(), None) is not None]


def _layers(child: nn.Module) -> list[nn.Module]:
    """The layers of the outermost list that holds all of the child's parameters."""
    count = len(list(child.parameters()))
    for one in child.modules():
        whole = len(list(one.parameters())) == count
        if isinstance(one, (nn.ModuleList, nn.Sequential)) and len(one) > 1 and whole:
            return list(one)
    return [child]


def thawing(
    optimizer: Optimizer, curve: Curve, stages: Sequence[nn.Module], every: int
) -> LambdaLR:
    """A schedule under which one stage more, from the last, trains after every ``every`` steps.

    Waiting stages have a learning rate of 0, which leaves their parameters bit for bit.

    Args:
        optimizer: With one group; it gets one for each stage.
        curve: Course of the learning rate.
        stages: From input to output.
        every: Global steps between two thaws.
    """
    (group,) = optimizer.param_groups
    waiting = {id(p): n for n, stage in enumerate(reversed(stages), 1) for p in stage.parameters()}
    groups: dict[int, list[Tensor]] = {}
    for parameter in group["params"]:
        groups.setdefault(waiting.get(id(parameter), 0), []).append(parameter)
    order = sorted(groups)
    optimizer.param_groups[:] = [{**group, "params": groups[number]} for number in order]
    # The head's course is the curve itself, which the schedule saves; the others follow it.
    courses = [_from_step(curve, number * every) if number else curve for number in order]
    return LambdaLR(optimizer, courses)


def _from_step(curve: Curve, start: int) -> Callable[[int], float]:
    return lambda step: curve(step) if step >= start else 0.0


class Freezing:
    """What stays as it was loaded, and until when.

    Args:
        backbone: The parts of the network without its head.
        frozen: False changes nothing.
        every: Epochs after which one more stage trains; 0 for never.

    Raises:
        SettingError: The backbone has no stages to unfreeze.
    """

    def __init__(self, backbone: Sequence[nn.Module], frozen: bool, every: int) -> None:
        self._every = every if frozen else 0
        self._stages = stages_of(backbone) if self._every else []
        if self._every and not self._stages:
            raise SettingError(f"--unfreeze-every {every}: this model has no stages to unfreeze")
        if frozen:
            freeze(backbone)
        for stage in self._stages:
            stage.requires_grad_(True)
            hold(stage)

    def schedule(self, optimizer: Optimizer, curve: Curve, epoch_steps: int) -> LambdaLR:
        """The learning rates' schedule; ``epoch_steps`` global steps are an epoch."""
        if not self._every:
            return LambdaLR(optimizer, curve)
        return thawing(optimizer, curve, self._stages, self._every * epoch_steps)

    def begin(self, epoch: int) -> None:
        """Lets the stages go whose time has come; call it at the start of every epoch."""
        for number, stage in enumerate(reversed(self._stages), 1):
            if epoch >= number * self._every:
                let_go(stage)
                stage.train()


def freezing(
    session: train.Session, options: Any, origin: Origin, backbone: Sequence[nn.Module]
) -> Freezing:
    """What stays frozen, as the options and the weights' origin say; told once.

    Args:
        session: Tells it.
        options: With ``freeze`` and ``unfreeze_every``.
        origin: Of the network's weights.
        backbone: The network's parts without its head.
    """
    frozen = origin.frozen(True if options.unfreeze_every else options.freeze)
    if origin.source:
        session.say(origin.describe(frozen))
    return Freezing(backbone, frozen, options.unfreeze_every)
