"""Checkpoints of the code that was published with the paper, for our networks.

That code (github.com/nadarasarbahavan/FEDLAS) and those it is built on (ACLS, MbLS) write `best.pth` and `last.pth`
with `torch.save`:

    epoch        of the checkpoint, counted from 0
    state_dict   the network
    optimizer    of network and gate together
    scheduler    of the learning rate
    val_score    validation accuracy, a numpy number; left out where it is 0

Only the network is taken. The gate and the norm statistics of FeDLaS are not in the file; prediction needs neither. A
bare state_dict is read too, as is one under another state_dict, and names may begin with `module.`, as
`nn.DataParallel` leaves them. The names of the weights differ from ours in two networks:

    CIFAR ResNets   `shortcut`, which torchvision and we call `downsample`
    ViT             all behind `vit.`, and the head a second time as `fc`

Nothing is unpickled but tensors and plain values: the numpy number is read by a stand-in for numpy's own function.
"""

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedlas.errors import UserError
from fedlas.io.torch import read_torch
from fedlas.io.untrusted import file_errors
from fedlas.models.base import WithFeatures

PLACE = "state_dict"
SHOWN = 4
DEEPEST = 8


@dataclass(frozen=True)
class OfficialCheckpoint:
    """What a checkpoint of the published code tells.

    Args:
        weights: those of the network, under our names.
        epoch: how many epochs were trained; None where the file does not tell.
        accuracy: on the split that epochs were selected by; that is the test split for CUB and Aircraft.
    """

    weights: Mapping[str, Tensor]
    epoch: int | None = None
    accuracy: float | None = None


def read_official(path: str | Path) -> OfficialCheckpoint:
    """Read a checkpoint of the published code, and give the weights our names."""
    if not Path(path).exists():
        raise FileNotFoundError(f"there is no checkpoint at {path}")
    with file_errors(path):
        content = read_torch(path, stand_ins=_STAND_INS)
    outer = content if isinstance(content, Mapping) else {}
    weights, depth = content, 0
    while isinstance(weights, Mapping) and isinstance(weights.get(PLACE), Mapping):
        weights, depth = weights[PLACE], depth + 1
        if depth > DEEPEST:  # a pickle can also hold a table inside of itself
            raise UserError(f"{path} has more than {DEEPEST} tables {PLACE!r} inside of each other, or one in itself")
    if not isinstance(weights, Mapping) or not weights or not all(isinstance(v, Tensor) for v in weights.values()):
        known = f"; it holds {_some(list(map(str, outer)))}" if outer else ""
        raise UserError(f"{path} holds no weights, neither itself nor under {PLACE!r}{known}")
    epoch, accuracy = outer.get("epoch"), outer.get("val_score")
    return OfficialCheckpoint(
        _renamed(weights, path),
        epoch + 1 if isinstance(epoch, int) else None,
        float(accuracy) if isinstance(accuracy, (int, float)) else None,
    )


def load_official(path: str | Path, net: nn.Module) -> OfficialCheckpoint:
    """Put the weights of a published checkpoint into a network, all of them or none.

    Args:
        path: the checkpoint, such as `best.pth`.
        net: a network of the same kind and number of classes, such as `fedlas.build_model("resnet50_cifar", 10)`.
    """
    found = read_official(path)
    model = net.model if isinstance(net, WithFeatures) else net
    own = model.state_dict()
    missing = [name for name in own if name not in found.weights]
    unknown = [name for name in found.weights if name not in own]
    reshaped = [
        f"{name} is {tuple(found.weights[name].shape)} instead of {tuple(own[name].shape)}"
        for name in own
        if name in found.weights and found.weights[name].shape != own[name].shape
    ]
    faults = {"not in the file": missing, "not in the network": unknown, "of another shape": reshaped}
    if any(faults.values()):
        listed = "; ".join(f"{fault}: {_some(names)}" for fault, names in faults.items() if names)
        raise UserError(f"{path} does not fit {type(model).__name__}: {listed}. {_advice(found.weights)}")
    model.load_state_dict(found.weights)
    return found


def _renamed(weights: Mapping[str, Tensor], path: str | Path) -> dict[str, Tensor]:
    """Give the weights the names that our networks have."""
    names = {name: re.sub(r"^(module\.)+", "", str(name)) for name in weights}
    vision = any(name.startswith("vit.") for name in names.values())
    renamed: dict[str, Tensor] = {}
    for given, name in names.items():
        if vision and name.startswith("fc."):
            twin = weights.get(given.replace("fc.", "vit.head.", 1))
            if twin is None or not torch.equal(twin, weights[given]):
                raise UserError(
                    f"{path}: {given} should be the head vit.{name.replace('fc.', 'head.')} again, and is not"
                )
            continue
        ours = name.removeprefix("vit.") if vision else re.sub(r"(?<=\.)shortcut(?=\.)", "downsample", name)
        if ours in renamed:
            raise UserError(f"{path} has two weights for {ours}")
        renamed[ours] = weights[given]
    return renamed


def _advice(weights: Mapping[str, Tensor]) -> str:
    """Say which of our networks the weights seem to be of."""
    stem, head = weights.get("conv1.weight"), weights.get("fc.weight")
    if stem is None or head is None or stem.ndim != 4 or head.ndim != 2:
        return "Build the network that it was trained with: its kind, depth and number of classes."
    blocks = [len({name.split(".")[1] for name in weights if name.startswith(f"layer{n}.")}) for n in range(1, 5)]
    deep = "layer1.0.conv3.weight" in weights
    depth = 2 + (3 if deep else 2) * sum(blocks)
    kind = "" if stem.shape[-1] == 7 else "_tiny" if head.shape[1] > 512 * (4 if deep else 1) else "_cifar"
    return f'It looks like build_model("resnet{depth}{kind}", {len(head)}).'


def _some(names: list[str]) -> str:
    more = len(names) - SHOWN
    return ", ".join(names[:SHOWN]) + (f" and {more} more" if more > 0 else "")


class _Kind:
    """Stands in for `numpy.dtype` in a pickle: it knows the type of a number by its letter and size."""

    def __init__(self, code: str, *_: Any) -> None:
        self.code = code
        self.order = "<"

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.order = ">" if state[1] == ">" else "<"


_FORMATS = {"f8": "d", "f4": "f", "f2": "e", "i8": "q", "i4": "i"}


def _number(kind: _Kind, content: bytes | str) -> float:
    """Stand in for the function that makes a numpy number of its bytes."""
    raw = content.encode("latin-1") if isinstance(content, str) else content
    if not isinstance(kind, _Kind) or kind.code not in _FORMATS:
        raise UserError("a numpy object in the file is not a plain number")
    return float(struct.unpack(f"{kind.order}{_FORMATS[kind.code]}", raw)[0])


# numpy 2 moved the function; files know it by its old or its new home.
_STAND_INS: dict[str, Any] = {
    "numpy.dtype": _Kind,
    "numpy.core.multiarray.scalar": _number,
    "numpy._core.multiarray.scalar": _number,
}
