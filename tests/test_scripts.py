"""Scripts, constraints and Makefile."""

import re
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

import fedlas

ROOT = Path(__file__).parents[1]
FILE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
PROJECT, BUILD = FILE["project"], FILE["build-system"]


def run(command, **options):
    return subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False, **options)


@pytest.fixture
def checkout(tmp_path):
    """Return a folder with a copy of the scripts."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    return tmp_path


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"x" * 1_048_577, "1 MiB"),
        (b"-----BEGIN RSA " + b"PRIVATE KEY-----", "private key"),
        (b"\x00-----BEGIN " + b"PRIVATE KEY-----", "private key"),
        (b"x" * 1_048_576, ""),
    ],
)
def test_guard_rejects_large_files_and_private_keys(tmp_path, content, message):
    file = tmp_path / "a file"
    file.write_bytes(content)
    result = run([ROOT / "scripts" / "guard", file])
    assert result.returncode == bool(message)
    assert message in result.stdout


def test_check_rejects_unknown_options():
    result = run([ROOT / "scripts" / "check", "--quick"])
    assert result.returncode == 2
    assert re.match("usage: scripts/check .*--all.*--fast.*--fix", result.stdout)


def test_check_stops_at_the_first_failing_stage(checkout):
    tools = checkout / ".venv" / "bin"
    tools.mkdir(parents=True)
    for tool, status in [("ruff", 0), ("mypy", 1), ("pytest", 0)]:
        (tools / tool).write_text(f"#!/bin/sh\necho {tool} ran\nexit {status}\n")
        (tools / tool).chmod(0o755)
    result = run([checkout / "scripts" / "check"])
    assert result.returncode == 1
    assert "scripts/check: types" in result.stdout
    assert "pytest ran" not in result.stdout


def test_constraints_file_contains_only_pinned_versions():
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line for line in lines if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.!]*", pin) for pin in pins)
    assert not re.search(r"://|@|/", "\n".join(lines).replace("`", ""))


def test_every_requirement_is_pinned_in_the_constraints_file():
    groups = [PROJECT["dependencies"], *PROJECT["optional-dependencies"].values(), BUILD["requires"]]
    names = {re.match(r"[\w-]+", requirement)[0].lower() for group in groups for requirement in group} - {"fedlas"}
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), re.MULTILINE)
    assert names <= {pin.lower().replace("_", "-") for pin in pins}


def test_version_is_equal_everywhere():
    assert f"\nversion: {PROJECT['version']}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert f"\n## {PROJECT['version']} " in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert fedlas.__version__ == PROJECT["version"]


@pytest.fixture
def machine(tmp_path):
    """A folder with the Makefile and a fake Python that only logs its arguments; a file sets whether it is too old."""
    shutil.copy(ROOT / "Makefile", tmp_path)
    for file in ["pyproject.toml", "constraints.txt"]:
        (tmp_path / file).touch()
    (tmp_path / "python").write_text("""#!/bin/sh
        echo "$@" >> commands
        case "$1 $2" in
          -c*) exit "$(cat too_old)" ;;
          "-m pip") [ "$3" != show ] || exit "$(cat no_torch)" ;;
          "-m venv") mkdir -p .venv/bin && cp python .venv/bin/python ;;
          --version*) echo Python 3.9.1 ;;
        esac
    """)
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "browser").write_text("#!/bin/sh\necho browser >> commands\n")
    for file in ["python", "scripts/browser"]:
        (tmp_path / file).chmod(0o755)
    (tmp_path / "too_old").write_text("0")
    (tmp_path / "no_torch").write_text("1")
    return tmp_path


def setup(machine):
    return run(["make", "setup", "PYTHON=./python"], cwd=machine)


def test_repeated_setup_installs_nothing(machine):
    assert setup(machine).returncode == 0
    commands = (machine / "commands").read_text()
    first, second = re.findall("^-m pip install.*$", commands, re.MULTILINE)
    assert first.endswith("-c constraints.txt pip setuptools")
    assert second.endswith("-c constraints.txt --build-constraint constraints.txt --no-compile -e .[all,dev]")
    assert re.search(r"-m compileall -qq -j 0 -x /tests/\|/site-packages/\S+ \.venv/lib\n$", commands)  # and no browser
    assert setup(machine).returncode == 0
    assert (machine / "commands").read_text() == commands


@pytest.mark.parametrize("torch_installed", [False, True])
def test_the_demo_installs_its_own_extra_and_keeps_an_installed_torch(machine, torch_installed):
    (machine / "no_torch").write_text(str(int(not torch_installed)))
    run(["make", "demo", "PYTHON=./python"], cwd=machine)  # fails later: there is no command `fedlas`
    (line,) = re.findall("^-m pip install.*demo]$", (machine / "commands").read_text(), re.MULTILINE)
    assert ("-c constraints.txt" in line) != torch_installed


def test_the_demo_installs_nothing_after_the_full_setup(machine):
    assert setup(machine).returncode == 0
    run(["make", "demo", "PYTHON=./python"], cwd=machine)
    assert "[demo]" not in (machine / "commands").read_text()


def test_browser_is_installed_only_by_make_test(machine):
    (machine / "scripts" / "check").write_text("#!/bin/sh\necho check >> commands\n")
    (machine / "scripts" / "check").chmod(0o755)
    assert run(["make", "test", "PYTHON=./python"], cwd=machine).returncode == 0
    assert (machine / "commands").read_text().endswith("browser\ncheck\n")


@pytest.mark.parametrize("available", ["chromium", "apt-get", "nothing"])
def test_browser_is_installed_if_root_and_apt_are_available(tmp_path, available):
    for tool in ("bash", "env"):
        (tmp_path / tool).symlink_to(shutil.which(tool))
    stand_ins = {"id": "echo 0", "apt-get": f'echo "$@" >> {tmp_path}/commands', "chromium": "true"}
    for name in {"id", available} & stand_ins.keys():
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{stand_ins[name]}\n")
        (tmp_path / name).chmod(0o755)
    result = run([ROOT / "scripts" / "browser"], env={"PATH": str(tmp_path)})
    assert result.returncode == 0
    assert ("skipped" in result.stdout) == (available == "nothing")
    assert (tmp_path / "commands").exists() == (available == "apt-get")
    if available == "apt-get":
        assert (tmp_path / "commands").read_text().split()[-1] == "chromium"


def test_changed_requirement_is_installed_into_the_existing_environment(machine):
    setup(machine)
    (machine / ".venv" / ".ready").unlink()
    (machine / "commands").unlink()
    assert setup(machine).returncode == 0
    assert (machine / "commands").read_text().startswith("-m pip install")


def test_old_python_fails_with_a_remedy(machine):
    (machine / "too_old").write_text("1")
    result = setup(machine)
    assert result.returncode != 0
    assert re.search(r"3\.11.*3\.9\.1", result.stdout)
    assert "PYTHON=python3.12 make test" in result.stdout
    assert not (machine / ".venv").exists()
