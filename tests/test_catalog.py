"""Catalogues of a folder: discovery of entries, building, and errors."""

import json
import os
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import numpy as np
import pytest

import fedlas
from fedlas.catalog import Catalog, _wrong_type, keywords, nearest
from fedlas.posthoc import build_calibrator

BASE = """
    from abc import ABC, abstractmethod

    class AbstractThing(ABC):
        name: str

        def __init__(self, *, size=1):
            self.size = size

        @abstractmethod
        def use(self): ...
"""
ENTRY = """
    from {package}.base import AbstractThing

    class {cls}(AbstractThing):
        {line}

        def __init__(self, *, width=2, **rest):
            super().__init__(**rest)
            self.width = width

        def use(self):
            return self.width
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """An empty catalogue folder with only its base, importable as a package."""
    package_folder = tmp_path / "things"
    package_folder.mkdir()
    (package_folder / "__init__.py").touch()
    (package_folder / "base.py").write_text(textwrap.dedent(BASE))
    monkeypatch.syspath_prepend(tmp_path)
    yield package_folder
    for name in [name for name in sys.modules if name.split(".")[0] == package_folder.name]:
        del sys.modules[name]


def add(folder, file, cls, line):
    text = textwrap.dedent(ENTRY).format(package=folder.name, cls=cls, line=line)
    (folder / f"{file}.py").write_text(text)


def catalog(folder):
    from things.base import AbstractThing

    return Catalog(folder.name, AbstractThing, "thing")


def test_a_folder_without_entries_is_an_empty_catalogue(folder):
    assert catalog(folder).entries == {}


def test_entries_are_found_in_the_order_of_their_names(folder):
    add(folder, "first", "Zebra", 'name = "zebra"')
    add(folder, "second", "Ant", 'name = "ant"')
    entries = catalog(folder).entries
    assert list(entries) == ["ant", "zebra"]
    assert [cls.__name__ for cls in entries.values()] == ["Ant", "Zebra"]


def test_one_file_may_define_two_entries(folder):
    add(folder, "both", "Ant", 'name = "ant"')
    with (folder / "both.py").open("a") as file:
        file.write("\n\nclass Bee(AbstractThing):\n    name = 'bee'\n    use = None\n")
    assert list(catalog(folder).entries) == ["ant", "bee"]


def test_imported_abstract_and_unrelated_classes_are_not_listed(folder):
    add(folder, "ant", "Ant", 'name = "ant"')
    (folder / "rest.py").write_text(
        textwrap.dedent("""
            from things.ant import Ant
            from things.base import AbstractThing

            class AbstractSwarm(AbstractThing):
                def use(self): ...

            class Unfinished(AbstractThing): ...

            class Other:
                name = "other"
        """)
    )
    assert list(catalog(folder).entries) == ["ant"]


def test_duplicate_entry_names_raise_with_both_files(folder):
    add(folder, "first", "Ant", 'name = "ant"')
    add(folder, "second", "Emmet", 'name = "ant"')
    with pytest.raises(TypeError, match=r"'ant'.*things\.first.*things\.second"):
        _ = catalog(folder).entries


@pytest.mark.parametrize("line", ["pass", 'name = ""'])
def test_entry_without_a_name_raises(folder, line):
    add(folder, "ant", "Ant", line)
    with pytest.raises(TypeError, match=r"things\.ant\.Ant.*`name`"):
        _ = catalog(folder).entries


def test_unknown_name_raises_with_a_suggestion_and_all_names(folder):
    add(folder, "ant", "Ant", 'name = "ant"')
    add(folder, "zebra", "Zebra", 'name = "zebra"')
    with pytest.raises(ValueError, match=r"thing.*'zebbra'.*'zebra'.*ant, zebra"):
        catalog(folder).find("zebbra")


def test_build_passes_keywords_to_the_class(folder):
    add(folder, "ant", "Ant", 'name = "ant"')
    ant = catalog(folder).build("ant", width=5, size=7)
    assert (type(ant).__name__, ant.width, ant.size) == ("Ant", 5, 7)


def test_unknown_keyword_raises_with_a_suggestion_and_all_keywords(folder):
    add(folder, "ant", "Ant", 'name = "ant"')
    with pytest.raises(TypeError, match=r"thing.*'ant'.*'widht'.*'width'.*width, size"):
        catalog(folder).build("ant", widht=5)


def test_keywords_of_base_classes_are_listed_only_if_passed_on():
    class Top:
        def __init__(self, a, *, b=1): ...

    class Middle(Top):
        def __init__(self, *, c=2, **kwargs): ...

    class Shut(Middle):
        def __init__(self, *, d=3): ...

    assert keywords(Top) == ["a", "b"]
    assert keywords(Middle) == ["c", "a", "b"]
    assert keywords(Shut) == ["d"]


def test_public_packages_are_attributes_that_are_looked_up_once():
    """Regression: `import fedlas; fedlas.io.read_predictions` raised."""
    code = """
import fedlas
for name in ("io", "integrations", "read_predictions"):
    assert name in dir(fedlas) and name not in vars(fedlas), name
fedlas.integrations, fedlas.read_predictions
assert vars(fedlas)["read_predictions"] is fedlas.io.read_predictions
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_suggestion_is_given_only_for_similar_names():
    assert re.search("'focal'.*ce, focal", nearest("foccal", ["ce", "focal"]))
    assert re.search("^[a-z][^']*ce, focal", nearest("xyzzy", ["ce", "focal"]))  # continues a sentence


@pytest.mark.parametrize(
    ("build", "full_name", "name"),
    [
        (fedlas.build_loss, "CrossEntropyLoss", "ce"),
        (fedlas.build_loss, "cross_entropy", "ce"),
        (fedlas.build_loss, "focal_loss", "focal"),
        (fedlas.build_loss, "label_smoothing", "ls"),
        (fedlas.build_loss, "margin_based_label_smoothing", "mbls"),
        (build_calibrator, "platt_scaling", "platt"),
        (build_calibrator, "temperature_scaling", "temperature"),
    ],
)
def test_a_full_name_suggests_the_catalogue_name(build, full_name, name):
    with pytest.raises(ValueError, match=f"{full_name!r}; did you mean {name!r}"):
        build(full_name)


def test_new_loss_file_in_the_package_is_listed_and_built(tmp_path):
    package = tmp_path / "fedlas"
    shutil.copytree(Path(__file__).parents[1] / "src" / "fedlas", package)
    (package / "losses" / "brand_new.py").write_text(
        textwrap.dedent('''
            """A loss that nobody has heard of."""

            from torch import Tensor

            from fedlas.losses.base import AbstractLoss, Batch


            class BrandNew(AbstractLoss):
                """Ask for nothing but large logits."""

                name = "brand_new"
                citation = "nobody, never"

                def terms(self, batch: Batch) -> dict[str, Tensor]:
                    return {"classification": -batch.logits.sum(1)}
        ''')
    )
    code = """
        import json, torch, fedlas
        value = fedlas.build_loss("brand_new", num_classes=3)(torch.ones(2, 3), torch.tensor([0, 1]))
        listed = {record.name: record.summary for record in fedlas.list_losses()}
        print(json.dumps([fedlas.__file__, value.item(), listed.get("brand_new"), len(listed)]))
    """
    run = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        stdout=subprocess.PIPE,
        check=True,
    )
    file, value, summary, count = json.loads(run.stdout)
    assert Path(file).parent == package
    assert value == -3.0
    assert summary == "Ask for nothing but large logits."
    assert count > 1


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: fedlas.build_loss("focal", gamma=True), "gamma.*loss.*'focal'.*number.*True"),
        (lambda: fedlas.build_loss("ce", sync="maybe"), "sync.*loss.*'ce'.*true.*'maybe'"),
        (lambda: fedlas.build_data("digits", train_samples=1.5), r"train_samples.*'digits'.*1\.5"),
        (lambda: fedlas.build_data("digits", label_noise="abc"), "label_noise.*'digits'.*number.*'abc'"),
        (lambda: fedlas.build_data("folder", path=".", image_size="a"), "image_size.*'folder'.*'a'"),
        (lambda: fedlas.build_data("folder", path=".", image_size=None), "image_size.*'folder'.*None"),
        (lambda: fedlas.build_data("folder"), "'folder'.*path="),
    ],
)
def test_keywords_of_wrong_type_and_missing_keywords_raise(build, message):
    """Regression: `gamma=true` was accepted as 1, and 1.5 samples as 1."""
    with pytest.raises((TypeError, ValueError), match=message):
        build()


def test_numpy_scalars_are_accepted_as_numbers():
    assert _wrong_type(np.float32(2), float) is None
    assert _wrong_type(np.int64(7), int | None) is None
    assert _wrong_type(np.float32(2), int | None) is not None
