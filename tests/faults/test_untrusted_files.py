"""Untrusted files: the campaign, calls that could unpickle, and regression tests."""

import ast
import gzip
import http.server
import io
import json
import os
import pickle
import re
import shutil
import ssl
import subprocess
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
import untrusted_files

import fedlas
from fedlas.data import DamagedFileError, MissingFileError
from fedlas.data.base import fetching
from fedlas.data.base.fetching import Source, checked_bytes, digest_of, fetch
from fedlas.data.base.formats import read_idx
from fedlas.data.base.images import decode
from fedlas.data.loading import Loader
from fedlas.evaluation_report import Report
from fedlas.experiments.ledger import Ledger
from fedlas.experiments.scheduler import FailedRunsError, train_recipes
from fedlas.experiments.stored_predictions import StoredPredictions
from fedlas.integrations.export import load_program
from fedlas.integrations.official import read_official
from fedlas.io.untrusted import content_errors, file_errors
from fedlas.models.pretrained import Source as Weights
from fedlas.models.pretrained import read_weights
from fedlas.training import checkpoint
from fedlas.training.predict_run import predict_with
from fedlas.training.run_folder import Run, RunError

SOURCE = Path(fedlas.__file__).parent


def test_no_call_allows_unpickling():
    """The linter bans modules and functions that unpickle (`banned-api` in pyproject.toml, and rules S)."""
    calls = [ast.unparse(call) for path in SOURCE.rglob("*.py") for call in ast.walk(ast.parse(path.read_bytes()))
             if isinstance(call, ast.Call)]  # fmt: skip
    loads = [call for call in calls if re.match(r"(torch|np)\.load\(", call)]
    assert len(loads) >= 4
    for call in loads:
        assert re.search(r"weights_only=True|allow_pickle=False", call), call
    assert [call for call in calls if re.search(r"weights_only=(?!True)|allow_pickle=(?!False)", call)] == []


@pytest.mark.campaign
def test_untrusted_files_have_no_effect(tmp_path):
    """Every kind of file and every fault."""
    records = untrusted_files.campaign(tmp_path / "campaign", copies=4, bomb_bytes=2**29)
    assert len({record["kind"] for record in records}) == len(untrusted_files.readers())
    assert [record for record in records if record["outcome"] == "BAD"] == []
    assert [record for record in records if record["what"] == "sound" and record["outcome"] != "read"] == []


@pytest.mark.campaign
def test_the_payload_is_detected_when_unpickled(tmp_path):
    """The payload must create its file when unpickled, or the campaign could not detect anything."""
    pickle.loads(pickle.dumps(untrusted_files.Payload(tmp_path / "ran")))
    assert (tmp_path / "ran").exists()


# What the campaign found


def test_a_zip_bomb_raises(tmp_path):
    np.savez_compressed(tmp_path / "p.npz", logits=np.zeros((40_000_000, 1)), labels=np.zeros(1, np.int64))
    with pytest.raises(ValueError, match=r"p\.npz.*320,000,\d+"):
        fedlas.read_predictions(tmp_path / "p.npz")


def test_a_tensor_that_is_longer_than_its_file_raises(tmp_path):
    torch.save({"logits": torch.zeros(1).expand(10**6, 10**6), "labels": torch.zeros(1)}, tmp_path / "p.pt")
    with pytest.raises(ValueError, match=r"p\.pt.*4,000,000,"):
        fedlas.read_predictions(tmp_path / "p.pt")


def test_parquet_size_is_checked_before_rows_are_decoded(tmp_path):
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"logit_a": np.zeros(2**20), "logit_b": np.zeros(2**20), "label": np.zeros(2**20, np.int64)})
    with parquet.ParquetWriter(tmp_path / "p.parquet", table.schema) as writer:
        for _ in range(12):
            writer.write_table(table)
    with pytest.raises(ValueError, match=r"p\.parquet.* \d{3},\d{3},\d{3}"):
        fedlas.read_predictions(tmp_path / "p.parquet")


def test_header_of_many_columns_is_parsed_in_linear_time(tmp_path):
    """Regression: the search for duplicate names was quadratic; a million columns took hours."""
    path = tmp_path / "p.csv"
    path.write_text(",".join(f"w{i}" for i in range(20_000)) + "\n")
    with pytest.raises(ValueError, match=r"w19999.*20,000"):
        fedlas.read_predictions(path)
    path.write_text(",".join(["logit_a"] * 20_000) + "\n")
    with pytest.raises(ValueError, match=r"20000.*'logit_a'"):
        fedlas.read_predictions(path)


@pytest.mark.parametrize("suffix", [".csv", ".npz", ".json", ".pt"])
def test_device_file_raises(tmp_path, suffix):
    (tmp_path / f"p{suffix}").symlink_to("/dev/zero")
    with pytest.raises(ValueError, match="device"):
        fedlas.read_predictions(tmp_path / f"p{suffix}")


@pytest.mark.parametrize(
    "read",
    [fedlas.read_predictions, fedlas.load_calibrator, read_weights, read_official, Report.load, load_program, read_idx,
     checkpoint.load, lambda path: digest_of(path, "md5"), lambda path: checked_bytes(path, None)],
)  # fmt: skip
@pytest.mark.parametrize(("kind", "suffix"), [("pipe", ".csv"), ("device", ".csv"), ("pipe", ".safetensors")])
def test_pipes_and_devices_are_not_read(tmp_path, read, kind, suffix):
    """Reading a pipe would block, and /dev/zero would fill the memory."""
    path = tmp_path / f"f{suffix}"
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/null")
    with pytest.raises(ValueError, match=rf"f\{suffix}.*{kind}"):
        read(path)


def torch_out_of_memory_error():
    """What torch raises where there is no memory, in one of its wordings."""
    with pytest.raises(RuntimeError) as error_info:
        torch.empty(2**60, dtype=torch.uint8)
    return error_info.value


OTHER_MESSAGE = RuntimeError(
    "[enforce fail at alloc.cpp:9] err == 0. DefaultCPUAllocator: can't allocate memory: 9 bytes."
)


@pytest.mark.parametrize(
    "error", [MemoryError(), torch_out_of_memory_error(), OTHER_MESSAGE], ids=["python", "torch", "other"]
)
def test_out_of_memory_is_not_reported_as_a_damaged_file(tmp_path, error):
    """Also if torch reports it as a RuntimeError."""
    for guard in (file_errors, content_errors):
        with pytest.raises(MemoryError), guard(tmp_path / "p.npz"):
            raise error
    torch.save({"a": torch.ones(1)}, tmp_path / "p.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "load", lambda *_, **__: (_ for _ in ()).throw(error))
        for read in (fedlas.read_predictions, read_weights, read_official, checkpoint.load):
            with pytest.raises(MemoryError):
                read(tmp_path / "p.pt")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.Module, "load_state_dict", lambda *_, **__: (_ for _ in ()).throw(error))
        with pytest.raises(MemoryError):
            checkpoint.restore_module(torch.nn.Linear(1, 1), {})


def test_array_with_a_huge_declared_shape_allocates_nothing(tmp_path):
    """Regression: numpy allocated the memory first, and the MemoryError was reported as damage."""
    content = io.BytesIO()
    np.lib.format.write_array(content, np.zeros(3))
    misdeclared = untrusted_files.zip_of({"logits.npy": content.getvalue().replace(b"(3,), ", b"(100000000000,), ")})
    (tmp_path / "p.npz").write_bytes(misdeclared)
    with pytest.raises(ValueError, match=r"p\.npz.*logits\.npy.*100000000000"):
        fedlas.read_predictions(tmp_path / "p.npz")
    with pytest.raises(ValueError, match=r"logits\.npy.*100000000000"):
        StoredPredictions.unpack(misdeclared)


DEEP = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    ("name", "content"),
    [("p.jsonl", DEEP), ("p.json", DEEP), ("p.json", '{"logits": [[%s, 1]], "labels": [0]}' % ("9" * 400)),
     ("p.jsonl", '{"logits": [1.0, 2.0], "label": %s}' % ("9" * 400)),
     ("p.json", '{"logits": [[1.0, 2.0]], "labels": [0], "index": ["a"]}')],
)  # fmt: skip
def test_json_that_the_parser_cannot_handle_raises_with_its_name(tmp_path, name, content):
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=name):
        fedlas.read_predictions(tmp_path / name)


def test_deeply_nested_reports_recipes_and_ledgers_raise_with_their_names(tmp_path):
    for name, read, error in (
        ("report.json", Report.load, ValueError),
        ("recipe.json", lambda path: Run(path.parent).recipe, RunError),
        ("ledger.jsonl", lambda path: Ledger(path.parent).lines, ValueError),
    ):
        (tmp_path / name).write_text(DEEP)
        with pytest.raises(error, match=name):
            read(tmp_path / name)
    (tmp_path / "ledger.jsonl").write_bytes("{}".encode("utf-16"))
    with pytest.raises(ValueError, match=r"ledger\.jsonl.*UTF-8"):
        _ = Ledger(tmp_path).lines


@pytest.mark.parametrize(
    "metadata", [{"name": '"os.system"'}, {"name": '"temperature"', "options": "[1]"}, {"name": DEEP}]
)
def test_a_calibrator_with_invalid_metadata_raises(tmp_path, metadata):
    safetensors = pytest.importorskip("safetensors.torch")
    path = tmp_path / "c.safetensors"
    path.write_bytes(safetensors.save({"t": torch.ones(1)}, metadata={"format": '"fedlas.calibrator/1"', **metadata}))
    with pytest.raises(ValueError, match=r"c\.safetensors"):
        fedlas.load_calibrator(path)


def test_damaged_stored_predictions_raise():
    valid = StoredPredictions({"labels": np.zeros(2, np.uint8), "logits": np.zeros((2, 2), np.float16)}).pack()
    messages = []
    for position in range(0, len(valid), 7):
        content = bytearray(valid)
        content[position] ^= 255
        try:
            StoredPredictions.unpack(bytes(content), "x.npz")
        except ValueError as error:  # any other error fails the test
            messages.append(str(error))
    assert messages
    assert all("x.npz" in message for message in messages)


def test_symlink_cannot_escape_the_ledger(tmp_path):
    folder = tmp_path / "results"
    (folder / "predictions").mkdir(parents=True)
    ledger_file = untrusted_files.write_valid_files(tmp_path / "sound")["ledger"]
    (folder / ledger_file.name).write_text(ledger_file.read_text())
    line = next(iter(Ledger(folder).lines.values()))
    assert Ledger(folder).file_of(line).is_relative_to(folder)
    (tmp_path / "mine.txt").write_text("mine")
    (folder / line.predictions["file"]).symlink_to(tmp_path / "mine.txt")
    with pytest.raises(ValueError, match="link"):
        Ledger(folder).file_of(line)


@pytest.mark.parametrize("kind", ["link", "dangling link", "pipe"])
@pytest.mark.parametrize("part", ["lines", "lock", "predictions"])
def test_links_and_pipes_in_a_ledger_raise(tmp_path, part, kind):
    line = untrusted_files.ledger_line(fedlas.Recipe(data="digits", model="small_cnn", loss="ce"))
    name = {"lines": "digits-x.jsonl", "lock": ".lock", "predictions": line.predictions["file"]}[part]
    path, target = tmp_path / "results" / name, tmp_path / "mine"
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to(target)
    if kind == "link":
        target.touch()
    with pytest.raises(ValueError, match=rf"{path.name}.*{kind.split()[-1]}"):
        Ledger(tmp_path / "results").add([line], b"content")
    assert not target.exists() or target.read_bytes() == b""
    assert target.exists() == (kind == "link")


def test_a_gzip_bomb_is_not_unpacked(tmp_path, monkeypatch):
    monkeypatch.setattr("fedlas.data.base.formats.LARGEST_IDX", 10_000)
    (tmp_path / "images.gz").write_bytes(gzip.compress(bytes(10_001)))
    with pytest.raises(DamagedFileError, match=r"images\.gz.*10,000"):
        read_idx(tmp_path / "images.gz")


def test_exported_program_is_not_unpickled(tmp_path):
    files = {"f/data/constants/opaque_obj_0": pickle.dumps(untrusted_files.Payload(tmp_path / "ran"))}
    (tmp_path / "p.pt2").write_bytes(untrusted_files.zip_of(files))
    with pytest.raises(ValueError, match=r"p\.pt2.*tensor"):
        load_program(tmp_path / "p.pt2")
    assert not (tmp_path / "ran").exists()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A small run that is finished."""
    return Run(untrusted_files.write_valid_files(tmp_path_factory.mktemp("campaign") / "sound")["checkpoint"].parent)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda state: {"format": state["format"], "step": 3, "weights": {"a": torch.ones(3)}}, "'model'"),
        (lambda state: {name: value for name, value in state.items() if name != "epoch"}, "'epoch'"),
        (lambda state: state | {"best": "x"}, "'best'.*dict"),
        (lambda state: state | {"optimizer": "x"}, "'optimizer'.*list"),
        (lambda state: state | {"epoch": 10**9}, "epoch 1000000000.*2"),
        (lambda state: state | {"best": {}}, "'best'.*'model'"),
    ],
)
def test_invalid_checkpoint_raises_in_predict_and_resume(trained, tmp_path, change, reason):
    run = Run(shutil.copytree(trained.folder, tmp_path / "run", ignore=lambda *_: ["predictions"]))
    torch.save(change(torch.load(run.checkpoint, weights_only=True)), run.checkpoint)
    message = rf"checkpoint\.pt.*{reason}"
    with pytest.raises(RunError, match=message):
        predict_with(run.folder, "digits", out=tmp_path / "p.safetensors")
    with pytest.raises(RunError, match=message):
        fedlas.fit(run.recipe, out=run.folder, resume=True)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"epoch": 1, "position": 10**6, "best_epoch": 1}, "step 1000000.*2.*epoch 2.*2"),
        ({"epoch": 1, "position": 1, "best_epoch": 1}, "4.*step 3"),
        ({"random": [{"torch": 5}]}, "random"),
    ],
)
def test_a_checkpoint_with_an_impossible_position_raises(trained, tmp_path, change, reason):
    run = Run(shutil.copytree(trained.folder, tmp_path / "run", ignore=lambda *_: ["predictions"]))
    torch.save(torch.load(run.checkpoint, weights_only=True) | change, run.checkpoint)
    with pytest.raises(RunError, match=rf"checkpoint\.pt.*{reason}"):
        fedlas.fit(run.recipe, out=run.folder, resume=True)


@pytest.mark.parametrize("line", ["5", "[]", "null", '"diverged"', '{"epoch": 1}\n5'])
def test_invalid_log_line_raises_with_its_number(trained, tmp_path, line):
    run = Run(shutil.copytree(trained.folder, tmp_path / "run", ignore=lambda *_: ["predictions"]))
    run.log_file.write_text(f"{line}\n")
    number = len(line.splitlines())
    with pytest.raises(RunError, match=rf"log\.jsonl.*line {number}\b"):
        fedlas.fit(run.recipe, out=run.folder, resume=True)
    with pytest.raises(RunError, match=r"log\.jsonl"):
        _ = run.finished


def test_damaged_log_fails_only_its_own_run(trained, tmp_path):
    valid_recipe, damaged_recipe = trained.recipe, trained.recipe.replace(seed=7)
    for recipe in (valid_recipe, damaged_recipe):
        shutil.copytree(trained.folder, tmp_path / recipe.name)
    damaged_run = Run(tmp_path / damaged_recipe.name)
    damaged_run.recipe_file.write_text(json.dumps(damaged_recipe.to_dict()))
    damaged_run.log_file.write_text("5\n")
    trained_runs = []
    with pytest.raises(FailedRunsError, match=rf"^1 .*{damaged_recipe.name}: .*log\.jsonl.*line 1\b"):
        trained_runs.extend(train_recipes([damaged_recipe, valid_recipe], folder=tmp_path, device="cpu"))
    assert [run.folder.name for run in trained_runs] == [valid_recipe.name]


@pytest.mark.parametrize(
    ("side", "reason"),
    [(20_000, "400000000 pixels"), (10_000, "10,000 x 10,000")],
)
def test_image_bomb_raises_without_a_warning(tmp_path, side, reason):
    for name in ("cat", "dog"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "1.png").write_bytes(untrusted_files.png_of(side))
    data = fedlas.build_data("folder", path=tmp_path, image_size=16)
    with pytest.raises(DamagedFileError, match=rf"cat/1\.png.*{reason}"):
        decode(tmp_path / "cat" / "1.png", data.transform)
    for workers in (0, 1):
        with pytest.raises(DamagedFileError, match=rf"cat/1\.png[^\n]*{reason}"):
            list(Loader(data.split("all"), data.transform, batch_size=2, train=False, workers=workers))


# Downloads


class RedirectHandler(http.server.BaseHTTPRequestHandler):
    """Redirects to a given address."""

    def do_GET(self):
        if self.path == "/a.bin":
            self.send_response(302)
            self.send_header("Location", self.server.leads_to)
            self.end_headers()
        else:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b"content")

    def log_message(self, *args):
        pass


def serve(server):
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
    return server


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A key and a certificate for localhost."""
    folder = tmp_path_factory.mktemp("tls")
    key, certificate = folder / "key.pem", folder / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out", certificate]
    command += ["-days", "1", "-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost"]
    try:
        subprocess.run(command, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("openssl is not installed")
    return certificate, key


@pytest.fixture
def secure(certificate, monkeypatch):
    """A server with TLS."""
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), RedirectHandler)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(*certificate)
    server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url, server.certificate = f"https://localhost:{server.server_port}", certificate[0]
    monkeypatch.setattr(fetching, "TRIES", 1)
    yield serve(server)
    server.shutdown()
    server.server_close()


MD5 = "9a0364b9e99bb480dd25e1f0284c8555"  # of the word "content"


def test_invalid_tls_certificate_raises(secure, tmp_path):
    with pytest.raises(MissingFileError, match=r"(?i)certificate"):
        fetch(Source((f"{secure.url}/b.bin",), MD5), tmp_path / "data")


def test_https_redirect_to_http_raises(secure, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
    plain_server = serve(http.server.ThreadingHTTPServer(("127.0.0.1", 0), RedirectHandler))
    secure.leads_to = f"http://127.0.0.1:{plain_server.server_port}/b.bin"
    with pytest.raises(MissingFileError, match="TLS"):
        fetch(Source((f"{secure.url}/a.bin",), MD5), tmp_path / "data")
    secure.leads_to = f"{secure.url}/b.bin"
    assert fetch(Source((f"{secure.url}/a.bin",), MD5), tmp_path / "data").read_bytes() == b"content"
    plain_server.shutdown()
    plain_server.server_close()


@pytest.mark.parametrize("name", [".b.bin.lock", "b.bin.part"])
def test_symlink_in_the_download_folder_raises(secure, tmp_path, monkeypatch, name):
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
    (tmp_path / "data").mkdir()
    (tmp_path / "mine").write_text("mine")
    (tmp_path / "data" / name).symlink_to(tmp_path / "mine")
    with pytest.raises(DamagedFileError, match=rf"{name}.*link"):
        fetch(Source((f"{secure.url}/b.bin",), MD5), tmp_path / "data")
    assert (tmp_path / "mine").read_text() == "mine"


def test_https_redirect_of_weights_to_http_raises(secure, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path / "torch"))
    plain_server = serve(http.server.ThreadingHTTPServer(("127.0.0.1", 0), RedirectHandler))
    secure.leads_to = f"http://127.0.0.1:{plain_server.server_port}/b.bin"
    with pytest.raises(OSError, match="TLS"):
        Weights(f"{secure.url}/a.bin", "net.pth").fetch()
    assert not list((tmp_path / "torch").rglob("*.pth"))
    secure.leads_to = f"{secure.url}/b.bin"
    assert Weights(f"{secure.url}/a.bin", "net.pth").fetch().read_bytes() == b"content"
    plain_server.shutdown()
    plain_server.server_close()


def test_wrong_checksum_over_https_raises(secure, tmp_path, monkeypatch):
    monkeypatch.setenv("SSL_CERT_FILE", str(secure.certificate))
    with pytest.raises(MissingFileError, match="MD5"):
        fetch(Source((f"{secure.url}/b.bin",), "0" * 32), tmp_path / "data")
    assert not list((tmp_path / "data").glob("b.bin*"))


def test_hostile_recipe_names_a_folder_below_the_runs_folder(tmp_path):
    recipe = fedlas.Recipe.from_dict(json.loads('{"data": "../../x", "model": "/etc", "loss": ".."}'))
    assert (tmp_path / recipe.name).resolve().is_relative_to(tmp_path.resolve())
