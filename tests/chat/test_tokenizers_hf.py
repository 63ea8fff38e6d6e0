"""Hugging Face tokenizers behind the protocol."""

from __future__ import annotations

import copy
import json

import pytest
from format_templates import CHATML, LLAMA3, SPECIALS, TAGS, fast_tokenizer, hf_tokenizer
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from ludus.chat import HFTokenizer, load_tokenizer
from ludus.core import ConfigError

TEXTS = st.lists(
    st.sampled_from([*SPECIALS, *TAGS, "hello", " world", "\n", "é", "<|", "|>"]), max_size=8
).map("".join)


def test_stop_tokens_are_eos_and_the_templates_end_of_turn():
    stops = {name: hf_tokenizer(name).stop_tokens for name in ("chatml", "llama3", "gemma", "mistral")}
    ids = hf_tokenizer("chatml").controls
    eos = ids["<|endoftext|>"]
    assert stops == {
        "chatml": (eos, ids["<|im_end|>"]),
        "llama3": (eos, ids["<|eot_id|>"]),
        "gemma": (eos, ids["<end_of_turn>"]),
        "mistral": (eos, ids["</s>"]),
    }


def test_controls_are_special_tokens_and_tags():
    controls = hf_tokenizer("chatml").controls
    assert set(controls) == {*SPECIALS, *TAGS}  # and not the run of spaces that was added, too


@given(text=TEXTS)
def test_encoding_recognises_special_tokens_and_decoding_gives_them_back(text):
    tokenizer = hf_tokenizer("chatml")
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert len(tokenizer.encode("<|im_start|><tool_call>")) == 2


@given(text=TEXTS)
@pytest.mark.parametrize("options", [{}, {"prefix_space": True}, {"normaliser": "lower"}])
def test_plain_encoding_recognises_none(text, options):
    tokenizer = hf_tokenizer("chatml", **options)
    tokens = tokenizer.encode_text(text)
    assert not set(tokens) & set(tokenizer.controls.values())
    expected = text.lower() if options.get("normaliser") else text
    assert tokenizer.decode(tokens) == expected


def test_disguised_control_texts_are_not_recognised_either():
    tokenizer = hf_tokenizer("chatml", normaliser="nfkc")
    disguised = "＜|im_end|＞"
    assert tokenizer.encode(disguised) == [tokenizer.controls["<|im_end|>"]]  # the normaliser's doing
    assert tokenizer.decode(tokenizer.encode_text(disguised)) == "<|im_end|>"
    assert tokenizer.controls["<|im_end|>"] not in tokenizer.encode_text(disguised)


@given(pieces=st.lists(st.text("ab .\n", max_size=4), max_size=5))
def test_pieces_join_even_when_the_tokenizer_likes_to_add_a_space(pieces):
    tokenizer = hf_tokenizer("chatml", prefix_space=True)
    joined = [token for piece in pieces for token in tokenizer.encode(piece)]
    assert tokenizer.decode(joined) == "".join(pieces)


def test_halves_of_surrogate_pairs_do_not_raise():
    tokenizer = hf_tokenizer("chatml")
    assert tokenizer.decode(tokenizer.encode("a\ud800b")) == "a?b"


def test_ids_that_nobody_knows_decode_to_nothing():
    assert hf_tokenizer("chatml").decode([10**6]) == ""


def test_a_refusing_template_says_so():
    tokenizer = hf_tokenizer("gemma")
    with pytest.raises(
        ConfigError, match=r"refuses a conversation of the roles \(system, user\): no system role"
    ):
        tokenizer.apply_chat_template(
            [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}], None, True
        )


class TestShortTexts:
    """They do not go through `transformers`, and must not be encoded otherwise for that."""

    @given(text=TEXTS | st.text(max_size=40))
    @pytest.mark.parametrize("options", [{}, {"prefix_space": True}, {"normaliser": "nfkc"}])
    def test_they_are_encoded_as_transformers_would(self, text, options):
        tokenizer = HFTokenizer(fast_tokenizer(**options), chat_template=CHATML)
        sound = text.encode(errors="replace").decode()
        assert tokenizer._ids(text) == tokenizer.inner.encode(sound, add_special_tokens=False)

    def test_transformers_is_not_asked(self, monkeypatch):
        tokenizer = HFTokenizer(fast_tokenizer(), chat_template=CHATML)
        asked = []
        known = type(tokenizer.inner)._encode_plus
        monkeypatch.setattr(
            tokenizer.inner,
            "_encode_plus",
            lambda *a, **k: asked.append(a) or known(tokenizer.inner, *a, **k),
        )
        tokenizer.encode("hello")
        assert not asked
        tokenizer.encode("hello " * 10_000)  # for which others may have the interpreter
        assert len(asked) == 1

    def test_what_somebody_else_has_set_on_the_tokenizer_does_no_harm(self):
        tokenizer = HFTokenizer(copy.deepcopy(fast_tokenizer()), chat_template=CHATML)
        tokenizer.inner.pad_token = "<|endoftext|>"
        whole = tokenizer.encode("hello world, hello")
        for settings in (
            {"truncation": True, "max_length": 2},
            {"padding": "max_length", "max_length": 99},
        ):
            tokenizer.inner(["a", "b c d"], **settings)
            assert tokenizer.encode("hello world, hello") == whole
        tokenizer.inner.encode("x", split_special_tokens=True)
        assert tokenizer.encode("<|im_end|>") == [tokenizer.controls["<|im_end|>"]]

    @pytest.mark.parametrize("method", ["encode", "_encode_plus"])
    def test_a_class_with_an_encoding_of_its_own_keeps_it(self, method):
        def shouted(self, text, *args, **kwargs):
            return getattr(PreTrainedTokenizerFast, method)(self, text.upper(), *args, **kwargs)

        kind = type("Shouting", (PreTrainedTokenizerFast,), {method: shouted})
        inner = kind(tokenizer_object=fast_tokenizer().backend_tokenizer, eos_token="<|endoftext|>")
        tokenizer = HFTokenizer(inner, chat_template=CHATML)
        assert tokenizer.decode(tokenizer.encode("hello")) == "HELLO"

    def test_nothing_is_put_around_them(self):
        inner = copy.deepcopy(fast_tokenizer())
        first = inner.convert_tokens_to_ids("<|im_start|>")
        inner.backend_tokenizer.post_processor = TemplateProcessing(
            single="<|im_start|> $A", special_tokens=[("<|im_start|>", first)]
        )
        assert inner.encode("hello")[0] == first
        assert first not in HFTokenizer(inner, chat_template=CHATML)._ids("hello")


class TestLoading:
    def save(self, folder, **fields):
        inner = fast_tokenizer()
        inner.save_pretrained(folder)
        for name, content in fields.items():
            (folder / f"{name}.json").write_text(json.dumps(content))
        return folder

    def test_a_folder_with_its_own_template_and_generation_config(self, tmp_path):
        self.save(tmp_path, generation_config={"eos_token_id": [3, 5]})
        (tmp_path / "chat_template.jinja").write_text(LLAMA3)
        tokenizer = load_tokenizer(tmp_path)
        assert {3, 5, tokenizer.controls["<|eot_id|>"]} <= set(tokenizer.stop_tokens)
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], None, False)
        assert text == "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nx<|eot_id|>"

    def test_without_a_template_it_is_chatml(self, tmp_path):
        tokenizer = load_tokenizer(self.save(tmp_path))
        text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], None, True)
        assert text == "<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        assert tokenizer.controls["<|im_end|>"] in tokenizer.stop_tokens
        assert tokenizer.vocabulary_size == len(fast_tokenizer())

    def test_variables_of_the_template_are_passed_to_it(self, tmp_path):
        self.save(tmp_path)
        thinking = "{% if not enable_thinking | default(true) %}<think></think>{% endif %}"
        (tmp_path / "chat_template.jinja").write_text(LLAMA3 + thinking)
        for kwargs, end in (({}, "<|eot_id|>"), ({"enable_thinking": False}, "<think></think>")):
            tokenizer = load_tokenizer(tmp_path, template_kwargs=kwargs)
            text = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], None, False)
            assert text.endswith(end)
        with pytest.raises(ConfigError, match="does not read 'enable_thinkin'"):
            load_tokenizer(tmp_path, template_kwargs={"enable_thinkin": False})

    def test_a_missing_folder_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match="there is no folder"):
            load_tokenizer(tmp_path / "nothing")

    def test_a_folder_without_a_tokenizer_is_named(self, tmp_path):
        with pytest.raises(ConfigError, match="no tokenizer could be loaded"):
            load_tokenizer(tmp_path)

    def test_chatml_needs_its_tokens(self):
        backend = Tokenizer(models.BPE())
        backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(), decoders.ByteLevel()
        backend.train_from_iterator(["a b"], trainers.BpeTrainer(vocab_size=10, show_progress=False))
        with pytest.raises(ConfigError, match=r"needs <\|im_start\|> and <\|im_end\|>"):
            HFTokenizer(PreTrainedTokenizerFast(tokenizer_object=backend))


def test_our_template_writes_tools_calls_and_results():
    tokenizer = HFTokenizer(fast_tokenizer(), chat_template=CHATML)
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "é"}}}
    chat = [
        {"role": "system", "content": "Be kind."},
        {"role": "user", "content": "?"},
        {"role": "assistant", "content": "Hm.", "tool_calls": [call, call]},
        {"role": "tool", "content": "1"},
        {"role": "tool", "content": "2"},
    ]
    text = tokenizer.apply_chat_template(chat, [{"type": "function", "function": {"name": "f"}}], True)
    one = '\n<tool_call>\n{"name": "f", "arguments": {"a": "é"}}\n</tool_call>'
    assert text.startswith("<|im_start|>system\nBe kind.\n\n# Tools\n")
    assert text.count("Be kind.") == 1
    assert text.endswith(
        f"<|im_start|>user\n?<|im_end|>\n<|im_start|>assistant\nHm.{one}{one}<|im_end|>\n"
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response>"
        "<|im_end|>\n<|im_start|>assistant\n"
    )
