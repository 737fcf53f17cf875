"""Safetensors files: tensors with a checksum, and all fields of predictions."""

import json
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedlas.errors import UserError
from fedlas.extras import optional_module
from fedlas.io.columns import ReadOptions
from fedlas.io.table import Table
from fedlas.io.untrusted import file_errors
from fedlas.predictions import AnyPredictions, Predictions
from fedlas.progress import Progress

FORMAT = "fedlas.predictions/1"
# Key of a CRC-32 in the metadata of a file. It detects every flipped bit, as a SHA-256 would, in a third of the time;
# neither stops somebody who can write a new checksum.
CHECKSUM = "fedlas.crc32"
TEXTS = ("class_names", "ids", "paths")  # fields of predictions that are stored as JSON


def read(path: Path, options: ReadOptions, progress: Progress | None = None) -> Table:
    """Read the tensors and texts of a safetensors file of predictions, or of one that another tool wrote."""
    del options, progress
    texts, tensors = read_safetensors(path)
    kind = texts.get("format", "")
    if kind.startswith('"fedlas.') and kind != json.dumps(FORMAT):
        raise UserError(f"{path} holds no predictions: it is a file of another kind ({kind[:80]})")
    with file_errors(path):
        fields = {name: json.loads(text) for name, text in texts.items()} if kind == json.dumps(FORMAT) else {}
    columns = dict(tensors) | {name: fields[name] for name in TEXTS if fields.get(name) is not None}
    return Table(columns, fields.get("split"), metadata=fields.get("metadata"))


def encode(predictions: AnyPredictions, probs: bool) -> bytes:
    """Return the content of a safetensors file, with probabilities or logits."""
    if isinstance(predictions, Predictions):
        tensors: dict[str, Any] = {"probs": predictions.probs} if probs else {"logits": predictions.logits}
        tensors["features"] = predictions.features
    else:
        tensors = {name: getattr(predictions, name) for name in ("confidence", "correct", "prediction")}
    tensors |= {"labels": predictions.given_labels, "index": predictions.index}
    texts = {"format": FORMAT, "class_names": predictions.class_names, "split": predictions.split}
    texts |= {name: value for name in (*TEXTS, "metadata") if (value := getattr(predictions, name)) is not None}
    return to_safetensors(
        {name: json.dumps(value) for name, value in texts.items()},
        {name: tensor for name, tensor in tensors.items() if tensor is not None},
    )


def read_safetensors(path: str | Path) -> tuple[dict[str, str], dict[str, Tensor]]:
    """Return the texts (metadata) and tensors of a safetensors file; raise if it has another checksum."""
    safe_open = optional_module("safetensors").safe_open
    with file_errors(path), safe_open(str(path), framework="pt") as file:
        texts, tensors = file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    written = texts.pop(CHECKSUM, None)  # older files, and those of other tools, have none
    if written is not None and written != _checksum(texts, tensors):
        raise UserError(f"{path} is damaged: its content does not have the checksum that was written with it")
    return texts, tensors


def to_safetensors(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> bytes:
    """Return the content of a safetensors file with its checksum; equal contents make equal bytes."""
    content = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {**texts, CHECKSUM: _checksum(texts, content)}
    return _sort_metadata(optional_module("safetensors.torch").save(content, metadata=metadata))


def _sort_metadata(content: bytes) -> bytes:
    """Sort the metadata of a safetensors file, which the library writes in random order."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # tensors begin at a multiple of 8
    return len(text).to_bytes(8, "little") + text + content[end:]


def _checksum(texts: Mapping[str, str], tensors: Mapping[str, Tensor]) -> str:
    """Return the CRC-32 of texts and tensors, whatever their order."""
    shapes = [(name, str(tensors[name].dtype), tuple(tensors[name].shape)) for name in sorted(tensors)]
    checksum = zlib.crc32(json.dumps([sorted(texts.items()), shapes]).encode())
    for name in sorted(tensors):
        checksum = zlib.crc32(tensors[name].reshape(-1).view(torch.uint8).numpy().data, checksum)
    return f"{checksum:08x}"
