"""Files of questions that users have and that cannot be distributed, named by environment variables."""

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


def data_path(variable: str, what: str) -> Path:
    """The file or folder that an environment variable names."""
    if problem := path_problem(variable, f"{what}, by its absolute path"):
        raise ConfigError(problem)
    return Path(os.environ[variable])


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file: JSON lines, a JSON list (or a table with the key `data`), Parquet; .gz too."""
    try:
        if path.suffix == ".parquet":
            import pyarrow.parquet

            found: Any = pyarrow.parquet.read_table(path).to_pylist()
        else:
            packed = path.read_bytes()
            packed = gzip.decompress(packed) if path.suffix == ".gz" else packed
            text = decode_user_text(packed, str(path))
            is_lines = path.name.removesuffix(".gz").endswith(".jsonl")
            found = (
                [row for _, row in json_lines(text, str(path))]
                if is_lines
                else parse_user_json(text, str(path))
            )
    except (OSError, EOFError, ValueError, ImportError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from None
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
