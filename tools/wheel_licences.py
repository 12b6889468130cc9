#!/usr/bin/env python3
"""Puts into a wheel that auditwheel has repaired the licence text of everything of others in it. Usage: wheel_licences.py BUILT REPAIRED OUT

BUILT is the wheel before the repair, from the build folder that its tag names, and REPAIRED after it. What is in it of others are the libraries that
auditwheel grafted, and every header and library outside the tree that ninja says the extension was made of. Each belongs to a Debian package, or to
one that pip installed here, and so does the text. The wheel goes to the folder OUT, or nowhere: a text that is missing is a sentence and exit 1.
"""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
COMMON = Path("/usr/share/common-licenses")  # Debian's texts point to these for the licences that many share

# Sources whose headers every compiled program has in it, and whose licences (the exception of GCC's and LLVM's runtime libraries, the one for system
# calls, section 5 of the LGPL) ask nothing for that. As grafted libraries they would owe their texts as others do.
FREE_HEADERS = re.compile(r"gcc-\d+|llvm-toolchain-\d+|glibc|linux")
# The same goes for the interface of the Python that an extension is loaded by.
PYTHON_HEADER = re.compile(r"/include/(.+/)?python3\.\d+\w*/")

# Common licences that a project's text points to only for files that the library is not made of (Debian's packaging, examples, scripts, what builds
# it), or as the other half of a choice, as with zstd. Where this list does not say so, the licence goes into the wheel.
NOT_INSIDE = {
    "bzip2": {"GPL-2"},
    "fmtlib": {"CC0-1.0"},
    "libzip": {"GPL-3"},
    "libzstd": {"GPL-2"},
    "onetbb": {"GPL-1", "GPL-2"},
    "openssl": {"Artistic", "GPL-1"},
    "xz-utils": {"GPL-2", "GPL-3", "LGPL-2.1"},
}


class Refused(Exception):
    """A sentence that says why no wheel is made."""


class Project(NamedTuple):
    """A name that can be a file's, and the files that together are the licence text."""

    name: str
    texts: list[Path]


def run(*command: str | Path, cwd: Path | None = None, fails: bool = False) -> str:
    """What the command prints. A status other than 0 is refused unless fails."""
    try:
        done = subprocess.run(command, cwd=cwd, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise Refused(f"the command {command[0]} must be there, and is not") from None
    if done.returncode != 0 and not fails:
        raise Refused(f"{' '.join(map(str, command))} failed: {done.stderr.strip()}")
    return done.stdout


def grafted(repaired: Path) -> list[str]:
    """The names of the libraries in the wheel, without the hash that auditwheel puts into each."""
    with zipfile.ZipFile(repaired) as archive:
        files = [PurePosixPath(entry.filename) for entry in archive.infolist() if not entry.is_dir()]
    return [re.sub(r"-[0-9a-f]{8}(?=\.)", "", file.name) for file in files if file.parts[0].endswith(".libs")]


def loaded(built: Path) -> dict[str, Path]:
    """By name, the libraries that the wheel's extension loads on this machine: those that were there to graft."""
    with tempfile.TemporaryDirectory() as folder, zipfile.ZipFile(built) as archive:
        listing = run("ldd", *(archive.extract(name, folder) for name in archive.namelist() if name.endswith(".so")))
    files = [Path(path).resolve() for path in re.findall(r"=> (/.+) \(0x", listing)]
    return {file.name: file for file in files}


def compiled_in(folder: Path) -> list[Path]:
    """The headers and libraries outside the tree that the extension in the build folder was made of."""
    listing = run("ninja", "-t", "deps", cwd=folder) + run("ninja", "-t", "inputs", "_core", cwd=folder)
    files = {Path(os.path.normpath(line.strip())) for line in listing.splitlines() if line.strip().startswith("/")}
    files = sorted(file for file in files if "site-packages" in file.parts or not file.is_relative_to(ROOT))
    if not files:
        raise Refused(f"ninja knows nothing that the extension in {folder} was made of")
    return [file for file in files if not PYTHON_HEADER.search(str(file))]


def pip_project(file: Path) -> Project | None:
    """The installed package of the folder that the file lies in. pip builds in an environment of its own, so that the file itself may be gone."""
    package, *inside = file.parts[file.parts.index("site-packages") + 1 :]
    if "ext" in inside:
        return None  # a third project's, which the package's text says nothing of
    try:
        paths = importlib.metadata.files(package) or []
    except importlib.metadata.PackageNotFoundError:
        return None
    return Project(package, [Path(path.locate()) for path in paths if re.match(r"(LICEN[CS]E|COPYING|NOTICE)", path.name)])


def debian_projects(files: Iterable[Path]) -> dict[Path, Project]:
    """The Debian source package of each file that dpkg knows."""
    spelled: dict[str, list[Path]] = {}  # a link and what it leads to may both be asked for
    for file in files:
        for path in {str(file), str(file.resolve())}:
            spelled.setdefault(path, []).append(file)
            spelled.setdefault(path.removeprefix("/usr"), []).append(file)  # what was in /lib before that was a link, Debian 12's dpkg knows so
    packages = {}
    listing = run("dpkg", "-S", *spelled, fails=True)  # it fails where it knows one of them only by another spelling
    for package, path in re.findall(r"^([a-z0-9.+-]+)(?::\w+)?(?:, \S+)*: (/.+)$", listing, re.MULTILINE):
        packages.update((file, package) for file in spelled.get(path, []))
    names = sorted(set(packages.values()))
    sources = dict(line.split() for line in run("dpkg-query", "-W", "-f", "${Package} ${source:Package}\n", *names).splitlines()) if names else {}
    return {file: Project(sources[package], [Path("/usr/share/doc", package, "copyright")]) for file, package in packages.items()}


def projects_of(files: Iterable[Path]) -> dict[Path, Project | None]:
    """Whose each file is; None or nothing where that is not known."""
    files = set(files)
    of_pip = {file: pip_project(file) for file in files if "site-packages" in file.parts}
    return {**of_pip, **debian_projects(files - of_pip.keys())}


def collect(
    libraries: Iterable[str],
    there: dict[str, Path],
    headers: Iterable[Path],
    projects_of: Callable[[Iterable[Path]], dict[Path, Project | None]] = projects_of,
    common: Path = COMMON,
) -> dict[str, bytes]:
    """The texts by the name of their file: a PROJECT.txt for each that owns one of the libraries, which `there` has by name, or of the headers, and
    the licences that these texts point to. Refused is raised where one is missing."""
    for name in libraries:
        if name not in there:
            raise Refused(f"{name} is in the wheel, but the extension loads no library of that name here, so its licence text was not found")
    owed = [(there[name], False) for name in libraries] + [(file, True) for file in headers]
    projects = projects_of([file for file, _ in owed])
    texts: dict[str, bytes] = {}
    shared = set()
    for file, is_header in owed:
        project = projects.get(file)
        if project is None:
            raise Refused(f"{file} is in the wheel, but no package is known to own it, so its licence text was not found")
        if f"{project.name}.txt" in texts or (is_header and FREE_HEADERS.fullmatch(project.name)):
            continue
        text = b"\n".join(path.read_bytes() for path in project.texts if path.is_file())
        if not text.strip():
            places = " or ".join(map(str, project.texts)) or "its package"
            raise Refused(f"{file} is in the wheel, but {project.name}, which owns it, has no licence text in {places}")
        texts[f"{project.name}.txt"] = text
        pointed_to = {name.decode() for name in re.findall(rb"/usr/share/common-licenses/([\w.+-]*\w)", text)}
        shared |= pointed_to - NOT_INSIDE.get(project.name, set())
    for name in sorted(shared):
        if not (common / name).is_file():
            raise Refused(f"a licence text points to {COMMON / name}, which is not there")
        texts[f"common-licenses/{name}.txt"] = (common / name).read_bytes()
    return texts


def put(wheel: Path, texts: dict[str, bytes], out: Path) -> None:
    """The wheel with the texts in its .dist-info/licenses/third_party, written to the folder out."""
    with tempfile.TemporaryDirectory() as folder:
        run(sys.executable, "-m", "wheel", "unpack", "-d", folder, wheel)
        (unpacked,) = Path(folder).iterdir()
        (info,) = unpacked.glob("*.dist-info")
        for name, text in texts.items():
            file = info / "licenses" / "third_party" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(text)
        head, gap, body = (info / "METADATA").read_bytes().partition(b"\n\n")
        lines = [head.rstrip(), *(f"License-File: third_party/{name}".encode() for name in sorted(texts))]
        (info / "METADATA").write_bytes(b"\n".join(lines) + (gap + body or b"\n"))
        out.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "wheel", "pack", "-d", out, unpacked)


def main(built: Path, repaired: Path, out: Path) -> None:
    headers = compiled_in(ROOT / "build" / "-".join(built.stem.split("-")[-3:]))
    texts = collect(grafted(repaired), loaded(built), headers)
    put(repaired, texts, out)
    print(f"{out / repaired.name} has the licence texts {', '.join(sorted(texts))}")


if __name__ == "__main__":
    if len(sys.argv) != 4:
        sys.exit("wheel_licences: must be given three arguments, BUILT REPAIRED OUT")
    try:
        main(*map(Path, sys.argv[1:]))
    except Refused as reason:
        sys.exit(f"wheel_licences: {reason}")
