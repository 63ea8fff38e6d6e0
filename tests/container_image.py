"""An image of this machine's own files, so that real containers run without a registry."""

from __future__ import annotations

import importlib.util
import io
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from ludus.sandbox import SandboxConfig
from ludus.sandbox.containers.engines import make_engine

IMAGE = "localhost/ludus-test:1"
PROGRAMS = (
    "basename bash cat chmod cp dirname env find git grep head id kill ls mkdir mv ps rm sed seq sleep sort "
    "tail tar timeout touch true wc"
)
LIBRARY = (
    Path(sys.base_prefix).resolve() / "lib" / f"python{sys.version_info.major}.{sys.version_info.minor}"
)
_OMIT = {
    "test",
    "tests",
    "site-packages",
    "__pycache__",
    "idlelib",
    "tkinter",
    "ensurepip",
    "dist-packages",
}


def ran(*argv: str) -> str:
    """What a command printed; it must succeed."""
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


def listed(program: list[str]) -> list[str]:
    """The names of all containers."""
    return ran(*program, "ps", "--all", "--format", "{{.Names}}").split()


def engines() -> dict[str, list[str]]:
    """Engines that work here, by their tiers."""
    found = {}
    podman = ["podman", "--runtime", "runc"] if shutil.which("runc") else ["podman"]
    for tier, program in (("docker", ["docker"]), ("podman", podman)):
        check = (
            make_engine(SandboxConfig.parse({"tier": tier, "container": {"program": program}}, "test"))
            .check()
            .argv
        )
        if shutil.which(program[0]) and subprocess.run(check, capture_output=True).returncode == 0:
            found[tier] = program
    return found


def import_image(program: list[str], name: str, more: Mapping[str, Path] | None = None) -> None:
    """Give an engine an image of our own, with further files by their path in it."""
    argv = [*program, "import", "-", name]
    subprocess.run(argv, input=_archive(more or {}), check=True, capture_output=True)


def packages(*names: str) -> dict[str, Path]:
    """Installed packages, for the image's Python."""
    found = {}
    for name in names:
        origin = Path(getattr(importlib.util.find_spec(name), "origin", ""))
        site = origin.parent.parent if origin.name == "__init__.py" else origin.parent
        for file in files_of(origin.parent) if origin.name == "__init__.py" else [origin]:
            found[str(LIBRARY / "site-packages" / file.relative_to(site))] = file
    return found


def files_of(folder: Path) -> Iterator[Path]:
    return (file for file in folder.rglob("*") if file.is_file() and "__pycache__" not in file.parts)


def _archive(more: Mapping[str, Path]) -> bytes:
    """A file system: some programs and this Python, with the libraries that they load."""
    binary = Path(sys.executable).resolve()
    programs = {
        f"usr/bin/{name}": Path(found).resolve()
        for name in PROGRAMS.split()
        if (found := shutil.which(name))
    }
    library = (file for file in files_of(LIBRARY) if not _OMIT & set(file.relative_to(LIBRARY).parts))
    paths = programs | {str(file): file for file in (binary, *library)}
    objects = [binary, *programs.values(), *(path for path in paths.values() if path.suffix == ".so")]
    loaded = subprocess.run(["ldd", *objects], capture_output=True, text=True).stdout
    for name in re.findall(r"(?:=> |^\t)(/\S+)", loaded, re.MULTILINE):
        if Path(name).is_file():
            paths[name] = Path(name)
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w", dereference=True) as archive:
        for folder in ("tmp", "proc", "sys", "dev", "etc", "root", "work"):
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o1777
            archive.addfile(info)
        for name, target in (("bin", "usr/bin"), ("usr/bin/python3", str(binary))):
            link = tarfile.TarInfo(name)
            link.type, link.linkname = tarfile.SYMTYPE, target
            archive.addfile(link)
        for name, path in {**paths, **more}.items():
            archive.add(path, name.lstrip("/"), recursive=False)
    return made.getvalue()
