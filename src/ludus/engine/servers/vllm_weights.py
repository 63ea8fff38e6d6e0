"""The weights of a model as a vLLM server takes them: with the head as a tensor of its own.

Models whose head is tied to the embedding save one tensor for both. On a CPU, vLLM keeps a packed copy of the
head, and makes it anew only where it is given a head: with the embedding alone an update reports success, and
what is sampled then comes from a model that is half old (measured: 0.03 to 0.5 nats off). So every update has
the head, too. Untied models have one anyway; on a GPU, a tied head is written twice.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import safe_open
from safetensors.torch import save_file

from ludus.core.failures import EngineError

HEAD = "lm_head.weight"
_EMBEDDING = "embed_tokens.weight"
_CONFIG = "config.json"
_HEAD_FILE = "head.safetensors"


def model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a model's folder; empty where there is none, or it is no such file."""
    try:
        found = json.loads((folder / _CONFIG).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


@contextmanager
def with_head(folder: Path) -> Iterator[Path]:
    """A folder with the same weights, and the head among them; it is gone afterwards."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise EngineError(f"there are no weights (*.safetensors) in {folder}", retriable=False)
    source = _embedding_without_head(files)
    if source is None:
        yield folder
        return
    # beside the folder: a server that sees that sees this, and files can be linked
    made = Path(tempfile.mkdtemp(prefix=f"{folder.name}-with-head-", dir=folder.parent))
    try:
        made.chmod(0o755)  # the server may be another user's
        for file in [*files, folder / _CONFIG]:
            if file.is_file():
                _link(file, made / file.name)
        _write_head(source, made / _HEAD_FILE)
        yield made
    finally:
        shutil.rmtree(made, ignore_errors=True)


def _embedding_without_head(files: list[Path]) -> tuple[Path, str] | None:
    """The file and the name of the embedding, where there is no head."""
    found: tuple[Path, str] | None = None
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                if name.endswith(HEAD):
                    return None
                if name.endswith(_EMBEDDING):
                    found = file, name
    return found


def _write_head(source: tuple[Path, str], target: Path) -> None:
    file, name = source
    with safe_open(file, "pt") as tensors:
        save_file({HEAD: tensors.get_tensor(name)}, target, metadata={"format": "pt"})


def _link(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # a file system without links, or a file of another user
        shutil.copyfile(file, target)
