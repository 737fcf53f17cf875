"""Safetensors files of predictions: everything is read as it was written, and damage is detected."""

import json

import pytest
import torch

from fedlas.io import read_predictions, write_predictions
from fedlas.predictions import Predictions

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def everything(probs: bool) -> Predictions:
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
    known = everything(probs)
    write_predictions(known, tmp_path / "deep" / "p.safetensors")
    back = read_predictions(tmp_path / "deep" / "p.safetensors")
    for name in ("logits", "labels", "features", "index", "probs"):
        assert torch.equal(getattr(back, name), getattr(known, name)), name
    assert (back.class_names, back.split) == (known.class_names, known.split)
    assert [file.name for file in (tmp_path / "deep").iterdir()] == ["p.safetensors"]


def test_load_keeps_half_precision(tmp_path):
    write_predictions(Predictions(LOGITS.bfloat16(), LABELS), tmp_path / "p.safetensors")
    assert read_predictions(tmp_path / "p.safetensors").logits.dtype == torch.bfloat16


def test_files_of_other_programs_are_read_or_raise(tmp_path):
    from safetensors.torch import save_file

    save_file({"logits": LOGITS, "labels": LABELS}, tmp_path / "p.safetensors", metadata={"format": "pt"})
    assert read_predictions(tmp_path / "p.safetensors").logits.tolist() == LOGITS.tolist()


def test_equal_predictions_give_equal_bytes(tmp_path):
    given = Predictions(torch.eye(3), [0, 1, 2], class_names=("a", "b", "ä"), split="test", index=[5, 6, 7])
    written = set()
    for number in range(8):  # the order of words in the file is drawn anew each time that one is made
        write_predictions(given, tmp_path / f"{number}.safetensors")
        written.add((tmp_path / f"{number}.safetensors").read_bytes())
    assert len(written) == 1
    assert read_predictions(tmp_path / "0.safetensors").class_names == ("a", "b", "ä")


def head_of(content: bytes) -> int:
    return 8 + int.from_bytes(content[:8], "little")


@pytest.mark.parametrize("probs", [False, True])
def test_every_flipped_bit_is_detected(tmp_path, probs):
    """Regression: flipped bits in logits or class names were not detected."""
    given, path = everything(probs), tmp_path / "p.safetensors"
    write_predictions(given, path)
    whole = path.read_bytes()
    words = [whole.index(word) for word in (b"val", b"fedlas.predictions", b"class_names")]
    for place in [*words, *range(head_of(whole), len(whole))]:
        for bit in (0, 7) if place not in words else (0,):
            content = bytearray(whole)
            content[place] ^= 1 << bit
            path.write_bytes(content)
            with pytest.raises(ValueError, match=r"p\.safetensors"):
                read_predictions(path)


def test_files_without_a_checksum_are_read(tmp_path):
    write_predictions(everything(False), tmp_path / "p.safetensors")
    whole = (tmp_path / "p.safetensors").read_bytes()
    head = json.loads(whole[8 : head_of(whole)])
    del head["__metadata__"]["fedlas.crc32"]  # as they were written before there was one
    text = json.dumps(head).encode()
    content = len(text).to_bytes(8, "little") + text + whole[head_of(whole) :]
    (tmp_path / "p.safetensors").write_bytes(content)
    back = read_predictions(tmp_path / "p.safetensors")
    assert (back.logits.tolist(), back.split) == (LOGITS.tolist(), "val")
