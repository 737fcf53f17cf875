"""Campaign on environments: run `tour.py` in environments that users have; each must give the same numbers.

    python tests/faults/surroundings.py --json build/surroundings.json

Every tour uses folders with spaces and letters of several alphabets in their names, and reads a CSV with Windows line
ends. An unwritable home is below /proc, where not even root can create a folder.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from zygote import table

TOUR = Path(__file__).with_name("tour.py")
NOWHERE = "/proc/nowhere"
C = {"LANG": "C", "LC_ALL": "C"}
ASCII = C | {
    "PYTHONUTF8": "0",
    "PYTHONCOERCECLOCALE": "0",
}  # Python then cannot represent the folder names of the other surroundings
HOMELESS = {"HOME": NOWHERE, "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "MPLCONFIGDIR": ""}


@dataclass(frozen=True)
class Surroundings:
    """How the tour is started.

    Args:
        variables: environment variables; those with an empty value are removed.
        python: options of the interpreter.
        options: of `tour.py`.
        detached: whether it runs in a new session with closed streams, without a terminal.
    """

    variables: dict[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    options: tuple[str, ...] = ()
    detached: bool = False


SURROUNDINGS = {
    "normal": Surroundings(),
    "python -O": Surroundings(python=("-O",)),
    "LANG=C": Surroundings(C),
    "LANG=C, and Python takes text for ASCII": Surroundings(ASCII, options=("--ascii",)),
    "home cannot be written": Surroundings(HOMELESS),
    "no terminal, streams closed": Surroundings({"TERM": ""}, detached=True),
    "processes are spawned": Surroundings(options=("--start-method", "spawn")),
    "processes are forked": Surroundings(options=("--start-method", "fork")),
    "all at once": Surroundings(C | HOMELESS | {"TERM": ""}, ("-O",), ("--start-method", "spawn"), detached=True),
}


def run_tour(surroundings: Surroundings, folder: Path, *extra_options: str) -> dict[str, Any]:
    """Run the tour; return its results, or its output if it failed."""
    folder.mkdir()
    result_file = folder / "found.json"
    environment = {name: value for name, value in (os.environ | surroundings.variables).items() if value}
    command = [
        sys.executable,
        *surroundings.python,
        str(TOUR),
        str(folder),
        "--out",
        str(result_file),
        *surroundings.options,
        *extra_options,
    ]
    with (folder / "output.txt").open("wb") as text:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": text, "stderr": text}
        if surroundings.detached:
            command = ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh", *command]  # stderr stays open
        process = subprocess.run(
            command, env=environment, check=False, start_new_session=surroundings.detached, **streams
        )
    if process.returncode:
        return {"failed": (folder / "output.txt").read_text(errors="replace")[-3000:]}
    result: dict[str, Any] = json.loads(result_file.read_text(encoding="utf-8"))
    return result


def differences(result: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Return the differences between two tours."""
    if "failed" in result:
        return [result["failed"]]
    return [
        f"{name}: {result.get(name)} and not {value}" for name, value in expected.items() if result.get(name) != value
    ]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(SURROUNDINGS))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    rows, expected = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, surroundings in SURROUNDINGS.items():
            if arguments.only and name not in (*arguments.only, "normal"):
                continue
            start = time.monotonic()
            result = run_tour(surroundings, Path(folder) / name)
            expected = expected or result
            problems = differences(result, expected)
            rows.append({"surroundings": name, "equal": "no" if problems else "yes"})
            print(name, f"{time.monotonic() - start:.0f} s", *problems, file=sys.stderr, flush=True)
    print(table(rows))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(
            json.dumps({"rows": rows, "normal": expected}, indent=1, ensure_ascii=False) + "\n", "utf-8"
        )
    return int(any(row["equal"] == "no" for row in rows) or "failed" in expected)


if __name__ == "__main__":
    sys.exit(main())
