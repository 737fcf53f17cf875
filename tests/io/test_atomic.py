"""Atomic writes."""

import os
import threading
from pathlib import Path

import pytest
import torch

from fedlas.io import write_predictions
from fedlas.io.atomic import write_atomic
from fedlas.predictions import Predictions

LOGITS = torch.tensor([[2.0, 0.0, -1.0], [0.0, 0.0, 3.0]])
LABELS = torch.tensor([0, 1])


def test_a_failed_write_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "p.safetensors"
    write_predictions(Predictions(LOGITS, LABELS), path)
    before = path.read_bytes()

    def fail(_: int) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        write_predictions(Predictions(-LOGITS, LABELS), path)
    assert path.read_bytes() == before
    assert [file.name for file in tmp_path.iterdir()] == ["p.safetensors"]


def test_file_is_fsynced_before_it_is_renamed(tmp_path, monkeypatch):
    steps = []
    original_fsync, original_replace = os.fsync, Path.replace
    monkeypatch.setattr(os, "fsync", lambda fd: (steps.append("fsync"), original_fsync(fd))[1])
    monkeypatch.setattr(Path, "replace", lambda a, b: (steps.append("rename"), original_replace(a, b))[1])
    write_atomic(tmp_path / "x", b"abc")
    assert steps == ["fsync", "rename"]
    assert (tmp_path / "x").read_bytes() == b"abc"


def test_hard_link_left_by_a_killed_write_is_removed(tmp_path):
    """Regression: a kill between two renames left a second name of the file forever."""
    path, backup = tmp_path / "x", tmp_path / "before"
    path.write_bytes(b"old")
    backup.hardlink_to(path)
    write_atomic(path, b"new", backup=backup)
    assert {file.name: file.read_bytes() for file in tmp_path.iterdir()} == {"x": b"new", "before": b"old"}


def test_atomic_write_preserves_symlinks_pipes_and_permissions(tmp_path):
    """Regression: writing to /dev/null as root replaced it by a regular file."""
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "real").chmod(0o600)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    write_atomic(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    assert (tmp_path / "real").stat().st_mode & 0o777 == 0o600
    os.mkfifo(tmp_path / "pipe")
    received = []
    reader = threading.Thread(target=lambda: received.append((tmp_path / "pipe").read_bytes()))
    reader.start()
    write_atomic(tmp_path / "pipe", b"through")
    reader.join(10)
    assert received == [b"through"]
    assert (tmp_path / "pipe").is_fifo()
    with pytest.raises(IsADirectoryError):
        write_atomic(tmp_path, b"x")
    assert {path.name for path in tmp_path.iterdir()} == {"real", "link", "pipe"}
