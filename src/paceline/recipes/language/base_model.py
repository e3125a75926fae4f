"""The model that a fine-tuning starts from: found, loaded and identified by its content."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from paceline.program import library
from paceline.recipes.data import local_path
from paceline.recipes.data.hub import explain_error, fetch, prepare_environment
from paceline.recipes.language.gguf_header import MAX_ELEMENTS_PER_BYTE, check_gguf
from paceline.recipes.pretrained import (
    check_adapters,
    check_config,
    check_folder,
    check_sizes,
)
from paceline.spec.errors import DataError
from paceline.spec.formatting import pluralize, shell_text
from paceline.spec.rundir import is_run
from paceline.train import files
from paceline.train.elastic.replica_check import checksums
from paceline.train.weights import EXTRA_ELEMENTS, EXTRA_TENSORS, MAX_TENSORS, limited_size

_NO_CODE = {"trust_remote_code": False}
_MIN_BYTES_OF_TENSOR = 32  # its name, shape and place in a file


@dataclass(frozen=True)
class BaseModel:
    """Where a causal language model is.

    Attributes:
        name: Folder, GGUF file or id of Hugging Face, as typed.
    """

    name: str
    offline: bool = False

    @property
    def path(self) -> Path:
        """The folder or file on this host."""
        return local_path(Path(self.name).expanduser())

    def check_no_run(self) -> None:
        """Raises DataError for a folder of a run that transformers cannot load."""
        path = self.path
        for folder in (path, *path.parents[:2]):  # RUN, RUN/model, RUN/adapters/last
            if path.is_dir() and is_run(folder) and not _describes_model(path):
                exported = folder / "export/transformers"
                raise DataError(
                    f"--model {self.name} is part of a run of Paceline",
                    remedy=f"{shell_text(['paceline', 'export', str(folder)])}\n"
                    f"Then: --model {shell_text([str(exported)])}",
                )

    def outline(self) -> Any:
        """Builds the model without its weights, on the device ``meta``.

        A GGUF file is loaded: its description takes nearly as long to read as its weights.

        Raises:
            DataError: As of :meth:`load`.
        """
        return self.load() if self.path.is_file() else self._build(self._config())

    def _build(self, config: Any) -> Any:
        """Builds the model without memory; DataError if it is larger than its files."""
        transformers, _ = self._prepare()

        def build() -> Any:
            with torch.device("meta"), limited_size(*self._limits()):
                return transformers.AutoModelForCausalLM.from_config(config, **_NO_CODE)

        return self._get(f"--model {self.name}", build)

    def _limits(self) -> tuple[int, int]:
        """The largest numbers of tensors and weights that the model's files can stand for."""
        if not self.path.exists():
            return MAX_TENSORS, sys.maxsize
        weights = [self.path, *self.path.glob("*.safetensors"), *self.path.glob("*.bin")]
        num_bytes = sum(files.stored_bytes(file) for file in weights if file.is_file())
        max_tensors = min(MAX_TENSORS, num_bytes // _MIN_BYTES_OF_TENSOR + EXTRA_TENSORS)
        return max_tensors, MAX_ELEMENTS_PER_BYTE * num_bytes + EXTRA_ELEMENTS

    def load(self, dtype: torch.dtype | str = "auto") -> Any:
        """Loads the model, by default in the precision in which it is saved.

        Raises:
            DataError: It is not found, is not a causal language model, names further files to load,
                or lacks weights that its description needs.
        """
        transformers, arguments = self._prepare()
        load, is_gguf = transformers.AutoModelForCausalLM.from_pretrained, "gguf_file" in arguments
        config = self._config()
        self._build(config)
        if is_gguf:  # whose description takes long to read
            arguments["config"] = config
        arguments |= {"dtype": dtype, "output_loading_info": True}
        model, report = self._get(f"--model {self.name}", lambda: load(**arguments))
        if not isinstance(model, nn.Module):
            raise DataError(f"--model {self.name} is not a causal language model")
        if missing := sorted(report["missing_keys"]):
            raise DataError(
                f"--model {self.name} lacks {pluralize(len(missing), 'tensor')} of its model",
                found=f"its description needs {', '.join(missing[:3])}, which would be random",
                remedy="copy the file again from where it comes: it is incomplete"
                if is_gguf
                else "copy all files of the model again from where it was trained",
            )
        if is_gguf:  # its weights are floats now, but it would refuse to be saved
            vars(model.config).pop("quantization_config", None)
            vars(model).pop("hf_quantizer", None)
        # recorded with adapters, for which a path on another host means nothing
        vars(model)["name_or_path"] = self.name
        return model

    def load_tokenizer(self) -> Any:
        """Loads the model's tokenizer.

        Raises:
            DataError: It is not found, or does not tell where in the text its tokens are.
        """
        transformers, arguments = self._prepare()
        load = transformers.AutoTokenizer.from_pretrained
        tokenizer = self._get(f"the tokenizer of --model {self.name}", lambda: load(**arguments))
        if not tokenizer.is_fast:
            raise DataError(
                f"the tokenizer of --model {self.name} does not tell where its tokens are",
                remedy="a model with tokenizer.json",
            )
        return tokenizer

    def _config(self) -> Any:
        """Returns the model's description; DataError if it is refused."""
        transformers, arguments = self._prepare()
        source, local = arguments["pretrained_model_name_or_path"], arguments["local_files_only"]
        label, find_adapters = f"--model {self.name}", transformers.utils.find_adapter_config_file
        adapters = self._get(label, lambda: find_adapters(source, local_files_only=local))
        check_adapters(adapters, self.name)

        def read() -> Any:
            if "gguf_file" not in arguments:  # whose header is checked
                check_sizes(transformers, source, {"local_files_only": local})
            return transformers.AutoConfig.from_pretrained(**arguments)

        config = self._get(label, read)
        check_config(config)
        return config

    def _get(self, label: str, get: Callable[[], Any]) -> Any:
        """Calls a loader; of what is not on this host, one process downloads and others wait."""
        if not self.path.exists():
            return fetch(label, get)
        try:
            return get()
        except DataError:
            raise
        except Exception as error:  # several libraries, each with its own exceptions
            raise explain_error(label, error) from error

    def _prepare(self) -> tuple[Any, dict[str, Any]]:
        """Returns the library, and the arguments of its loaders."""
        path = self.path
        check_folder(path, self.name)
        if path.is_file():  # its tensors have a progress bar that cannot be turned off otherwise
            os.environ.setdefault("TQDM_DISABLE", "1")
        prepare_environment(self.offline, path.exists())
        transformers = library("transformers", f"--model {self.name} is loaded")
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        location: dict[str, Any] = {
            "local_files_only": self.offline or path.exists(),
            **_NO_CODE,
        }
        if path.is_file():
            if path.suffix != ".gguf":
                raise DataError(
                    f"--model {self.name} is not a GGUF file", remedy="the folder of a saved model"
                )
            library("gguf", f"{path.name} is read")
            check_gguf(path, self.name)
            location |= {"gguf_file": path.name}
            return transformers, {"pretrained_model_name_or_path": str(path.parent), **location}
        source = str(path) if path.is_dir() else self.name
        if not path.is_dir() and (source.count("/") > 1 or source.startswith((".", "/", "~"))):
            raise DataError(f"--model {self.name} is not there", found=f"no {path.absolute()}")
        return transformers, {"pretrained_model_name_or_path": source, **location}


def _describes_model(folder: Path) -> bool:
    """Whether a folder has a description for transformers; that of a run is of the same name."""
    try:
        description = json.loads(files.read_bytes_limited(folder / "config.json"))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(description, dict) and "model_type" in description


def content_hash(model: nn.Module) -> str:
    """Returns a hash of all parameters, by name."""
    names = [name for name, _ in model.named_parameters()]
    sums = checksums(model.parameters()).tolist()
    shapes = [f"{tensor.dtype} {list(tensor.shape)}" for tensor in model.parameters()]
    text = "\n".join(f"{n} {s} {c}" for n, s, c in zip(names, shapes, sums, strict=True))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def settings_hash(model: Any) -> str:
    """Returns a hash of what a transformers model computes beside its parameters."""
    settings = model.config.to_diff_dict()
    settings.pop("transformers_version", None)
    text = json.dumps(settings, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
