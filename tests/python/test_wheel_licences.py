"""tools/wheel_licences.py: a wheel gets every licence text that it owes, or there is no wheel."""

import csv
import importlib.util
import io
import pathlib
import shutil
import subprocess
import sys
import zipfile

import pytest

pytest.importorskip("wheel")

ROOT = pathlib.Path(__file__).resolve().parents[2]
spec = importlib.util.spec_from_file_location("wheel_licences", ROOT / "tools" / "wheel_licences.py")
licences = importlib.util.module_from_spec(spec)
spec.loader.exec_module(licences)

HEADER = pathlib.Path("/usr/include/tiny/tiny.hpp")
LIBC = pathlib.Path("/usr/include/stdio.h")
LIBRARY = pathlib.Path("/usr/lib/libsmall.so.1.0")
INFO = "some-1.0.dist-info"
NAME = "some-1.0-py3-none-any.whl"


@pytest.fixture
def wheel(tmp_path):
    """A wheel as auditwheel leaves it: a library in some.libs/, its name with a hash, and folders that are entries of their own."""
    tree = tmp_path / "tree"
    files = {
        "some/__init__.py": "",
        "some.libs/libsmall-0123abcd.so.1.0": "of another",
        f"{INFO}/METADATA": "Metadata-Version: 2.4\nName: some\nVersion: 1.0\nLicense-File: LICENSE\n\nWords.\n\nLicense-File: no header\n",
        f"{INFO}/WHEEL": "Wheel-Version: 1.0\nGenerator: hand\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{INFO}/licenses/LICENSE": "its own",
    }
    for name, text in files.items():
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text(text)
    (tmp_path / "repaired").mkdir()
    subprocess.run([sys.executable, "-m", "wheel", "pack", "-d", tmp_path / "repaired", tree], check=True, capture_output=True)
    with zipfile.ZipFile(tmp_path / "repaired" / NAME, "a") as archive:
        archive.writestr("some.libs/", "")
    return tmp_path / "repaired" / NAME


@pytest.fixture
def projects(tmp_path):
    """What owns the files, each with its text on disk, the library's pointing to a licence that many share."""
    (tmp_path / "common").mkdir()
    (tmp_path / "common" / "Apache-2.0").write_text("the whole licence")
    (tmp_path / "small").write_text("See `/usr/share/common-licenses/Apache-2.0'.")
    (tmp_path / "tiny").write_text("Copyright of tiny")
    return {
        LIBRARY: licences.Project("small", [tmp_path / "small"]),
        HEADER: licences.Project("tiny", [tmp_path / "tiny"]),
        LIBC: licences.Project("glibc", [tmp_path / "glibc"]),
    }


def collect(wheel, projects, headers=(HEADER, LIBC)):
    return licences.collect(licences.grafted(wheel), {LIBRARY.name: LIBRARY}, headers, lambda files: projects, wheel.parents[1] / "common")


def test_every_text_is_in_the_wheel(wheel, projects, tmp_path):
    assert licences.grafted(wheel) == [LIBRARY.name]
    licences.put(wheel, collect(wheel, projects), tmp_path / "out")
    with zipfile.ZipFile(tmp_path / "out" / NAME) as archive:
        assert archive.testzip() is None
        added = {name: archive.read(name).decode() for name in archive.namelist() if "/third_party/" in name}
        names = {name for name in archive.namelist() if not name.endswith("/")}
        record = list(csv.reader(io.StringIO(archive.read(f"{INFO}/RECORD").decode())))
        head, _, body = archive.read(f"{INFO}/METADATA").decode().partition("\n\n")
    folder = f"{INFO}/licenses/third_party"
    assert added == {  # and nothing of glibc's headers
        f"{folder}/small.txt": "See `/usr/share/common-licenses/Apache-2.0'.",
        f"{folder}/tiny.txt": "Copyright of tiny",
        f"{folder}/common-licenses/Apache-2.0.txt": "the whole licence",
    }
    assert {name for name, _, _ in record} == names
    assert all(hash.startswith("sha256=") and size for name, hash, size in record if not name.endswith("RECORD"))
    declared = [line.split(": ")[1] for line in head.splitlines() if line.startswith("License-File")]
    assert declared == ["LICENSE", "third_party/common-licenses/Apache-2.0.txt", "third_party/small.txt", "third_party/tiny.txt"]
    assert body == "Words.\n\nLicense-File: no header\n"
    subprocess.run([sys.executable, "-m", "wheel", "unpack", "-d", tmp_path / "again", tmp_path / "out" / NAME], check=True, capture_output=True)


@pytest.mark.parametrize("missing", ["small", "tiny", "common/Apache-2.0"])
def test_a_missing_text_is_refused(wheel, projects, tmp_path, missing):
    (tmp_path / missing).unlink()
    with pytest.raises(licences.Refused, match=pathlib.Path(missing).name):
        collect(wheel, projects)


def test_an_empty_text_is_refused(wheel, projects, tmp_path):
    (tmp_path / "tiny").write_text(" \n")
    with pytest.raises(licences.Refused, match="tiny.hpp is in the wheel, but tiny, which owns it, has no licence text"):
        collect(wheel, projects)


def test_what_nobody_owns_is_refused(wheel, projects):
    del projects[HEADER]
    with pytest.raises(licences.Refused, match="tiny.hpp is in the wheel, but no package is known to own it"):
        collect(wheel, projects)


def test_a_library_from_nowhere_is_refused(wheel, projects):
    with pytest.raises(licences.Refused, match="libsmall.so.1.0 is in the wheel, but the extension loads no library of that name"):
        licences.collect(licences.grafted(wheel), {}, [], lambda files: projects)


def test_a_grafted_library_of_the_compiler_owes_its_text(wheel, projects, tmp_path):
    projects[LIBRARY] = licences.Project("gcc-12", [tmp_path / "small"])
    assert "gcc-12.txt" in collect(wheel, projects)


def test_a_project_inside_an_installed_package_is_not_that_package(tmp_path):
    site = tmp_path / "gone" / "site-packages"
    owner = licences.pip_project(site / "pytest" / "a.hpp")
    assert owner.name == "pytest" and owner.texts and all(text.is_file() for text in owner.texts)
    assert licences.pip_project(site / "pytest" / "ext" / "other" / "b.hpp") is None
    assert licences.pip_project(site / "no_such_package" / "c.hpp") is None


@pytest.mark.skipif(not shutil.which("dpkg"), reason="not Debian")
def test_a_file_of_debian_by_each_of_its_names(tmp_path):
    dpkg, link, unknown = pathlib.Path("/usr/bin/dpkg"), tmp_path / "link", tmp_path / "unknown"
    link.symlink_to(dpkg)
    owner = licences.Project("dpkg", [pathlib.Path("/usr/share/doc/dpkg/copyright")])
    assert licences.debian_projects([link, dpkg, unknown]) == {link: owner, dpkg: owner}
