"""No test of the data room reaches a network other than this machine."""

import urllib.request

import pytest


@pytest.fixture(autouse=True)
def no_network(monkeypatch, tmp_path):
    ask = urllib.request.urlopen

    def only_here(request, *args, **kwargs):
        assert request.host.startswith("127.0.0.1"), f"a test asked {request.full_url}"
        return ask(request, *args, **kwargs)

    monkeypatch.setattr(urllib.request, "urlopen", only_here)
    monkeypatch.setenv("FEDLAS_DATA", str(tmp_path / "root"))
    monkeypatch.setattr("fedlas.data.fashion_mnist.FashionMNIST.folders", ("fashion-mnist", "FashionMNIST/raw"))
