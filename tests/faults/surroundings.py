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
}  # Python then cannot represent the folder names of the others
HOMELESS = {"HOME": NOWHERE, "XDG_CACHE_HOME": "", "XDG_CONFIG_HOME": "", "MPLCONFIGDIR": ""}


@dataclass(frozen=True)
class Place:
    """How the tour is started.

    Args:
        variables: of the environment; an empty one is taken away.
        python: options of the interpreter.
        words: options of the walk.
        alone: without a terminal or anything to read or write: a session of its own, and closed streams.
    """

    variables: dict[str, str] = field(default_factory=dict)
    python: tuple[str, ...] = ()
    words: tuple[str, ...] = ()
    alone: bool = False


PLACES = {
    "usual": Place(),
    "python -O": Place(python=("-O",)),
    "LANG=C": Place(C),
    "LANG=C, and Python takes text for ASCII": Place(ASCII, words=("--ascii",)),
    "home cannot be written": Place(HOMELESS),
    "no terminal, streams closed": Place({"TERM": ""}, alone=True),
    "processes are spawned": Place(words=("--start-method", "spawn")),
    "processes are forked": Place(words=("--start-method", "fork")),
    "all at once": Place(C | HOMELESS | {"TERM": ""}, ("-O",), ("--start-method", "spawn"), alone=True),
}


def walked(place: Place, folder: Path, *more: str) -> dict[str, Any]:
    """Run the tour; return its results, or its output if it failed."""
    folder.mkdir()
    out = folder / "found.json"
    environment = {name: value for name, value in (os.environ | place.variables).items() if value}
    command = [sys.executable, *place.python, str(TOUR), str(folder), "--out", str(out), *place.words, *more]
    with (folder / "said.txt").open("wb") as text:
        streams: dict[str, Any] = {"stdin": subprocess.DEVNULL, "stdout": text, "stderr": text}
        if place.alone:
            command = ["/bin/sh", "-c", 'exec "$@" <&- >&-', "sh", *command]  # stderr stays open
        done = subprocess.run(command, env=environment, check=False, start_new_session=place.alone, **streams)
    if done.returncode:
        return {"failed": (folder / "said.txt").read_text(errors="replace")[-3000:]}
    result: dict[str, Any] = json.loads(out.read_text(encoding="utf-8"))
    return result


def unlike(found: dict[str, Any], usual: dict[str, Any]) -> list[str]:
    """Return the differences between two tours."""
    if "failed" in found:
        return [found["failed"]]
    return [f"{name}: {found.get(name)} and not {value}" for name, value in usual.items() if found.get(name) != value]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(PLACES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    rows, usual = [], {}
    with tempfile.TemporaryDirectory() as folder:
        for name, surrounding in PLACES.items():
            if given.only and name not in (*given.only, "usual"):
                continue
            began = time.monotonic()
            result = walked(surrounding, Path(folder) / name)
            usual = usual or result
            wrong = unlike(result, usual)
            rows.append({"surroundings": name, "equal": "no" if wrong else "yes"})
            print(name, f"{time.monotonic() - began:.0f} s", *wrong, file=sys.stderr, flush=True)
    print(table(rows))
    if given.json:
        given.json.parent.mkdir(parents=True, exist_ok=True)
        given.json.write_text(json.dumps({"rows": rows, "usual": usual}, indent=1, ensure_ascii=False) + "\n", "utf-8")
    return int(any(row["equal"] == "no" for row in rows) or "failed" in usual)


if __name__ == "__main__":
    sys.exit(main())
