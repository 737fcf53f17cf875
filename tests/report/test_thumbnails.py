"""Thumbnails of samples: small, without metadata, and only of valid image arrays."""

import base64
import io

import numpy as np
import pytest
import torch

from fedlas.report.thumbnails import SIDE, picture_of, pixels

images = pytest.importorskip("PIL.Image")


def decode_image(data_url: str) -> images.Image:
    head, _, content = data_url.partition(",")
    assert head in {"data:image/png;base64", "data:image/jpeg;base64"}
    return images.open(io.BytesIO(base64.b64decode(content)))


def test_small_arrays_keep_every_pixel():
    array = torch.randint(0, 256, (8, 9, 3), dtype=torch.uint8)
    assert np.array_equal(np.asarray(decode_image(picture_of(array))), array.numpy())
    floats = array.double() / 255
    assert np.array_equal(np.asarray(decode_image(picture_of(floats.permute(2, 0, 1)))), array.numpy())
    grey = np.asarray(decode_image(picture_of(array[:, :, :1])))
    assert np.array_equal(grey[:, :, 0], array[:, :, 0].numpy())


def test_large_images_are_downscaled():
    thumbnail = decode_image(picture_of(np.zeros((1000, 400, 3), dtype=np.uint8)))
    assert max(thumbnail.size) == SIDE
    assert thumbnail.format == "JPEG"


@pytest.mark.parametrize(
    ("array", "error", "message"),
    [
        (torch.randn(3, 4, 4), ValueError, r"0\.\.1"),
        (torch.full((3, 4, 4), torch.nan), ValueError, r"0\.\.1"),
        (torch.zeros(4, 4, dtype=torch.int64), TypeError, "uint8"),
        (torch.zeros(2, 3, 4, 4), ValueError, "shape"),
        (torch.zeros(5, 4, 7), ValueError, "shape"),
        (torch.zeros(0, 4, dtype=torch.uint8), ValueError, "shape"),
    ],
)
def test_arrays_that_are_not_images_raise(array, error, message):
    with pytest.raises(error, match=message):
        pixels(array)


def test_thumbnails_drop_file_metadata(tmp_path):
    """File metadata must not get into the page."""
    path = tmp_path / "a.png"
    from PIL.PngImagePlugin import PngInfo

    secret = PngInfo()
    secret.add_text("secret", "hunter2")
    images.new("RGBA", (300, 200), (200, 10, 10, 128)).save(path, pnginfo=secret)
    data_url = picture_of(path)
    assert max(decode_image(data_url).size) == SIDE
    assert b"hunter2" not in base64.b64decode(data_url.partition(",")[2])
    (tmp_path / "b.jpg").write_bytes((tmp_path / "a.png").read_bytes()[:40])
    with pytest.raises(OSError, match=r"identify|truncated|broken"):
        picture_of(tmp_path / "b.jpg")
    (tmp_path / "c.svg").write_text("<svg onload='x()'/>")
    with pytest.raises(OSError, match="identify"):
        picture_of(str(tmp_path / "c.svg"))
    for invalid_path in (tmp_path, tmp_path / "missing.png"):
        with pytest.raises(ValueError, match=invalid_path.name):
            picture_of(invalid_path)


def test_huge_image_is_not_decoded(tmp_path, monkeypatch):
    path = tmp_path / "a.png"
    images.new("L", (200, 200)).save(path)
    monkeypatch.setattr("fedlas.report.thumbnails.MOST_PIXELS", 10_000)
    with pytest.raises(ValueError, match="200 x 200"):
        picture_of(path)
