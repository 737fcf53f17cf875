"""What fedlas stands on: the licences of all that is installed with it, a bill of materials, and known weaknesses.

    scripts/licences                        write docs/licences.md
    python scripts/supply.py sbom           write build/fedlas.cdx.json (CycloneDX 1.5)
    python scripts/supply.py audit          ask a database of advisories about every version in constraints.txt

Packages are found by following the requirements in pyproject.toml through what is installed, extras and markers
included, so no list of them is kept. Nothing is fetched but the answers of `audit`.
"""

import json
import re
import sys
import tomllib
import urllib.error
import urllib.request
import uuid
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
ADVISORIES = "https://api.osv.dev/v1/querybatch"
PATIENCE = 20.0  # seconds
SHORT = 60  # letters of a licence that is given as its whole text
CORE = "fedlas"


@dataclass
class Package:
    """An installed package, and which groups of requirements lead to it."""

    name: str
    version: str
    licence: str
    groups: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)


def project() -> dict[str, Any]:
    """Read what pyproject.toml says about fedlas."""
    return dict(tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"])


def groups(about: dict[str, Any]) -> dict[str, list[Requirement]]:
    """List the requirements of fedlas itself and of each extra that is not made of others."""
    found = {CORE: about["dependencies"], **about["optional-dependencies"]}
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
                continue  # an extra that is not installed here
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


def licences() -> None:
    """Write the page of licences."""
    packages = installed().values()
    order = list(groups(project()))
    rows = [
        f"| {one.name} | {one.version} | {one.licence} | {', '.join(sorted(one.groups, key=order.index))} |"
        for one in packages
    ]
    text = (
        "# Licences\n\n"
        "What is installed with `fedlas`, and under which licence each package says it comes; `scripts/licences`\n"
        "writes this page from the packages' own metadata. `fedlas` itself is under the MIT licence and contains none\n"
        "of them. The last column says which extra asks for a package; those of `fedlas` are always installed, those\n"
        "of `dev` are for its tests alone.\n\n"
        f"{len(rows)} packages.\n\n| package | version | licence | asked for by |\n|---|---|---|---|\n"
    )
    (ROOT / "docs" / "licences.md").write_text(text + "\n".join(rows) + "\n", encoding="utf-8")
    print(f"docs/licences.md: {len(rows)} packages")


def sbom() -> None:
    """Write the bill of materials."""
    about, packages = project(), installed()
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
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    pins = re.findall(r"^([A-Za-z0-9._-]+)==(\S+)$", text, re.MULTILINE)
    asked = [{"package": {"name": name, "ecosystem": "PyPI"}, "version": version} for name, version in pins]
    request = urllib.request.Request(ADVISORIES, json.dumps({"queries": asked}).encode(), method="POST")
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as reply:  # noqa: S310
            answers = json.load(reply)["results"]
    except (OSError, ValueError, KeyError) as error:
        print(f"no advisory source could be reached ({error}); {len(pins)} versions were not audited")
        return 3
    bad = 0
    for (name, version), answer in zip(pins, answers, strict=True):
        for one in answer.get("vulns", ()):
            bad += 1
            print(f"{name} {version}: {one['id']}")
    print(f"{len(pins)} versions, {bad} advisories")
    return int(bad > 0)


if __name__ == "__main__":
    actions = {"licences": licences, "sbom": sbom, "audit": audit}
    if len(sys.argv) != 2 or sys.argv[1] not in actions:
        sys.exit(f"usage: scripts/supply.py {' | '.join(actions)}")
    sys.exit(actions[sys.argv[1]]())
