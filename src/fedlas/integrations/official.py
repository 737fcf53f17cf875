"""Load checkpoints of the official code into the networks of this package.

The official code (github.com/nadarasarbahavan/FEDLAS) and the code that it is based on (ACLS, MbLS) write `best.pth`
and `last.pth` with `torch.save`:

    epoch        index of the epoch, starting at 0
    state_dict   weights of the network
    optimizer    state for network and gate
    scheduler    state of the learning-rate schedule
    val_score    validation accuracy, a numpy scalar; missing if it is 0

Only the weights are loaded. The file does not contain the gate and the norm statistics of FeDLaS, which prediction does
not need. A plain or a nested state_dict is read too, and names may begin with `module.` (`nn.DataParallel`). The names
of the weights differ from those of this package in two networks:

    CIFAR ResNets   `shortcut` instead of `downsample`
    ViT             prefix `vit.`, and a copy of the head named `fc`

Only tensors and plain values are unpickled. A replacement for numpy's function reads the scalar.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.errors import UserError, short_list
from fedlas.io.torch import read_torch
from fedlas.io.untrusted import file_errors
from fedlas.models.base import WithFeatures

KEY = "state_dict"
SHOWN = 5
DEEPEST = 8


@dataclass(frozen=True)
class OfficialCheckpoint:
    """Content of a checkpoint of the official code.

    Args:
        weights: weights of the network, with the names of this package.
        epoch: number of finished epochs; None if unknown.
        accuracy: accuracy on the split for epoch selection, which is the test split for CUB and Aircraft.
    """

    weights: Mapping[str, Tensor]
    epoch: int | None = None
    accuracy: float | None = None


def read_official(path: str | Path) -> OfficialCheckpoint:
    """Read a checkpoint of the official code, and rename the weights."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    with file_errors(path):
        content = read_torch(path, stand_ins=_STAND_INS)
    outer = content if isinstance(content, Mapping) else {}
    weights, depth = content, 0
    while isinstance(weights, Mapping) and isinstance(weights.get(KEY), Mapping):
        weights, depth = weights[KEY], depth + 1
        if depth > DEEPEST:  # a pickle can contain a dictionary that contains itself
            raise UserError(f"{path} has more than {DEEPEST} nested dictionaries {KEY!r}")
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        keys = f"; it holds {short_list(map(str, outer), SHOWN)}" if outer else ""
        raise UserError(f"{path} holds no weights, neither itself nor under {KEY!r}{keys}")
    epoch, accuracy = outer.get("epoch"), outer.get("val_score")
    return OfficialCheckpoint(
        _renamed(weights, path),
        epoch + 1 if isinstance(epoch, int) else None,
        float(accuracy) if isinstance(accuracy, (int, float)) else None,
    )


def load_official(path: str | Path, net: nn.Module) -> OfficialCheckpoint:
    """Load all weights of an official checkpoint into a network; raise if names or shapes differ.

    Args:
        path: the checkpoint, such as `best.pth`.
        net: a network of the same kind and number of classes, such as `fedlas.build_model("resnet50_cifar", 10)`.
    """
    checkpoint = read_official(path)
    model = net.model if isinstance(net, WithFeatures) else net
    expected = model.state_dict()
    missing = [name for name in expected if name not in checkpoint.weights]
    unknown = [name for name in checkpoint.weights if name not in expected]
    reshaped = [
        f"{name} is {tuple(checkpoint.weights[name].shape)} instead of {tuple(expected[name].shape)}"
        for name in expected
        if name in checkpoint.weights and checkpoint.weights[name].shape != expected[name].shape
    ]
    differences = {"not in the file": missing, "not in the network": unknown, "of another shape": reshaped}
    if any(differences.values()):
        listed = "; ".join(
            f"{difference}: {short_list(names, SHOWN)}" for difference, names in differences.items() if names
        )
        raise UserError(f"{path} does not fit {type(model).__name__}: {listed}. {_advice(checkpoint.weights)}")
    model.load_state_dict(checkpoint.weights)
    return checkpoint


def _renamed(weights: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Rename the weights to the names of this package."""
    names = {name: re.sub(r"^(module\.)+", "", str(name)) for name in weights}
    vision = any(name.startswith("vit.") for name in names.values())
    renamed: dict[str, Tensor] = {}
    for original, name in names.items():
        if vision and name.startswith("fc."):
            head_weights = weights.get(original.replace("fc.", "vit.head.", 1))
            if head_weights is None or not torch.equal(head_weights, weights[original]):
                raise UserError(
                    f"{path}: {original} should be the head vit.{name.replace('fc.', 'head.')} again, and is not"
                )
            continue
        timm_name = name.removeprefix("vit.") if vision else re.sub(r"(?<=\.)shortcut(?=\.)", "downsample", name)
        if timm_name in renamed:
            raise UserError(f"{path} has two weights for {timm_name}")
        renamed[timm_name] = weights[original]
    return renamed


def _advice(weights: Mapping[str, Tensor]) -> str:
    """Return advice on which network of this package the weights belong to."""
    stem, head = weights.get("conv1.weight"), weights.get("fc.weight")
    if stem is None or head is None or stem.ndim != 4 or head.ndim != 2:
        return "Build the network that was trained: architecture, depth and number of classes."
    blocks = [len({name.split(".")[1] for name in weights if name.startswith(f"layer{n}.")}) for n in range(1, 5)]
    deep = "layer1.0.conv3.weight" in weights
    depth = 2 + (3 if deep else 2) * sum(blocks)
    kind = "" if stem.shape[-1] == 7 else "_tiny" if head.shape[1] > 512 * (4 if deep else 1) else "_cifar"
    return f'It looks like build_model("resnet{depth}{kind}", {len(head)}).'


class _Kind:
    """Replacement for `numpy.dtype` in a pickle: the letter and the size of a number type."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


_FORMATS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i"}


def _number(kind: _Kind, content: bytes | str) -> float:
    """Return a number from its bytes; replaces the function that creates numpy scalars in a pickle."""
    raw = content.encode("latin-1") if isinstance(content, str) else content
    if not isinstance(kind, _Kind) or kind.code not in _FORMATS:
        raise UserError("a numpy object in the file is not a plain number")
    return float(struct.unpack(f"{kind.order}{_FORMATS[kind.code]}", raw)[0])


# numpy 2 moved the function; files contain its old or new path.
_STAND_INS: dict[str, Any] = {
    "numpy.dtype": _Kind,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
