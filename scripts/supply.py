"""What fedlas stands on: the licences of all that is installed with it, a bill of materials, and known weaknesses.

    scripts/constraints                     write constraints.txt
    scripts/licences                        write docs/licences.md
    python scripts/supply.py sbom           write build/fedlas.cdx.json (CycloneDX 1.5)
    python scripts/supply.py audit          ask a database of advisories about every version in constraints.txt

Packages are found by following the requirements in pyproject.toml through what is installed, extras and markers
included, so no list of them is kept. What is pinned in constraints.txt and not found that way is listed too: what only
builds and set-ups need, what only some machines can install, and what else was installed where the tests ran. Nothing
is fetched but the answers of `audit`, and by `constraints` the names of versions that are not installed here.
"""

import contextlib
import json
import os
import re
import subprocess
import sys
import tempfile
import tomllib
import urllib.request
import uuid
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ADVISORIES = os.environ.get("ADVISORIES", "https://api.osv.dev/v1/querybatch")  # or another that answers alike
PATIENCE = 20.0  # seconds
SHORT = 60  # letters of a licence that is given as its whole text
HEAD = "# The versions that the tests ran with; made by `make constraints`. The library itself asks only lower bounds."
CORE, BUILD = "fedlas", "build"
# What `make setup` installs with, and what hatchling asks for to install a checkout.
TOOLS = ("pip", "setuptools", "editables")
# Packages that .venv need not hold: the licence that their own metadata or licence file has, and what asks for them.
ELSEWHERE = {
    "atheris": ("Apache-2.0", "fuzz"),
    "editables": ("MIT License", BUILD),
    "hatchling": ("MIT", BUILD),
    "tomlkit": ("MIT", BUILD),
    "trove-classifiers": ("Apache Software License", BUILD),
}


@dataclass
class Package:
    """A package, and which groups of requirements lead to it."""

    name: str
    version: str
    licence: str
    groups: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)


def read() -> dict[str, Any]:
    """Read pyproject.toml."""
    return tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def project() -> dict[str, Any]:
    """Read what pyproject.toml says about fedlas."""
    return dict(read()["project"])


def pins() -> dict[str, str]:
    """Read which version of which package is pinned."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    found = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def groups(about: dict[str, Any]) -> dict[str, list[Requirement]]:
    """List the requirements of fedlas itself and of each extra that is not made of others."""
    found = {CORE: about["dependencies"], **about["optional-dependencies"]}
    found[BUILD] = [*read()["build-system"]["requires"], *TOOLS]
    made = {name: [Requirement(text) for text in texts] for name, texts in found.items()}
    return {name: ones for name, ones in made.items() if not any(one.name == CORE for one in ones)}


def licence_of(found: metadata.PackageMetadata) -> str:
    """Say the licence of a package, as short as it says it itself."""
    fields: Any = found
    expression = fields.get("License-Expression")
    kinds = [one.rpartition(" :: ")[2] for one in fields.get_all("Classifier") or () if one.startswith("License ::")]
    kinds = [one for one in kinds if one != "OSI Approved"]
    text = str(fields.get("License") or "").strip().partition("\n")[0]
    plain = expression or ", ".join(kinds) or text or "not stated"
    return plain if len(plain) <= SHORT else f"{plain[:SHORT]}..."


def installed() -> dict[str, Package]:
    """Follow all requirements through what is installed."""
    found: dict[str, Package] = {}
    for group, needed in groups(project()).items():
        waiting, seen = list(needed), set()
        while waiting:
            one = waiting.pop()
            key = (canonicalize_name(one.name), frozenset(one.extras))
            if key in seen:
                continue
            seen.add(key)
            try:
                about = metadata.distribution(one.name)
            except metadata.PackageNotFoundError:
                continue  # not installed here; `listed` knows more
            name = canonicalize_name(about.metadata["Name"])
            version = about.version.partition("+")[0]
            package = found.setdefault(name, Package(name, version, licence_of(about.metadata)))
            package.groups.add(group)
            follow = [Requirement(text) for text in about.requires or ()]
            asked = [other for other in follow if applies(other, one.extras)]
            package.needs |= {canonicalize_name(other.name) for other in asked}
            waiting += asked
    return dict(sorted(found.items()))


def applies(one: Requirement, extras: set[str]) -> bool:
    """Say whether a requirement holds here, with the extras that were asked for."""
    return one.marker is None or any(one.marker.evaluate({"extra": extra}) for extra in extras or {""})


def listed() -> dict[str, Package]:
    """List what requirements lead to here, and all else that is pinned."""
    found = installed()
    for name, version in pins().items():
        if name in found:
            continue
        licence, group = ELSEWHERE.get(name, ("not stated", None))
        with contextlib.suppress(metadata.PackageNotFoundError):
            licence = licence_of(metadata.metadata(name))
        found[name] = Package(name, version, licence, set() if group is None else {group})
    return dict(sorted(found.items()))


def licences() -> None:
    """Write the page of licences."""
    packages = listed().values()
    order = list(groups(project()))
    rows = [
        f"| {one.name} | {one.version} | {one.licence} | {', '.join(sorted(one.groups, key=order.index)) or '-'} |"
        for one in packages
    ]
    text = (
        "# Licences\n\n"
        "What is installed with `fedlas`, and under which licence each package says it comes; `scripts/licences`\n"
        "writes this page from the packages' own metadata. `fedlas` itself is under the MIT licence and contains none\n"
        "of them. The last column says which extra asks for a package; those of `fedlas` are always installed, those\n"
        "of `dev` and `fuzz` are for its tests alone, those of `build` make the package and the environment. Where\n"
        "there is a dash nothing asks for a package: it was there when the tests ran, so its version is pinned.\n\n"
        f"{len(rows)} packages.\n\n| package | version | licence | asked for by |\n|---|---|---|---|\n"
    )
    (ROOT / "docs" / "licences.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"docs/licences.md: {len(rows)} packages")


def sbom() -> None:
    """Write the bill of materials."""
    about, packages = project(), listed()
    own = f"pkg:pypi/{CORE}@{about['version']}"
    parts = [
        {
            "type": "library",
            "bom-ref": address(one),
            "name": one.name,
            "version": one.version,
            "purl": address(one),
            "licenses": [{"license": {"name": one.licence}}],
            "scope": "required" if CORE in one.groups else "optional",
        }
        for one in packages.values()
    ]
    direct = {canonicalize_name(one.name) for needed in groups(about).values() for one in needed}
    edges = [{"ref": own, "dependsOn": sorted(address(packages[name]) for name in direct if name in packages)}]
    edges += [
        {"ref": address(one), "dependsOn": sorted(address(packages[name]) for name in one.needs if name in packages)}
        for one in packages.values()
    ]
    made = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.5",
        "serialNumber": f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(parts, sort_keys=True))}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "library",
                "bom-ref": own,
                "name": CORE,
                "version": about["version"],
                "purl": own,
                "licenses": [{"license": {"id": about["license"]}}],
            }
        },
        "components": parts,
        "dependencies": edges,
    }
    path = ROOT / "build" / "fedlas.cdx.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")
    print(f"{path.relative_to(ROOT)}: {len(parts)} components")


def address(one: Package) -> str:
    """Name a package as bills of materials do."""
    return f"pkg:pypi/{one.name}@{one.version}"


def audit() -> int:
    """Ask about every pinned version; 0 if nothing is known against any, 1 if something is, 3 if nobody answers."""
    asked = pins()
    try:
        known = list(zip(asked.items(), advisories(asked), strict=True))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        print(f"no advisory source could be reached, or it gave no answer ({error!r}):", file=sys.stderr)
        print(f"{len(asked)} versions were NOT audited", file=sys.stderr)
        return 3
    bad = 0
    for (name, version), names in known:
        for one in names:
            bad += 1
            print(f"{name} {version}: {one}")
    print(f"{len(asked)} versions, {bad} advisories")
    return int(bad > 0)


def advisories(asked: dict[str, str]) -> list[list[str]]:
    """Ask which advisories there are about each version."""
    queries = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in asked.items()]
    content, kind = json.dumps({"queries": queries}).encode(), {"Content-Type": "application/json"}
    request = urllib.request.Request(ADVISORIES, content, kind, method="POST")  # noqa: S310
    with urllib.request.urlopen(request, timeout=PATIENCE) as reply:  # noqa: S310
        answers = json.load(reply)["results"]
    return [[one["id"] for one in answer.get("vulns", ())] for answer in answers]


def constraints() -> int:
    """Write down the versions that .venv holds, and those of what is asked for and not installed there."""
    found = {one: version.partition("+")[0] for one, version in frozen().items()}  # 2.6.0+cu124 is 2.6.0 elsewhere
    known = {canonicalize_name(one) for one in found}
    asked = [one for needed in groups(project()).values() for one in needed]
    others = sorted({str(one) for one in asked if canonicalize_name(one.name) not in known})
    try:
        more = resolved(others, found)
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"constraints.txt stays: pip found no versions of {', '.join(others)} ({error})", file=sys.stderr)
        return 1
    found |= {one: version for one, version in more.items() if canonicalize_name(one) not in known}
    lines = sorted((f"{one}=={version}" for one, version in found.items()), key=lambda line: (line.upper(), line))
    path = ROOT / "constraints.txt"
    path.with_suffix(".new").write_text("\n".join([HEAD, *lines]) + "\n", encoding="utf-8")
    path.with_suffix(".new").replace(path)
    print(f"constraints.txt: {len(lines)} versions")
    return 0


def frozen() -> dict[str, str]:
    """Ask pip what is installed; whatever came from a path or an address is left out."""
    said = pip("freeze", "--all", "--exclude-editable")
    return dict(re.findall(r"^([A-Za-z0-9._-]+)==([^@ \n]+)$", said, re.MULTILINE))


def resolved(asked: list[str], beside: dict[str, str]) -> dict[str, str]:
    """Ask pip which versions it would install of some packages, and of what they need, beside those that are there."""
    if not asked:
        return {}
    with tempfile.TemporaryDirectory() as folder:
        given = Path(folder) / "beside.txt"
        given.write_text("".join(f"{one}=={version}\n" for one, version in beside.items()), encoding="utf-8")
        said = pip("install", "--dry-run", "--ignore-installed", "--quiet", "--report", "-", "-c", given, *asked)
    return {one["metadata"]["name"]: one["metadata"]["version"] for one in json.loads(said)["install"]}


def pip(*words: object) -> str:
    """Run pip and give what it says."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *map(str, words)]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout  # noqa: S603


if __name__ == "__main__":
    actions = {"constraints": constraints, "licences": licences, "sbom": sbom, "audit": audit}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(f"usage: scripts/supply.py {' | '.join(actions)}")
    sys.exit(actions[sys.argv[1]]())
