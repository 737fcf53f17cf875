"""Pre-trained weights: sources, download and loading.

A file is searched in the folder of torch.hub (`~/.cache/torch/hub/checkpoints`, or below `TORCH_HOME`), then in the
cache of Hugging Face, and otherwise downloaded to the former. Only tensors are unpickled. Names and shapes of all
weights must match. Only the last layer may be missing in the file or have another number of classes; it then keeps its
initial weights.
"""

import hashlib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from http.client import HTTPException
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.errors import UserError, short_list
from fedlas.extras import optional_module
from fedlas.https import require_https_redirects
from fedlas.io.torch import read_torch
from fedlas.io.untrusted import check_file, memory_errors

# Usual keys of the weights in a checkpoint, and those of a run of fedlas, whose best epoch is preferred to its last.
_KEYS = ("state_dict", "model_state_dict", "model")
_KEYS_OF_RUN = ("best", "model")


@dataclass(frozen=True)
class Source:
    """Source of the published weights of a network.

    Args:
        url: URL of the file.
        file: its name in the folder of torch.hub; `-` and eight or more hexadecimal digits at its end are a prefix of
            its SHA-256.
        repository: its repository on the Hugging Face Hub, if any.
    """

    url: str
    file: str
    repository: str | None = None

    @classmethod
    def of_torchvision(cls, network: str, tag: str | None = None) -> "Source":
        """Return the source of the torchvision weights of a network, by default with torchvision's default tag."""
        known = optional_module("torchvision.models", "train").get_model_weights(network)
        names = [weights.name for weights in known]
        if not names:
            raise UserError(f"torchvision has no weights for {network!r}")
        if tag is not None and tag not in names:
            raise UserError(f"torchvision has no weights {tag!r} for {network!r}, only {', '.join(names)}")
        url: str = (known.DEFAULT if tag is None else known[tag]).url
        return cls(url, url.rsplit("/", 1)[-1])

    @classmethod
    def of_timm(cls, network: str) -> "Source":
        """Return the source of the timm weights of a network; a tag may follow the name after a dot."""
        config = optional_module("timm", "train").get_pretrained_cfg(network)
        if config is not None and config.hf_hub_id:
            name = config.hf_hub_filename or "model.safetensors"
            hub = os.environ.get("HF_ENDPOINT", "https://huggingface.co").rstrip("/")
            file = f"{config.hf_hub_id.rsplit('/', 1)[-1]}{Path(name).suffix}"
            return cls(f"{hub}/{config.hf_hub_id}/resolve/main/{name}", file, config.hf_hub_id)
        if config is not None and config.url:
            return cls(config.url, config.url.rsplit("/", 1)[-1])
        raise UserError(f"timm has no weights for {network!r}")

    @property
    def path(self) -> Path:
        """Local path of the file."""
        return Path(torch.hub.get_dir()) / "checkpoints" / self.file

    @property
    def checksum(self) -> str | None:
        """Prefix of the SHA-256 in the name of the file, if any."""
        digits = re.search(r"-([0-9a-f]{8,})\.", self.file)
        return None if digits is None else digits[1]

    def fetch(self) -> Path:
        """Return the path of the file; download it if necessary."""
        if not self.path.exists():
            return self._in_cache() or self._download()
        check_file(self.path)
        if self.checksum is not None:
            with self.path.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if not digest.startswith(self.checksum):
                problem = f"its SHA-256 is {digest} and should begin with {self.checksum}"
                raise UserError(f"{self.path} is damaged ({problem}); delete it to download it again from {self.url}")
        return self.path

    def _in_cache(self) -> Path | None:
        if self.repository is None:
            return None
        try:
            cached = optional_module("huggingface_hub", "train").try_to_load_from_cache(
                self.repository, self.url.rsplit("/", 1)[-1]
            )
        except ImportError:
            return None
        return Path(cached) if isinstance(cached, str) else None

    def _download(self) -> Path:
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            with require_https_redirects():
                torch.hub.download_url_to_file(self.url, str(self.path), self.checksum, progress=sys.stderr.isatty())
        except (OSError, HTTPException, RuntimeError) as error:  # RuntimeError: wrong checksum
            raise OSError(
                f"the weights are not on this machine and could not be fetched ({error}). Fetch {self.url} elsewhere "
                f"and put it at {self.path}, or pass its path: pretrained='path/to/{self.path.name}'"
            ) from error
        return self.path


def read_weights(path: str | Path) -> dict[str, Tensor]:
    """Read the weights in a safetensors file or a file of `torch.save`."""
    path = Path(path).expanduser()
    if not path.exists():
        raise FileNotFoundError(f"there is no file of weights at {path}")
    check_file(path)
    try:
        with memory_errors():
            if path.suffix == ".safetensors":
                content = optional_module("safetensors.torch", "train").load_file(str(path))
            else:
                content = read_torch(path)
    except (ImportError, MemoryError):
        raise
    except Exception as error:  # errors differ by format, and none names the file
        raise UserError(f"{path} is damaged, or holds more than tensors: {error}") from error
    is_run = isinstance(content, Mapping) and str(content.get("format")).startswith("fedlas.checkpoint/")
    keys = _KEYS_OF_RUN if is_run else _KEYS
    weights = next((content[key] for key in keys if _is_mapping(content, key) and content[key]), content)
    if not isinstance(weights, Mapping) or not all(isinstance(value, Tensor) for value in weights.values()):
        raise UserError(f"{path} holds no state_dict, neither itself nor under {', '.join(_KEYS)}")
    return dict(weights)


def mismatch(model: nn.Module, weights: Mapping[str, Tensor], head: str) -> str:
    """Describe the weights that do not match a network; empty if only the number of classes differs."""
    model_state, skipped = model.state_dict(), _left_out(model, weights, head)
    # Files of old versions of torch have no num_batches_tracked.
    missing = [
        n for n in model_state if n not in weights and n not in skipped and not n.endswith("num_batches_tracked")
    ]
    unknown = [n for n in weights if n not in model_state]
    reshaped = [
        f"{n} {tuple(weights[n].shape)} instead of {tuple(model_state[n].shape)}"
        for n in model_state
        if n in weights and n not in skipped and weights[n].shape != model_state[n].shape
    ]
    problems = {"missing": missing, "unknown": unknown, "of another shape": reshaped}
    return "; ".join(f"{problem}: {short_list(names, 5)}" for problem, names in problems.items() if names)


def load_weights(model: nn.Module, weights: Mapping[str, Tensor], head: str) -> None:
    """Load matching weights into a network, except a last layer with another number of classes."""
    skipped = _left_out(model, weights, head)
    model.load_state_dict({name: value for name, value in weights.items() if name not in skipped}, strict=False)


def _left_out(model: nn.Module, weights: Mapping[str, Tensor], head: str) -> set[str]:
    """Return the names of the weights of the last layer if they are missing or have another number of classes."""
    layer = {f"{head}.{name}": value for name, value in model.get_submodule(head).named_parameters(recurse=False)}
    available = {name: weights[name] for name in layer if name in weights}
    widths_agree = all(value.shape[1:] == layer[name].shape[1:] for name, value in available.items())
    classes_agree = available and all(len(value) == len(layer[name]) for name, value in available.items())
    return set(layer) if widths_agree and not classes_agree else set()


def _is_mapping(content: Any, key: str) -> bool:
    return isinstance(content, Mapping) and isinstance(content.get(key), Mapping)
