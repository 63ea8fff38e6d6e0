"""What each action format reads in a text, well-formed or not."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ludus.chat import FORMATS, ActionFormat, load_format
from ludus.chat.formats import NATIVE
from ludus.chat.formats.base import MAX_CALLS
from ludus.chat.formats.fenced import LANGUAGES
from ludus.core import ConfigError, Fault, Task, ToolCall, ToolContext, ToolSpec
from ludus.tools.library import build_toolset

ADD = ToolSpec(
    "add",
    "Add two numbers.",
    {
        "type": "object",
        "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
        "required": ["a", "b"],
    },
)
LOOKUP = ToolSpec(
    "lookup",
    "Look a key up.",
    {"type": "object", "properties": {"key": {"type": "string"}, "limit": {}}, "required": ["key"]},
)
HELP = ToolSpec("help", "Say what can be done.", {"type": "object", "properties": {}})
LOOK_K = ToolCall("lookup", {"key": "k"})
EVERY = sorted(FORMATS)


def faulty(format: ActionFormat, text: str) -> str:
    """The problem of the one malformed call in `text`."""
    (call,) = format.parse(text).calls
    assert call.fault is Fault.MALFORMED_CALL
    return call.problem


class TestHermes:
    format = load_format("hermes")

    def test_a_call_with_text_around(self):
        parsed = self.format.parse(
            'Let me see.\n<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>\nDone.'
        )
        assert parsed.calls == (ToolCall("add", {"a": 1}),)
        assert parsed.text == "Let me see.\n\nDone."
        assert parsed.answer is None

    def test_several_calls_keep_their_order(self):
        text = "".join(f'<tool_call>{{"name": "t{i}", "arguments": {{}}}}</tool_call>' for i in range(5))
        assert [call.name for call in self.format.parse(text).calls] == ["t0", "t1", "t2", "t3", "t4"]

    def test_text_without_a_call_is_the_answer(self):
        parsed = self.format.parse("<think>\nsum\n</think>\n\nIt is 5.")
        assert (parsed.answer, parsed.thought, parsed.calls) == ("It is 5.", "sum", ())

    def test_calls_in_a_thought_are_not_made(self):
        parsed = self.format.parse('<think><tool_call>{"name": "x"}</tool_call></think>no')
        assert (parsed.calls, parsed.answer) == ((), "no")

    def test_the_closing_tag_may_stand_in_a_string(self):
        parsed = self.format.parse(
            '<tool_call>{"name": "echo", "arguments": {"text": "a </tool_call> b"}}</tool_call>'
        )
        assert parsed.calls == (ToolCall("echo", {"text": "a </tool_call> b"}),)

    @pytest.mark.parametrize(
        "body",
        [
            '{"name": "add", "parameters": {"a": 1}}',
            '{"name": "add", "arguments": "{\\"a\\": 1}"}',
            '{"id": "7", "type": "function", "name": " add ", "arguments": {"a": 1}}',
        ],
    )
    def test_gentle_repairs(self, body):
        assert self.format.parse(f"<tool_call>{body}</tool_call>").calls == (ToolCall("add", {"a": 1}),)

    @pytest.mark.parametrize(
        "body",
        ['{"name": "now"}', '{"name": "now", "arguments": null}', '{"name": "now", "arguments": ""}'],
    )
    def test_no_arguments_are_none(self, body):
        assert self.format.parse(f"<tool_call>{body}</tool_call>").calls == (ToolCall("now"),)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ('<tool_call>{"name": "add", "arguments": {}', "</tool_call> is missing"),
            ('{"name": "add", "arguments": {}}</tool_call>', "<tool_call> is missing"),
            ("<tool_call>{name: add}</tool_call>", "not valid JSON"),
            ("<tool_call></tool_call>", "not valid JSON"),
            ("<tool_call>[1]</tool_call>", "JSON object"),
            ('<tool_call>{"name": "a"} {"name": "b"}</tool_call>', "something follows"),
            ('<tool_call>{"arguments": {}}</tool_call>', '"name"'),
            ('<tool_call>{"name": 5}</tool_call>', '"name"'),
            ('<tool_call>{"name": "add", "a": 1}</tool_call>', 'unknown key "a"'),
            (
                '<tool_call>{"name": "add", "arguments": [1]}</tool_call>',
                "must be an object, not a list",
            ),
            ('<tool_call>{"name": "add", "arguments": "x"}</tool_call>', "not valid JSON"),
            ('<tool_call>{"name": "add", "arguments": {}, "parameters": {}}</tool_call>', "not both"),
            ('<tool_call>{"name": "a", "name": "b"}</tool_call>', '"name" is given twice'),
            ('<tool_call>{"name": "a", "arguments": {"x": NaN}}</tool_call>', "NaN"),
            ('<tool_call>{"name": "a", "arguments": {"x": 1e999}}</tool_call>', "too large"),
            ('<tool_call>{"name": "a", "arguments": {"x": "\\ud800"}}</tool_call>', "surrogate"),
            (
                f'<tool_call>{{"name": "a", "arguments": {{"x": {"9" * 5000}}}}}</tool_call>',
                "too many digits",
            ),
            (f"<tool_call>{'[' * 100_000}</tool_call>", "levels deep"),
            (
                f'<tool_call>{{"name": "a", "arguments": {{"x": {"[" * 99}{"]" * 99}}}}}</tool_call>',
                "levels deep",
            ),
            ("<think>hm", "thinking was not finished"),
        ],
    )
    def test_malformed_calls_say_what_was_wrong(self, text, words):
        problem = faulty(self.format, text)
        assert words in problem
        assert "<tool_call>" in problem or "</think>" in problem  # and how to write it

    def test_a_bad_call_does_not_hide_a_good_one(self):
        parsed = self.format.parse('<tool_call>oops</tool_call><tool_call>{"name": "a"}</tool_call>')
        assert [call.fault for call in parsed.calls] == [Fault.MALFORMED_CALL, None]

    def test_endless_calls_are_cut(self):
        parsed = self.format.parse('<tool_call>{"name": "a"}</tool_call>' * 10_000)
        assert len(parsed.calls) == MAX_CALLS
        assert "at most" in parsed.calls[-1].problem


class TestLlama3:
    format = load_format("llama3")

    def test_bare_json_is_a_call(self):
        parsed = self.format.parse('{"name": "add", "parameters": {"a": 1}}')
        assert parsed.calls == (ToolCall("add", {"a": 1}),)

    def test_several_calls_after_a_tag(self):
        parsed = self.format.parse(
            'First.<|python_tag|>{"name": "a", "parameters": {}}; {"name": "b", "parameters": {}}'
        )
        assert [call.name for call in parsed.calls] == ["a", "b"]
        assert parsed.text == "First."

    @pytest.mark.parametrize("text", ["It is 5.", '{"city": "Rome"}', "", "see {x}"])
    def test_everything_else_is_an_answer(self, text):
        assert self.format.parse(text).answer == text

    @pytest.mark.parametrize(
        "text",
        ['{"name": "add", ', '<|python_tag|>print("hi")', "<|python_tag|>", '{"name": "a"} then {'],
    )
    def test_malformed(self, text):
        calls = self.format.parse(text).calls
        assert calls[-1].fault is Fault.MALFORMED_CALL
        assert '{"name": "tool"' in calls[-1].problem


class TestTags:
    format = load_format("tags")

    def test_a_tag_is_a_call(self):
        parsed = self.format.parse("I compute.\n<python>\nprint(1)\n</python>")
        assert parsed.calls == (ToolCall("python", {"code": "print(1)"}),)
        assert parsed.text == "I compute."

    def test_the_answer_is_in_its_tag(self):
        parsed = self.format.parse("So: <answer> 42 </answer> <python>ignored</python>")
        assert (parsed.answer, parsed.calls, parsed.text) == ("42", (), "So:")

    def test_an_answer_before_the_result_is_not_taken(self):
        parsed = self.format.parse("<search>rome</search><answer>guess</answer>")
        assert parsed.answer is None
        assert parsed.calls == (ToolCall("search", {"query": "rome"}),)

    def test_tags_in_a_block_are_text(self):
        code = 'print("<search>x</search>")'
        assert self.format.parse(f"<python>{code}</python>").calls == (
            ToolCall("python", {"code": code}),
        )

    @pytest.mark.parametrize(
        ("text", "words"),
        [("<python>print(1)", "</python> is missing"), ("just text", "neither a call nor an answer")],
    )
    def test_malformed(self, text, words):
        assert words in faulty(self.format, text)

    def test_bound_to_tools_it_has_a_tag_for_each(self):
        format = load_format("tags").bind([ADD, LOOKUP])
        assert format.parse("<lookup>k</lookup>").calls == (ToolCall("lookup", {"key": "k"}),)
        assert format.parse('<add>{"a": 1, "b": 2}</add>').calls == (ToolCall("add", {"a": 1, "b": 2}),)
        assert "cannot be read" in faulty(format, "<add>1 + 2</add>")
        assert set(format.stops) == {"</add>", "</lookup>", "</answer>"}
        assert "neither" in faulty(format, "<python>print(1)</python>")

    def test_given_tags_stay(self):
        format = load_format("tags", tags={"calc": "add.a"}).bind([LOOKUP])
        assert format.parse("<calc>1</calc>").calls == (ToolCall("add", {"a": "1"}),)

    @pytest.mark.parametrize(
        "options",
        [{"tags": {"answer": "x.y"}}, {"tags": {"a b": "x.y"}}, {"tags": {"a": ".y"}}, {"colour": 1}],
    )
    def test_impossible_options_are_refused(self, options):
        with pytest.raises(ConfigError):
            load_format("tags", **options)


class TestFenced:
    format = load_format("fenced")

    def test_a_block_runs(self):
        parsed = self.format.parse("Let me:\n```python\nx = 1\n\nprint(x)\n```\nthat.")
        assert parsed.calls == (ToolCall("python", {"code": "x = 1\n\nprint(x)"}),)
        assert parsed.text == "Let me:\n\nthat."

    def test_languages_go_to_their_tools(self):
        parsed = self.format.parse("```sql\nselect 1\n```\n```SH\nls\n```\n```json\n{}\n```")
        assert parsed.calls == (
            ToolCall("sql", {"query": "select 1"}),
            ToolCall("bash", {"command": "ls"}),
        )
        assert "json" in parsed.text

    async def test_every_language_goes_to_a_tool_of_the_toolbox(self, tmp_path):
        (tmp_path / "x.sql").write_text("create table t(a);")
        sql = {"tool": "sql", "database": str(tmp_path / "x.sql")}
        context = ToolContext("episode", Task.of("?"))
        specs = {s.name: s for s in await build_toolset(["python", "bash", sql]).list(context)}
        for language in LANGUAGES:
            (call,) = self.format.parse(f"```{language}\nx\n```").calls
            assert call.arguments.keys() <= specs[call.name].parameters["properties"].keys()

    def test_a_block_within_a_longer_fence_is_text(self):
        parsed = self.format.parse("````text\n```python\nno\n```\n````")
        assert parsed.calls == ()

    def test_no_block_is_an_answer(self):
        assert self.format.parse("It is `5`.").answer == "It is `5`."

    def test_an_open_block_is_malformed(self):
        assert "not closed" in faulty(self.format, "```python\nprint(1)")


class TestReAct:
    format = load_format("react")

    def test_an_action(self):
        parsed = self.format.parse(
            'Thought: I look.\nAction: lookup\nAction Input: {"key": "k"}\nObservation:'
        )
        assert parsed.calls == (ToolCall("lookup", {"key": "k"}),)
        assert parsed.text == "I look."

    def test_an_answer(self):
        parsed = self.format.parse("Thought: easy\nFinal Answer: it is\n5")
        assert (parsed.answer, parsed.text) == ("it is\n5", "easy")

    def test_invented_observations_are_not_read(self):
        text = "Action: a\nAction Input: {}\nObservation: 5\nThought: so\nFinal Answer: 5"
        parsed = self.format.parse(text)
        assert parsed.calls == (ToolCall("a"),)
        assert parsed.answer is None

    def test_plain_input_is_the_main_argument_once_bound(self):
        text = "Action: lookup\nAction Input: the key"
        assert "cannot be read" in faulty(self.format, text)
        assert self.format.bind([LOOKUP]).parse(text).calls == (ToolCall("lookup", {"key": "the key"}),)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("hello", "neither"),
            ("Action: lookup", "Action Input is missing"),
            ("Action Input: {}", "Action is missing"),
            ("Action:\nAction Input: {}", "name of one tool"),
            ("Action: a\nAction Input: {", "cannot be read"),
        ],
    )
    def test_malformed(self, text, words):
        assert words in faulty(self.format, text)

    def test_one_call_in_a_turn(self):
        with pytest.raises(ValueError, match="one call"):
            self.format.render_action("", [ToolCall("a"), ToolCall("b")])

    @pytest.mark.parametrize(
        ("text", "calls", "answer", "said"),
        [
            ('Thought: I look.\nAction: lookup\nInput: {"key": "k"}', [LOOK_K], None, "I look."),
            ('Thought: I look. Action: lookup Input: {"key": "k"}', [LOOK_K], None, "I look."),
            ('Action: lookup Input: {"key": "k"}', [LOOK_K], None, ""),
            ("Action: lookup\nInput: k\nObservation: 5\nAnswer: 5", [LOOK_K], None, ""),
            ("Thought: what can I do?\nAction: help", [ToolCall("help")], None, "what can I do?"),
            ("Action: help\nInput: {}", [ToolCall("help")], None, ""),
            ("Action: help\nObservation: nothing\nFinal Answer: no", [ToolCall("help")], None, ""),
            ("Thought: easy\nAnswer: it is\n5", [], "it is\n5", "easy"),
            ("Thought: easy\nAnswer: 5\nObservation: yes", [], "5", "easy"),
            ("Thought: done\nAction: Finish", [], "", "done"),
            ("Thought: done\nAction: Finish\nInput: {}", [], "", "done"),
            ("Thought: done\nAction: Finish\nAnswer: Paris", [], "Paris", "done"),
            ("Action: Finish\nFinal Answer: Paris\nObservation: no", [], "Paris", ""),
            ('Action: finish\nInput: {"answer": "Paris"}', [], "Paris", ""),
            ('Action: Finish\nAction Input: {"answer": 5}', [], "5", ""),
            ("Action: Finish\nAction Input: the end", [], "the end", ""),
            ("Action: Finish[Paris]", [], "Paris", ""),
        ],
    )
    def test_agentfly_writes_other_words(self, text, calls, answer, said):
        parsed = self.format.bind([LOOKUP, HELP]).parse(text)
        assert (list(parsed.calls), parsed.answer, parsed.text) == (calls, answer, said)

    def test_a_tool_called_finish_is_a_tool(self):
        finish = replace(HELP, name="Finish")
        for text in ("Action: Finish", "Action: Finish\nAction Input: {}", "Action: Finish\nInput: {}"):
            assert self.format.bind([finish]).parse(text).calls == (ToolCall("Finish"),)

    @pytest.mark.parametrize(
        ("text", "words"),
        [
            ("Action: lookup", "Action Input is missing"),  # it needs a key
            ("Action: unheard_of", "Action Input is missing"),
            ("Thought: the Action: is mine", "neither"),
            ("Input: {}", "neither"),
        ],
    )
    def test_what_neither_form_says_is_malformed(self, text, words):
        assert words in faulty(self.format.bind([LOOKUP, HELP]), text)

    def test_what_the_first_form_says_is_not_read_as_the_second(self):
        bound = self.format.bind([LOOKUP, HELP])
        note = "a\nAnswer: b\nInput:  c"
        assert bound.parse(f"Final Answer: {note}").answer == note
        parsed = bound.parse(f"Thought: {note}\nAction: lookup\nAction Input: {note}")
        assert (parsed.calls, parsed.text) == ((ToolCall("lookup", {"key": note}),), note)


class TestPlain:
    @pytest.mark.parametrize(
        ("take", "text", "action"),
        [
            ("text", " go north \n", "go north"),
            ("last_line", "I think.\ngo north\n", "go north"),
            ("label", "Action: x?\nNo.\nAction: go north", "go north"),
        ],
    )
    def test_what_is_taken(self, take, text, action):
        parsed = load_format("plain", take=take).parse(text)
        assert parsed.calls == (ToolCall("step", {"action": action}),)
        assert parsed.answer is None

    @pytest.mark.parametrize(
        ("take", "text"), [("text", "  "), ("label", "go north"), ("label", "Action:  ")]
    )
    def test_nothing_to_do_is_malformed(self, take, text):
        assert faulty(load_format("plain", take=take), text)

    def test_unknown_ways_are_refused(self):
        with pytest.raises(ConfigError, match="take"):
            load_format("plain", take="first")


FRAGMENTS = st.sampled_from(
    [
        *("<tool_call>", "</tool_call>", "<think>", "</think>", "<python>", "</python>", "<answer>"),
        *("</answer>", "<|python_tag|>", "```", "```python", "```sql", "Action:", "Action Input:"),
        *("\nInput:", "\nAnswer:", "\nThought:", "\nAction: Finish"),
        *("Observation:", "Final Answer:", "{", "}", "[", "]", '"', "\\", ":", ",", " ", "null", "NaN"),
        *("<function=add>", "<parameter=a>", "</parameter>", "</function>", "<arg_key>", "</arg_key>"),
        *("<arg_value>", "</arg_value>", "<minimax:tool_call>", '<invoke name="a">', "</invoke>"),
        *('<parameter name="a">', "[TOOL_CALLS]", "[ARGS]", "<|channel|>", "<|message|>", "<|end|>"),
        *(
            "<|start|>",
            "assistant",
            " to=functions.add",
            "final",
            "analysis",
            "<|tool_call_start|>[add(a=1",
        ),
        *(")]<|tool_call_end|>", "<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        *("<｜tool▁call▁end｜>", "<｜DSML｜tool_calls>", '<｜DSML｜invoke name="a">', "[add(a='b')]"),
        *("-1e999", '{"name":', '"add"', '"arguments": {}}', "é", "\x00"),
    ]
)
GARBAGE = st.lists(st.one_of(FRAGMENTS, FRAGMENTS, st.text(max_size=8), st.just("\n")), max_size=40).map(
    "".join
)


@pytest.mark.parametrize("name", EVERY)
@given(text=GARBAGE)
@example(text="")
@example(text="\ud800")
def test_no_text_raises(name, text):
    parsed = load_format(name).parse(text)
    assert len(parsed.calls) <= MAX_CALLS
    assert not (parsed.calls and parsed.answer is not None)
    assert parsed.calls or parsed.answer is not None, "an action is a call, a mistake, or an answer"
    for call in parsed.calls:
        assert (call.fault is None) == (call.problem == "")
        assert call.fault is not None or call.name


@pytest.mark.parametrize("name", EVERY)
@pytest.mark.parametrize(
    "unit",
    [
        "<tool_call>",
        "</tool_call>",
        "<tool_call>{",
        '<tool_call>"',
        "[",
        '{"a":',
        "<python>",
        "<think>",
        "<think></think>",
        "<",
        "`",
        "```python\n",
        "\n```\n",
        "Action:\n",
        "Action Input: {",
        "Final Answer:",
        "Thought: a Action: b ",
        "Action: finish[",
        "\nInput:",
        "\n",
        " ",
        "a",
        '"\\',
        "<answer></answer>",
        '{"name": "a"};',
        "<function=a>",
        "<function=a><parameter=a>",
        "</parameter>",
        "<tool_call>a<arg_key>",
        "<arg_key>a</arg_key><arg_value>",
        '<minimax:tool_call><invoke name="a">',
        '<minimax:tool_call><invoke name="a"><parameter name="a">',
        "<｜DSML｜tool_calls><｜DSML｜invoke ",
        "[TOOL_CALLS]",
        "[TOOL_CALLS]a[ARGS]{",
        "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>",
        "<|tool_call_start|>[",
        "<|tool_call_start|>[a(",
        "<|channel|>",
        "<|channel|>analysis<|message|>",
        "<|start|>assistant",
    ],
)
def test_a_megabyte_of_garbage_is_read_in_linear_time(name, unit):
    format = load_format(name)
    started = time.process_time()
    for text in (unit * (1_000_000 // len(unit)), "<tool_call>" + unit * (1_000_000 // len(unit))):
        format.parse(text)
    assert time.process_time() - started < 10  # a guard against hanging: quadratic time would be minutes


@pytest.mark.parametrize("name", EVERY)
def test_descriptions_name_every_tool(name):
    format = load_format(name).bind([ADD, LOOKUP])
    text = format.describe([ADD, LOOKUP])
    assert isinstance(text, str)
    if name not in ("plain", "fenced"):
        assert "add" in text
        assert "lookup" in text


def test_unknown_formats_are_named():
    with pytest.raises(ConfigError, match="Did you mean 'hermes'"):
        load_format("hermez")
    with pytest.raises(ConfigError, match="subclass of ActionFormat"):
        load_format("collections:OrderedDict")


@pytest.mark.parametrize("name", ["fenced", *(name for name in NATIVE if name != "harmony")])
def test_an_answer_may_stand_in_a_tag(name):
    """Agent-R1: `<think>`, calls, and a final `<answer>`; what is compared is what stands in it."""
    format = load_format(name)
    for text, answer in (
        ("<answer>Paris</answer>", "Paris"),
        ("<think>\nit is <answer>Rome</answer>?\n</think>\n\nSo: <answer> Paris </answer>", "Paris"),
        ("<answer>Rome</answer> no: <answer>Paris</answer>.", "Paris"),
        ("Paris", "Paris"),
        ("an open <answer> Paris", "an open <answer> Paris"),
        ("</answer> Paris <answer>", "</answer> Paris <answer>"),
        ("<answer></answer>", ""),
    ):
        assert (format.parse(text).answer, format.parse(text).calls) == (answer, ())
    assert load_format(name, answer=None).parse("<answer>4</answer>").answer == "<answer>4</answer>"
    assert load_format(name, answer="solution").parse("<solution>4</solution>").answer == "4"


@pytest.mark.parametrize(
    ("tags", "text", "name", "argument"),
    [
        ({"search": "search.query"}, "<think>I ask. <search>who?</search>", "search", "who?"),
        ({"code": "python.code"}, "<think>\n<code>\n```python\n1+1\n```\n</code>", "python", "1+1"),
        ({"code": "python.code"}, "and now <code>\nprint(1)\n</code>", "python", "print(1)"),
    ],
)
def test_inline_calls_are_read_inside_a_thought(tags, text, name, argument):
    [call] = load_format("tags", tags=tags).inlined().parse(text).calls
    assert (call.name, list(call.arguments.values()), call.fault) == (name, [argument], None)
    [refused] = load_format("tags", tags=tags).parse(f"<think>{text}").calls
    assert "not finished" in refused.problem, "in a chat, a thought is closed before a call"


def test_inline_answers_leave_the_thought_out():
    for name in ("hermes", "fenced"):
        format = load_format(name).inlined()
        assert format.parse("and so it is 5.\n</think>\n\nIt is 5.").answer == "It is 5."
        assert "not finished" in format.parse("<think>\nhm").calls[0].problem
    tags = load_format("tags").inlined()
    assert tags.parse("so.\n</think><answer>5</answer>").answer == "5"
