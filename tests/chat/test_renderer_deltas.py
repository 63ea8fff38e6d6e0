"""Tokens appended turn by turn are those of the whole conversation; actions stay as sampled."""

from __future__ import annotations

import json
import subprocess
import sys
import weakref
from functools import cache

import pytest
from format_templates import (
    PRESERVING,
    REWRITING,
    LossyBytes,
    TemplatedBytes,
    fast_tokenizer,
    hf_tokenizer,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from ludus.chat import FORMATS, HFTokenizer, Renderer, load_format
from ludus.chat.renderer import MOST_BYTES, LruCache
from ludus.core import (
    ByteTokenizer,
    Completion,
    ConfigError,
    FinishReason,
    Message,
    Segment,
    SegmentKind,
    TokenSequence,
    ToolCall,
    ToolResult,
    ToolSpec,
)

LOOKUP = ToolSpec(
    "lookup",
    "Look a key up.",
    {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
)
EXAMPLES = settings.default.max_examples // 5
"""For each of many tokenizers, templates and formats."""

WORDS = st.text("abcé .,:+\n", min_size=1, max_size=12).map(str.strip).filter(bool)


@st.composite
def turns(draw):
    """What happens in an episode: actions with calls and their results, or answers and questions."""
    made = []
    for _ in range(draw(st.integers(1, 3))):
        said, results = draw(WORDS), draw(st.lists(WORDS, max_size=2))
        made.append((said, results, draw(WORDS), draw(st.booleans())))
    return made


@cache
def make_renderer(kind, template: str, format: str) -> Renderer:
    return Renderer(kind(template), load_format(format), "keep" if template in REWRITING else "strict")


def play(
    renderer: Renderer, opening: list[Message], script, tools
) -> tuple[list[Segment], list[Message]]:
    """An episode with scripted actions: its segments, and the conversation they stand for."""
    conversation = list(opening)
    sequence = TokenSequence([Segment(SegmentKind.PROMPT, renderer.prompt(opening, tools))])
    one_call = renderer.format.name in ("react", "plain", "harmony")
    for said, results, question, is_cut in script:
        calls = [ToolCall("lookup", {"key": r, "action": r}) for r in results][: 1 if one_call else 2]
        if renderer.format.name in ("tags", "fenced"):
            calls = [ToolCall("python", {"code": r}) for r in results]
        text = renderer.format.render_action(said, calls)
        tokens = renderer.action_tokens(text)
        if is_cut:
            assert tokens.pop() == renderer.end_of_turn
        conversation.append(Message("assistant", text))
        sequence.segments.append(Segment(SegmentKind.ACTION, tokens, [0.0] * len(tokens)))
        new = [
            renderer.format.render_result(c, ToolResult(r)) for c, r in zip(calls, results, strict=False)
        ]
        new = new or [Message("user", question)]
        step = renderer.next_context(sequence, conversation, new, tools)
        assert not step.restart
        conversation += new
        sequence.segments.append(Segment(SegmentKind.OBSERVATION, step.tokens))
    return sequence.segments, conversation


@pytest.mark.parametrize("kind", [TemplatedBytes, hf_tokenizer])
@pytest.mark.parametrize("format", sorted(FORMATS))
@pytest.mark.parametrize("template", sorted(PRESERVING))
@settings(max_examples=EXAMPLES)
@given(script=turns(), system=st.none() | WORDS, question=WORDS)
def test_appended_turns_read_like_the_whole_conversation(
    kind, template, format, script, system, question
):
    renderer = make_renderer(kind, template, format)
    opening = [Message("system", system)] if system else []
    segments, conversation = play(renderer, [*opening, Message("user", question)], script, [LOOKUP])
    played = renderer.tokenizer.decode([t for s in segments for t in s.tokens])
    assert played == renderer.tokenizer.decode(renderer.prompt(conversation, [LOOKUP]))


@pytest.mark.parametrize("template", ["chatml", "llama3", "trimming"])
@given(script=turns(), question=WORDS)
def test_the_text_is_the_templates_own(template, script, question):
    """The reference is the template itself, given the conversation as dictionaries."""
    renderer = make_renderer(hf_tokenizer, template, "plain")
    segments, conversation = play(renderer, [Message("user", question)], script, [])
    chat = [{"role": m.role.replace("tool", "user"), "content": m.content} for m in conversation]
    chat.insert(0, {"role": "system", "content": renderer.describe([])})
    played = renderer.tokenizer.decode([t for s in segments for t in s.tokens])
    assert played == renderer.tokenizer.apply_chat_template(chat, None, True)


@pytest.mark.parametrize("template", ["chatml", "mistral", "qwen3", "escaping"])
@given(script=turns(), said=st.lists(st.integers(0, 255), max_size=12))
def test_a_lossy_tokenizer_changes_no_action(template, script, said):
    renderer = make_renderer(LossyBytes, template, "hermes")
    segments, conversation = play(renderer, [Message("user", "Why  ME")], script, [LOOKUP])
    sampled = [*said, renderer.end_of_turn]
    sequence = TokenSequence([*segments, Segment(SegmentKind.ACTION, sampled, [0.0] * len(sampled))])
    conversation.append(
        Message("assistant", renderer.text_of(Completion(sampled, [], FinishReason.STOP_TOKEN)))
    )
    step = renderer.next_context(sequence, conversation, [Message("user", "x")], [LOOKUP])
    assert not step.restart
    assert sequence.segments[-1].tokens == sampled
    assert renderer.end_of_turn not in step.tokens[:1]


FRAMES = {
    "tags": ("\n<result>\n", "\n</result>\n"),
    "hermes": ("\n<tool_response>\n", "\n</tool_response>\n"),
    "fenced": ("\n<output>\n", "\n</output>\n"),
}
INLINE_CALLS = {
    "tags": "<python>\n{}\n</python>",
    "hermes": '<tool_call>\n{{"name": "python", "arguments": {{"code": "{}"}}}}\n</tool_call>',
    "fenced": "\n```python\n{}\n```\n",
}
CODE = st.text("abc 1+", min_size=1, max_size=8).map(str.strip).filter(bool)


@cache
def inline_renderer(kind, template: str, format: str) -> Renderer:
    return Renderer(kind(template), load_format(format), "keep", "inline")


@pytest.mark.parametrize("kind", [TemplatedBytes, hf_tokenizer])
@pytest.mark.parametrize("format", sorted(FRAMES))
@pytest.mark.parametrize("template", [*sorted(PRESERVING), *sorted(REWRITING)])
@settings(max_examples=EXAMPLES)
@given(script=st.lists(st.tuples(WORDS, CODE, WORDS), min_size=1, max_size=3), last=WORDS)
def test_inline_results_stand_raw_in_the_turn_that_called(kind, template, format, script, last):
    """The whole text is the prompt, and then words and results in turn, with nothing between them."""
    renderer = inline_renderer(kind, template, format)
    tokenizer = renderer.tokenizer
    opening = [Message("user", "Why?")]
    sequence = TokenSequence([Segment(SegmentKind.PROMPT, renderer.prompt(opening, [LOOKUP]))])
    conversation, expected = list(opening), tokenizer.decode(sequence.tokens)
    thought = "" if renderer.features.opens_thinking else "<think>"
    for number, (said, code, result) in enumerate(script):
        text = (thought if number == 0 else "") + said + INLINE_CALLS[format].format(code)
        sampled = tokenizer.encode(text)
        completion = Completion(sampled, [0.0] * len(sampled), FinishReason.STOP_STRING)
        read = renderer.text_of(completion, continues_turn=number > 0)
        parsed = renderer.format.parse(read)
        assert [call.arguments for call in parsed.calls] == [{"code": code}], "inside the open thought"
        message = renderer.format.render_result(parsed.calls[0], ToolResult(result))
        sequence.segments.append(Segment(SegmentKind.ACTION, sampled, completion.logprobs))
        conversation.append(Message("assistant", read, parsed.calls))
        step = renderer.next_context(sequence, conversation, [message], [LOOKUP])
        assert step.continues_turn and not step.restart
        conversation.append(message)
        sequence.segments.append(Segment(SegmentKind.OBSERVATION, step.tokens))
        ours = {tokenizer.controls.get(mark.strip()) for mark in FRAMES[format]}
        assert {t for t in step.tokens if t in tokenizer.controls.values()} <= ours
        expected += tokenizer.decode(sampled) + FRAMES[format][0] + result + FRAMES[format][1]
    assert tokenizer.decode(sequence.tokens) == expected
    # a message of the user's closes the turn, as it does in a chat
    chat = make_renderer(kind, template, format)
    words = tokenizer.encode(last)
    after = [*sequence.segments, Segment(SegmentKind.ACTION, words, [0.0] * len(words))]
    step = renderer.next_context(TokenSequence(after), conversation, [Message("user", "x")], [])
    assert not step.continues_turn and step.tokens == chat.observation(words, [Message("user", "x")])


@pytest.mark.parametrize("template", ["chatml", "llama3", "qwen3", "r1"])
@given(said=st.lists(st.integers(0, 255), max_size=12), result=WORDS)
def test_inline_actions_stay_as_sampled_with_a_lossy_tokenizer(template, said, result):
    renderer = inline_renderer(LossyBytes, template, "tags")
    prompt = renderer.prompt([Message("user", "Why  ME")], [LOOKUP])
    sampled = [*said, *b"<python>1</python>"]
    sequence = TokenSequence(
        [
            Segment(SegmentKind.PROMPT, list(prompt)),
            Segment(SegmentKind.ACTION, list(sampled), [0.0] * len(sampled)),
        ]
    )
    step = renderer.next_context(sequence, [], [Message("tool", result)], [LOOKUP])
    assert step.continues_turn and sequence.tokens == [*prompt, *sampled]
    framed = [*b"\n<result>\n", *renderer.tokenizer.encode_text(result), *b"\n</result>\n"]
    assert step.tokens == framed


class TestInline:
    renderer = Renderer(ByteTokenizer(), load_format("tags", result="information"), turns="inline")
    end = 257  # <|im_end|>

    def test_a_turn_that_the_model_closed_is_closed(self):
        """Nothing raw follows an end-of-turn token: the result is a message, as in a chat."""
        chat = Renderer(ByteTokenizer(), load_format("tags", result="information"))
        result = [Message("tool", "x")]
        assert self.renderer.observation([104, self.end], result) == chat.observation(
            [104, self.end], result
        )

    def test_a_user_who_speaks_after_a_result_closes_the_turn(self):
        tokens = self.renderer.observation([104], [Message("tool", "x"), Message("user", "y")])
        assert self.renderer.tokenizer.decode(tokens) == (
            "\n<information>\nx\n</information>\n<|im_end|>\n"
            "<|im_start|>user\ny<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_what_cannot_be_inline_is_refused(self):
        for name in ("llama3", "react", "plain"):
            with pytest.raises(ConfigError, match="choose tags, hermes or fenced"):
                Renderer(ByteTokenizer(), load_format(name), turns="inline")
        with pytest.raises(ConfigError, match="history='keep'"):
            Renderer(ByteTokenizer(), load_format("tags"), "split", "inline")
        with pytest.raises(ConfigError, match="'chat' or 'inline'"):
            Renderer(ByteTokenizer(), load_format("tags"), turns="online")


class TestEndOfTurn:
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    end = 257  # <|im_end|>

    def test_said_by_the_model_it_is_not_repeated(self):
        tokens = self.renderer.observation([104, self.end], [Message("user", "x")])
        assert (
            self.renderer.tokenizer.decode(tokens)
            == "\n<|im_start|>user\nx<|im_end|>\n<|im_start|>assistant\n"
        )

    @pytest.mark.parametrize("action", [[104], []])
    def test_not_said_it_is_part_of_the_observation(self, action):
        tokens = self.renderer.observation(action, [Message("user", "x")])
        assert tokens[0] == self.end

    def test_another_stop_token_does_not_stand_for_it(self):
        tokenizer = hf_tokenizer("chatml")
        renderer = Renderer(tokenizer, load_format("hermes"))
        eos = tokenizer.controls["<|endoftext|>"]
        assert (
            renderer.observation([eos], [])[0]
            == tokenizer.controls["<|im_end|>"]
            == renderer.end_of_turn
        )

    def test_an_experts_action_ends_with_it(self):
        tokens = self.renderer.action_tokens('<tool_call>\n{"name": "a"}\n</tool_call>')
        assert tokens[0] == 259
        assert tokens[-2:] == [260, self.end]

    def test_white_space_before_it_is_left_out_with_it(self):
        class Spaced(ByteTokenizer):
            def apply_chat_template(self, messages, tools, add_generation_prompt):
                text = super().apply_chat_template(messages, tools, add_generation_prompt)
                return text.replace("<|im_end|>", " <|im_end|>")

        renderer = Renderer(Spaced(), load_format("hermes"))
        said = renderer.observation([104, self.end], [])
        assert renderer.tokenizer.decode(said) == "\n<|im_start|>assistant\n"


class TestText:
    def test_the_stop_token_is_not_text(self):
        renderer = Renderer(ByteTokenizer(), load_format("hermes"))
        completion = Completion([104, 105, 257], [0.0] * 3, FinishReason.STOP_TOKEN)
        assert renderer.text_of(completion) == "hi"

    def test_a_thought_that_the_prompt_opened_is_part_of_the_text(self):
        renderer = Renderer(hf_tokenizer("r1"), load_format("hermes"), "keep")
        tokens = renderer.tokenizer.encode("hm\n</think>\n\nyes")
        text = renderer.text_of(Completion(tokens, [0.0] * len(tokens), FinishReason.LENGTH))
        assert text == "<think>\nhm\n</think>\n\nyes"
        assert renderer.format.parse(text).answer == "yes"
        assert renderer.action_tokens(text)[:-1] == tokens

    def test_an_expert_without_thoughts_closes_the_one_that_is_open(self):
        renderer = Renderer(hf_tokenizer("r1"), load_format("hermes"), "keep")
        assert renderer.tokenizer.decode(renderer.action_tokens("yes")).startswith("\n</think>\n\nyes")


class TestRewrittenHistory:
    @pytest.mark.parametrize("template", sorted(REWRITING))
    def test_strict_refuses_and_names_both_choices(self, template):
        with pytest.raises(ConfigError, match=r"thinking before a new user message.*'keep'.*'split'"):
            Renderer(hf_tokenizer(template), load_format("hermes"))

    @pytest.mark.parametrize("template", sorted(PRESERVING))
    def test_templates_that_preserve_prefixes_are_not_refused(self, template):
        assert Renderer(hf_tokenizer(template), load_format("hermes")).preserves_prefixes

    def test_unknown_choices_are_refused(self):
        with pytest.raises(ConfigError, match="history"):
            Renderer(ByteTokenizer(), load_format("hermes"), "drop")  # type: ignore[arg-type]

    def conversation(self, renderer: Renderer, text: str) -> tuple[TokenSequence, list[Message]]:
        opening = [Message("user", "why")]
        tokens = renderer.action_tokens(text)
        prompt = Segment(SegmentKind.PROMPT, renderer.prompt(opening, [LOOKUP]))
        sequence = TokenSequence([prompt, Segment(SegmentKind.ACTION, tokens, [0.0] * len(tokens))])
        return sequence, [*opening, Message("assistant", text)]

    def test_keep_appends_to_the_history_as_generated(self):
        renderer = Renderer(hf_tokenizer("qwen3"), load_format("hermes"), "keep")
        sequence, conversation = self.conversation(renderer, "<think>\nhm\n</think>\n\nyes")
        step = renderer.next_context(sequence, conversation, [Message("user", "so?")], [LOOKUP])
        assert not step.restart
        assert (
            renderer.tokenizer.decode(step.tokens)
            == "\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n"
        )

    def test_split_starts_again_when_thinking_is_dropped(self):
        renderer = Renderer(hf_tokenizer("qwen3"), load_format("hermes"), "split")
        sequence, conversation = self.conversation(renderer, "<think>\nhm\n</think>\n\nyes")
        step = renderer.next_context(sequence, conversation, [Message("user", "so?")], [LOOKUP])
        assert step.restart
        text = renderer.tokenizer.decode(step.tokens)
        assert "hm" not in text
        assert text.endswith("\nyes<|im_end|>\n<|im_start|>user\nso?<|im_end|>\n<|im_start|>assistant\n")

    def test_split_appends_while_nothing_is_rewritten(self):
        """Such templates keep the thinking that belongs to the question at hand: tool results go on."""
        renderer = Renderer(hf_tokenizer("qwen3"), load_format("hermes"), "split")
        call = renderer.format.render_action("", [ToolCall("lookup", {"key": "k"})])
        sequence, conversation = self.conversation(renderer, f"<think>\nhm\n</think>\n\n{call}")
        step = renderer.next_context(sequence, conversation, [Message("tool", "v")], [LOOKUP])
        assert not step.restart
        whole = renderer.prompt([*conversation, Message("tool", "v")], [LOOKUP])
        assert sequence.tokens + step.tokens == whole

    def test_split_notices_what_the_prompt_opened(self):
        renderer = Renderer(hf_tokenizer("r1"), load_format("hermes"), "split")
        sequence, conversation = self.conversation(renderer, "<think>\nhm\n</think>\n\nyes")
        assert renderer.next_context(sequence, conversation, [Message("user", "so?")]).restart


class TestWhatTheTemplateCanDo:
    def test_tools_go_through_the_template_that_writes_calls_as_the_format_reads_them(self):
        hermes = Renderer(hf_tokenizer("chatml"), load_format("hermes"))
        llama = Renderer(hf_tokenizer("llama3"), load_format("llama3"))
        for renderer in (hermes, llama):
            assert renderer.describe([LOOKUP]) is None
            assert "Look a key up." in renderer.tokenizer.decode(
                renderer.prompt([Message("user", "?")], [LOOKUP])
            )

    @pytest.mark.parametrize(
        ("template", "format"), [("llama3", "hermes"), ("chatml", "llama3"), ("moving tools", "hermes")]
    )
    def test_otherwise_the_system_prompt_describes_them(self, template, format):
        renderer = Renderer(hf_tokenizer(template), load_format(format))
        text = renderer.tokenizer.decode(
            renderer.prompt([Message("system", "Be kind."), Message("user", "?")], [LOOKUP])
        )
        description = renderer.describe([LOOKUP])
        assert description is not None
        assert text.count(f"Be kind.\n\n{description}") == 1

    def test_without_a_system_role_the_first_message_takes_it(self):
        renderer = Renderer(hf_tokenizer("mistral"), load_format("hermes"))
        text = renderer.tokenizer.decode(
            renderer.prompt([Message("system", "Be kind."), Message("user", "why")], [LOOKUP])
        )
        assert text.startswith("<s>[INST] # Tools")
        assert text.endswith("Be kind.\n\nwhy [/INST]")

    def test_without_a_tool_role_results_come_from_the_user(self):
        renderer = Renderer(hf_tokenizer("mistral"), load_format("hermes"))
        tokens = renderer.observation([], [Message("tool", "a"), Message("tool", "b")])
        assert renderer.tokenizer.decode(tokens) == (
            "</s>[INST] <tool_response>\na\n</tool_response>\n\n"
            "<tool_response>\nb\n</tool_response> [/INST]"
        )

    @pytest.mark.parametrize(
        ("format", "shown"),
        [
            ("hermes", "tool\n5"),
            ("llama3", "tool\n5"),
            ("tags", "user\n<result>\n5\n</result>"),
            ("fenced", "user\n<output>\n5\n</output>"),
            ("react", "user\nObservation: 5"),
            ("plain", "user\n5"),
        ],
    )
    def test_a_result_is_recorded_as_a_tools_and_shown_as_the_format_has_it(self, format, shown):
        renderer = Renderer(ByteTokenizer(), load_format(format))
        message = renderer.format.render_result(ToolCall("python", id="call_1"), ToolResult("5"))
        assert message == Message("tool", "5", name="python", tool_call_id="call_1")
        text = renderer.tokenizer.decode(renderer.observation([], [message]))
        assert text.endswith(f"<|im_start|>{shown}<|im_end|>\n<|im_start|>assistant\n")

    def test_results_come_from_the_user_where_only_users_open_a_thought(self):
        class Thinking(ByteTokenizer):
            def apply_chat_template(self, messages, tools, add_generation_prompt):
                text = super().apply_chat_template(messages, None, add_generation_prompt)
                thinks = add_generation_prompt and messages[-1]["role"] == "user"
                return text + "<think>\n" if thinks else text

        renderer = Renderer(Thinking(), load_format("hermes"), "keep")
        text = renderer.tokenizer.decode(renderer.observation([], [Message("tool", "v")]))
        assert text.endswith(
            "user\n<tool_response>\nv\n</tool_response><|im_end|>\n<|im_start|>assistant\n<think>\n"
        )

    def test_calls_given_as_data_are_written_as_the_format_writes_them(self):
        renderer = Renderer(ByteTokenizer(), load_format("hermes"))
        call = ToolCall("lookup", {"key": "k"})
        prompt = renderer.prompt(
            [Message("user", "?"), Message("assistant", "Hm.", (call,)), Message("tool", "v")]
        )
        written = json.dumps({"name": "lookup", "arguments": {"key": "k"}})
        assert f"Hm.\n<tool_call>\n{written}\n</tool_call><|im_end|>" in renderer.tokenizer.decode(
            prompt
        )

    def test_a_template_that_renders_nothing_is_refused(self):
        class Mute(ByteTokenizer):
            def apply_chat_template(self, messages, tools, add_generation_prompt):
                return "<|im_start|>"

        with pytest.raises(ConfigError, match="plain conversation"):
            Renderer(Mute(), load_format("hermes"))

    def test_bound_to_tools(self):
        renderer = Renderer(ByteTokenizer(), load_format("tags"))
        bound = renderer.bound([LOOKUP])
        assert bound.format.parse("<lookup>k</lookup>").calls == (ToolCall("lookup", {"key": "k"}),)
        assert "<lookup>" in bound.tokenizer.decode(bound.prompt([Message("user", "?")], [LOOKUP]))
        hermes = Renderer(ByteTokenizer(), load_format("hermes"))
        assert hermes.bound([LOOKUP]) is hermes


class TestBoundToTools:
    """Episodes with the same tools share a renderer, and what one of them has rendered."""

    @staticmethod
    def spec(name: str, about: str = "Do it.") -> ToolSpec:
        return ToolSpec(name, about, {"type": "object", "properties": {"x": {"type": "string"}}})

    def test_the_same_tools_share_and_others_do_not(self):
        renderer = Renderer(hf_tokenizer("chatml"), load_format("tags"))
        one = renderer.bound([self.spec("a")])
        assert renderer.bound([self.spec("a")]) is one
        assert one.format.marks != renderer.format.marks
        for others in ([self.spec("b")], [self.spec("a", "Or not.")], [self.spec("a"), self.spec("b")]):
            assert renderer.bound(others) is not one
        other = ToolSpec("a", "Do it.", {"type": "object", "properties": {"y": {"type": "integer"}}})
        assert renderer.bound([other]) is not one
        messages = [Message("user", "?")]
        said = {renderer.tokenizer.decode(renderer.bound([s]).prompt(messages, [s]))
                for s in (self.spec("a"), self.spec("b"), self.spec("a", "Or not."))}  # fmt: skip
        assert len(said) == 3

    def test_a_second_episode_renders_nothing_anew(self, monkeypatch):
        renderer = Renderer(hf_tokenizer("chatml"), load_format("tags"))
        tools = [self.spec("a")]
        call = ToolCall("a", {"x": "1"}, id="call")
        asked = []
        known = type(renderer.tokenizer).apply_chat_template
        monkeypatch.setattr(
            type(renderer.tokenizer),
            "apply_chat_template",
            lambda *given: asked.append(given) or known(*given),
        )
        seen = []
        for _ in range(2):
            asked.clear()
            by = renderer.bound([self.spec("a")])
            prompt = by.prompt([Message("user", "?")], tools)
            said = by.action_tokens(by.format.render_action("", [call]))
            result = by.format.render_result(call, ToolResult("yes"))
            seen.append((prompt, said, by.observation(said, [result], tools), len(asked)))
        assert seen[0][:3] == seen[1][:3]
        assert seen[0][3] > 0 and seen[1][3] == 0

    def test_lists_of_tools_that_come_by_the_hundred_are_not_all_kept(self):
        renderer = Renderer(hf_tokenizer("chatml"), load_format("tags"))
        first = renderer.bound([self.spec("tool0")])
        for number in range(1, 200):
            renderer.bound([self.spec(f"tool{number}")])
        assert renderer.bound([self.spec("tool0")]) is not first


class TestTools:
    @pytest.mark.parametrize(
        "format", [load_format("fenced"), load_format("tags", tags={"python": "python.code"})]
    )
    def test_a_format_in_which_no_tool_can_be_called_is_refused(self, format, caplog):
        renderer = Renderer(hf_tokenizer("chatml"), format)
        with pytest.raises(ConfigError, match=r"has no way to call lookup: say how in agent\.format"):
            renderer.bound([LOOKUP])
        assert not caplog.records
        python = ToolSpec(
            "python", "Run it.", {"type": "object", "properties": {"code": {"type": "string"}}}
        )
        renderer.bound([python])
        assert not caplog.records
        renderer.bound([python, LOOKUP])
        assert "has no way to call lookup" in caplog.text

    @pytest.mark.parametrize("format", sorted(set(FORMATS) - {"fenced"}))
    def test_the_others_reach_any(self, format, caplog):
        Renderer(hf_tokenizer("chatml"), load_format(format)).bound([LOOKUP])
        assert not caplog.records


class TestPlaceholders:
    WORD = f"zq{'0123456789abcdef01234567'}x5z"

    @pytest.mark.parametrize("written", [WORD, f"{WORD} ", f"{WORD}{WORD[1:]}", "zq"])
    def test_words_of_their_kind_in_a_template_stay_text(self, written):
        """They are nobody's content, even right before some."""
        template = (
            "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'user' %}WRITTEN{% endif %}"
            "{{ m.content }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        ).replace("WRITTEN", written)
        renderer = Renderer(HFTokenizer(fast_tokenizer(), chat_template=template), load_format("plain"))
        text = renderer.tokenizer.decode(renderer.prompt([Message("user", "ab <|im_end|> c")]))
        assert written + "ab <|im_end|> c<|im_end|>\n" in text
        tokens = renderer.prompt([Message("user", "ab <|im_end|> c")])
        assert tokens.count(renderer.tokenizer.controls["<|im_end|>"]) == text.count("<|im_end|>") - 1

    def test_many_contents_find_their_places(self):
        renderer = Renderer(hf_tokenizer("chatml"), load_format("hermes"))
        messages = [Message(("user", "assistant")[i % 2], f"<|im_end|> number {i}") for i in range(25)]
        tokens = renderer.prompt(messages)
        text = renderer.tokenizer.decode(tokens)
        assert all(f"<|im_end|> number {i}<|im_end|>" in text for i in range(25))
        assert tokens.count(renderer.tokenizer.controls["<|im_end|>"]) == 25


class TestRecent:
    def test_the_least_recently_used_goes_first(self):
        kept = LruCache(2)
        for key in ("a", "b", "a", "c"):
            kept.get(key, lambda key=key: [key])
        assert kept.get("a", lambda: ["anew"]) == ["a"]
        assert kept.get("b", lambda: ["anew"]) == ["anew"]

    def test_large_things_leave_less_room(self):
        kept = LruCache(10, len)
        for key, size in (("a", 4), ("b", 4), ("c", 5), ("huge", 100)):
            kept.get(key, lambda size=size: [0] * size)
        assert [key for key in ("huge", "a", "b", "c") if kept.get(key, list)] == []
        assert kept.get("d", lambda: [0] * 10) == [0] * 10
        assert kept.get("d", list) == [0] * 10

    def test_threads_share_it(self):
        """In a process of its own: a dictionary that threads change half at a time ends the interpreter."""
        program = """
import sys, threading
from ludus.chat.renderer import LruCache
from ludus.chat.chat_template import ChatEntry, Piece

sys.setswitchinterval(1e-6)
kept = LruCache(16)

def use(seed):
    for number in range(4000):
        one = (seed * 7 + number * 13) % 40
        found = kept.get(("x", (ChatEntry("user", (Piece(f"text {one}"),)),)), lambda: one)
        assert found == one

threads = [threading.Thread(target=use, args=(seed,)) for seed in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert len(kept._kept) == kept._total == 16
"""
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, timeout=100
        )
        assert (done.returncode, done.stderr) == (0, "")


def test_long_lists_of_tools_and_long_names_do_not_fill_the_memory():
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    tools = [ToolSpec(f"tool{i}", "word " * 400, {"type": "object"}) for i in range(20)]
    for number in range(300):
        renderer.prompt([Message("user", f"{number}?")], tools)
        renderer.observation([], [Message("tool", "x", name="n" * 5000, tool_call_id=f"{number}")])
    cache = renderer._cache
    assert 0 < cache._total <= MOST_BYTES
    assert sum(len(tokens) for tokens in cache._kept.values()) * 4 <= MOST_BYTES
    assert all("n" * 5000 not in repr(key) for key in cache._kept)


def test_a_renderer_that_nobody_has_any_more_is_gone_at_once():
    renderer = Renderer(ByteTokenizer(), load_format("hermes"))
    renderer.bound([LOOKUP]).prompt([Message("user", "?")], [LOOKUP])
    seen = weakref.ref(renderer)
    del renderer
    assert seen() is None
