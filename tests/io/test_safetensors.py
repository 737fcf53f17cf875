"""Safetensors files of predictions: everything is read as it was written, and damage is detected."""

import json

import pytest
import torch

from fedlas.io import read_predictions, write_predictions
from fedlas.predictions import Predictions

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def full_predictions(probs: bool) -> Predictions:
    options = {
        "features": torch.randn(2, 4),
        "index": torch.tensor([7, 1]),
        "class_names": ["<b>", "ünï", ""],
        "split": "val",
    }
    if probs:
        return Predictions.from_probs(LOGITS.softmax(1), torch.tensor([[0.5, 0.5, 0.0], [0.0, 0.0, 1.0]]), **options)
    return Predictions(LOGITS, LABELS, **options)


@pytest.mark.parametrize("probs", [False, True])
def test_predictions_round_trip_through_safetensors(tmp_path, probs):
    predictions = full_predictions(probs)
    write_predictions(predictions, tmp_path / "deep" / "p.safetensors")
    loaded = read_predictions(tmp_path / "deep" / "p.safetensors")
    for name in ("logits", "labels", "features", "index", "probs"):
        assert torch.equal(getattr(loaded, name), getattr(predictions, name)), name
    assert (loaded.class_names, loaded.split) == (predictions.class_names, predictions.split)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["p.safetensors"]


def test_files_of_other_programs_are_read_or_raise(tmp_path):
    from safetensors.torch import save_file

    save_file({"logits": LOGITS, "labels": LABELS}, tmp_path / "p.safetensors", metadata={"format": "pt"})
    assert read_predictions(tmp_path / "p.safetensors").logits.tolist() == LOGITS.tolist()


def test_equal_predictions_give_equal_bytes(tmp_path):
    predictions = Predictions(torch.eye(3), [0, 1, 2], class_names=("a", "b", "ä"), split="test", index=[5, 6, 7])
    written = set()
    for number in range(8):  # safetensors orders the metadata of each file at random
        write_predictions(predictions, tmp_path / f"{number}.safetensors")
        written.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(written) == 1
    assert read_predictions(tmp_path / "0.safetensors").class_names == ("a", "b", "ä")


def header_size(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("probs", [False, True])
def test_every_flipped_bit_is_detected(tmp_path, probs):
    """Regression: flipped bits in logits or class names were not detected."""
    predictions, path = full_predictions(probs), tmp_path / "p.safetensors"
    write_predictions(predictions, path)
    original = path.read_bytes()
    text_offsets = [original.index(text) for text in (b"val", b"fedlas.predictions", b"class_names")]
    for offset in [*text_offsets, *range(header_size(original), len(original))]:
        for bit in (0, 7) if offset not in text_offsets else (0,):
            damaged = bytearray(original)
            damaged[offset] ^= 1 << bit
            path.write_bytes(damaged)
            with pytest.raises(ValueError, match=r"p\.safetensors"):
                read_predictions(path)


def test_files_without_a_checksum_are_read(tmp_path):
    write_predictions(full_predictions(False), tmp_path / "p.safetensors")
    original = (tmp_path / "p.safetensors").read_bytes()
    header = json.loads(original[8 : header_size(original)])
    del header["__metadata__"]["fedlas.crc32"]  # as in files that were written before checksums existed
    header_bytes = json.dumps(header).encode()
    content = len(header_bytes).to_bytes(8, "little") + header_bytes + original[header_size(original) :]
    (tmp_path / "p.safetensors").write_bytes(content)
    loaded = read_predictions(tmp_path / "p.safetensors")
    assert (loaded.logits.tolist(), loaded.split) == (LOGITS.tolist(), "val")
