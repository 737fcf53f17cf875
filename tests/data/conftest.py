"""Prevent tests of data sets from accessing the network."""

import urllib.request

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    urlopen = urllib.request.urlopen

    def open_local_url(request, *args, **kwargs):
        assert request.host.startswith("127.0.0.1"), f"a test requested {request.full_url}"
        return urlopen(request, *args, **kwargs)

    monkeypatch.setattr(urllib.request, "urlopen", open_local_url)
    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "root"))
    monkeypatch.setattr("fedlas.data.fashion_mnist.FashionMNIST.folders", ("fashion-mnist", "FashionMNIST/raw"))
