"""Prebuilt environments, each with tasks, rewards and a demonstrator (docs/envs.md).

Here is what they share: files that cannot be distributed, which users bring and environment variables name.
"""

from __future__ import annotations

import gzip
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ludus.core.failures import ConfigError
from ludus.core.user_files import decode_user_text, json_lines, parse_user_json
from ludus.envs.world import path_problem

ENDINGS = (".jsonl", ".json", ".parquet", ".jsonl.gz", ".json.gz")
"""The files that hold rows."""


def data_path(variables: str, what: str) -> Path:
    """The file or folder that an environment variable (the first of `A|B` that is set) names."""
    if problem := path_problem(variables, f"{what}, by its absolute path"):
        raise ConfigError(problem)
    return Path(next(os.environ[name] for name in variables.split("|") if os.environ.get(name)))


def read_file(path: Path) -> Any:
    """The content of a file: JSON, the rows of JSON lines or of Parquet; .gz too."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            return pyarrow.parquet.read_table(path).to_pylist()
        packed = path.read_bytes()
        text = decode_user_text(gzip.decompress(packed) if path.suffix == ".gz" else packed, str(path))
        if path.name.removesuffix(".gz").endswith(".jsonl"):
            return [row for _, row in json_lines(text, str(path))]
        return parse_user_json(text, str(path))
    except (OSError, EOFError, ValueError, ImportError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: those of `read_file`, of a JSON list or of a table with the key `data`."""
    found = read_file(path)
    rows = found.get("data", [found]) if isinstance(found, Mapping) else found
    if not isinstance(rows, list) or not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"{path} holds no rows: it needs a list of tables")
    return rows


def files_of(folder: Path, *words: str) -> list[Path]:
    """The files with rows below a folder with one of these words in their path there, sorted; or the file."""
    if not folder.is_dir():
        return [folder]
    found = sorted(path for path in folder.rglob("*") if path.name.endswith(ENDINGS))
    return [one for one in found if any(word in str(one.relative_to(folder)).lower() for word in words)]
