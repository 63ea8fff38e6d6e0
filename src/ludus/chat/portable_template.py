"""A chat template for other programs (transformers, vLLM, llama.cpp) that prompts a model as the renderer does.

It is the model's own template behind a Jinja prologue, which rewrites `messages` and `tools` into what the
renderer gives that template: the action format's text about the tools in the system prompt, calls as text,
results in the format's frame. The prologue is the same for all models; what differs is a table of data at its
beginning. How a format lists tools and writes calls is found by probing it, as the features of the model's own
template are. What a probe does not show is refused with a sentence when such a conversation comes up.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from ludus.chat.formats.base import ActionFormat, write_json
from ludus.chat.renderer import Renderer
from ludus.chat.tokenizers import HFTokenizer
from ludus.core.messages import Json, Message, ToolCall, ToolSpec

_TEXT, _VALUE, _NAME = "zqtext7", "zqvalue7", "zqtool7"
_ARGUMENTS = {"zqkey7": _VALUE}
_FENCE = "```"


@dataclass(frozen=True, slots=True)
class CallForm:
    """How one tool's call is written: `before`, its arguments as JSON or the text of one of them, `after`."""

    before: str
    argument: str | None
    """The argument whose text stands there; None for a JSON object of all."""
    after: str
    is_fenced: bool = False
    """A text with a fence of its own would be written otherwise."""


@dataclass(frozen=True, slots=True)
class CallForms:
    """How an action format writes calls, as probed."""

    tools: dict[str, CallForm]
    other: tuple[str, str, str] | None
    """Texts before the name, between name and JSON arguments, and behind them, for a tool of any name."""
    lead: str
    """What stands before the text beside calls."""
    gap: str
    """What stands between that text and the calls."""
    between: str | None
    """What stands between two calls; None where an action is one call."""
    keeps_text: bool


def portable_template(
    renderer: Renderer,
    tokenizer: HFTokenizer,
    tool_lists: Sequence[Sequence[ToolSpec]] = (),
    *,
    system: str | None = None,
) -> str:
    """The tokenizer's own template behind the prologue.

    Args:
        renderer: Whose prompts it writes.
        tokenizer: The renderer's. The variables that it gives to its template may be changed by a request.
        tool_lists: The tools of each task set that the model was trained with. Where it is one list, that list
            stands in for `tools` where a request has none; an empty list means none.
        system: The system message of conversations that begin with none.
    """
    union = list({spec.name: spec for specs in tool_lists for spec in specs}.values())
    features, format = renderer.features, renderer.format
    as_user = format.result_role == "user" or not features.tool_role
    calls = probe_calls(renderer.bound(union).format, union) if features.call_data is None else None
    data: Json = {
        "tools": [spec.as_openai() for spec in tool_lists[0]] if len(tool_lists) == 1 else [],
        "native_tools": features.native_tools,
        "block": None if features.native_tools else _block(renderer, tool_lists),
        "home": "system" if features.system else "user",
        "system": system,
        "roles": ({} if features.system else {"system": "user"}) | ({"tool": "user"} if as_user else {}),
        "frame": format.result_frame if as_user else None,
        "takes_results": renderer.turns == "chat",
        "calls": None if calls is None else asdict(calls),
        "native_calls": calls is None and features.native_tools,
        "images": bool(features.image),
        "alternates": features.alternates,
        "takes_parts": tokenizer.takes_parts,
    }
    variables = [
        f"{{%- if {name} is not defined -%}}{{%- set {name} = {literal(value)} -%}}{{%- endif -%}}\n"
        for name, value in tokenizer.template_kwargs.items()
    ]
    return "".join([*variables, _PROLOGUE.replace("DATA", literal(data)), tokenizer.template_source])


def literal(value: Any) -> str:
    """A value of JSON as Jinja writes it. A text is safe inside a block: the lexer takes it as a whole."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{literal(str(k))}: {literal(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(literal, value)) + "]"
    return "none" if value is None else write_json(value)


def _block(renderer: Renderer, tool_lists: Sequence[Sequence[ToolSpec]]) -> Json:
    """The text about the tools: around and between their JSON, or as a whole for each list of tools."""
    format = renderer.format
    one, two = (ToolSpec(name, _TEXT, {"type": "object"}) for name in (_NAME, f"{_NAME}b"))
    before, found, rest = (
        format.bind([one, two]).describe([one, two]).partition(write_json(one.as_openai()))
    )
    between, also_found, after = rest.partition(write_json(two.as_openai()))
    is_listed = bool(found and also_found) and not any(
        _NAME in part for part in (before, between, after)
    )
    return {
        "none": format.bind([]).describe([]),
        "listed": [before, between, after] if is_listed else None,
        "known": [
            {"names": [one.name for one in specs], "text": renderer.bound(specs).describe(specs)}
            for specs in tool_lists
            if specs and not is_listed
        ],
    }


def probe_calls(format: ActionFormat, tools: Sequence[ToolSpec]) -> CallForms | None:
    """How `format` writes calls; None where that cannot be found out."""
    other = _other(format)
    forms = {tool.name: form for tool in tools if (form := _form(format, tool)) is not None}
    if not forms and other is None:
        return None
    name = next(iter(forms), _NAME)
    argument = forms[name].argument if name in forms else None
    call = ToolCall(name, _ARGUMENTS if argument is None else {argument: _VALUE})
    alone, beside = _written(format, [call]), _written(format, [call], _TEXT)
    if alone is None or beside is None or not beside.endswith(alone):
        return None
    lead, keeps_text, gap = beside.removesuffix(alone).partition(_TEXT)
    twice = _written(format, [call, call])
    fits = twice is not None and twice.startswith(alone) and twice.endswith(alone)
    between = twice[len(alone) : -len(alone)] if fits and twice is not None else None
    return CallForms(forms, other, lead, gap, between, keeps_text=bool(keeps_text))


def _written(format: ActionFormat, calls: Sequence[ToolCall], text: str = "") -> str | None:
    try:
        return format.render_action(text, calls)
    except ValueError:
        return None


def _form(format: ActionFormat, tool: ToolSpec) -> CallForm | None:
    """How a call of this tool is written: with all arguments as JSON, or with the text of one."""
    whole = _written(format, [ToolCall(tool.name, _ARGUMENTS)]) or ""
    before, found, after = whole.partition(write_json(_ARGUMENTS))
    if found:
        return CallForm(before, None, after)
    for name in tool.parameters.get("properties") or {}:
        both = _written(format, [ToolCall(tool.name, {name: _TEXT, **_ARGUMENTS})]) or ""
        if _TEXT in both and _VALUE in both:
            return None  # each argument has a place of its own
        shown = _written(format, [ToolCall(tool.name, {name: _VALUE})]) or ""
        before, found, after = shown.partition(_VALUE)
        if found:
            fenced = _written(format, [ToolCall(tool.name, {name: f"{_FENCE}{_VALUE}"})])
            return CallForm(before, name, after, fenced != f"{before}{_FENCE}{_VALUE}{after}")
    return None


def _other(format: ActionFormat) -> tuple[str, str, str] | None:
    """How a tool of any name is called; None where its name decides on more than one place."""
    shown = _written(format, [ToolCall(_NAME, _ARGUMENTS)]) or ""
    before, found, rest = shown.partition(_NAME)
    between, shown_arguments, after = rest.partition(write_json(_ARGUMENTS))
    return (before, between, after) if found and shown_arguments and _NAME not in rest else None


_PROLOGUE = r"""{%- set trained = DATA -%}
{%- set now = namespace(out=[], text='', parts=[], block='', hits=0, known=false) -%}

{#- The tools: those of the request, or those of the training. Clients and servers add keys of their own. -#}
{%- if tools is not defined or tools is none -%}{%- set tools = trained.tools -%}{%- endif -%}
{%- for tool in tools -%}
  {%- set function = tool.function if tool.function is defined else tool -%}
  {%- set now.out = now.out + [{'type': 'function', 'function': {'name': function.name,
    'description': function.description or '', 'parameters': function.parameters or {}}}] -%}
{%- endfor -%}
{%- set tools = now.out -%}
{%- set now.out = [] -%}
{%- if not trained.native_tools -%}
  {%- if not tools -%}
    {%- set now.block = trained.block.none -%}
  {%- elif trained.block.listed -%}
    {%- set now.block = trained.block.listed[0] -%}
    {%- for tool in tools -%}
      {%- set now.block = now.block + ('' if loop.first else trained.block.listed[1]) + (tool | tojson) -%}
    {%- endfor -%}
    {%- set now.block = now.block + trained.block.listed[2] -%}
  {%- else -%}
    {%- for one in trained.block.known -%}
      {%- set now.hits = 0 -%}
      {%- for tool in tools -%}
        {%- if tool.function.name in one.names -%}{%- set now.hits = now.hits + 1 -%}{%- endif -%}
      {%- endfor -%}
      {%- if now.hits == tools | length and now.hits == one.names | length -%}
        {%- set now.block = one.text -%}
        {%- set now.known = true -%}
      {%- endif -%}
    {%- endfor -%}
    {%- if not now.known -%}
      {{- raise_exception('this model can be told of the tools that it was trained with alone') -}}
    {%- endif -%}
  {%- endif -%}
  {%- set tools = none -%}
{%- endif -%}

{%- if trained.system is not none and (not messages or messages[0].role != 'system') -%}
  {%- set messages = [{'role': 'system', 'content': trained.system}] + messages -%}
{%- endif -%}
{%- for message in messages -%}
  {%- set role = trained.roles[message.role] if message.role in trained.roles else message.role -%}
  {%- set is_framed = message.role == 'tool' and trained.frame is not none -%}
  {%- if message.role == 'tool' and not trained.takes_results -%}
    {{- raise_exception('this model reads results in its own turn, which no chat template can write') -}}
  {%- endif -%}
  {%- set now.parts = [] -%}
  {%- set now.text = trained.frame[0] if is_framed else '' -%}
  {%- if message.content is string -%}
    {%- set now.text = now.text + message.content -%}
  {%- elif message.content -%}
    {%- for part in message.content -%}
      {%- if part.type == 'text' -%}
        {%- set now.text = now.text + part.text -%}
      {%- elif not trained.images -%}
        {{- raise_exception('this model reads text only') -}}
      {%- else -%}
        {%- set now.parts = now.parts + ([{'type': 'text', 'text': now.text}] if now.text else []) + [part] -%}
        {%- set now.text = '' -%}
      {%- endif -%}
    {%- endfor -%}
  {%- endif -%}
  {%- if is_framed -%}{%- set now.text = now.text + trained.frame[1] -%}{%- endif -%}

  {#- The text about the tools stands behind the system prompt, or before the first words of a user. -#}
  {%- if loop.first and now.block -%}
    {%- if role != trained.home -%}
      {%- set now.out = [{'role': trained.home, 'content': now.block}] -%}
    {%- elif role == 'system' -%}
      {%- set now.text = now.text + '\n\n' + now.block -%}
    {%- elif now.parts -%}
      {%- set now.parts = [{'type': 'text', 'text': now.block + '\n\n'}] + now.parts -%}
    {%- else -%}
      {%- set now.text = now.block + '\n\n' + now.text -%}
    {%- endif -%}
  {%- endif -%}

  {%- set has_calls = message.tool_calls is defined and message.tool_calls -%}
  {%- if has_calls and not trained.native_calls -%}
    {%- set calls = trained.calls -%}
    {%- if calls is none -%}
      {{- raise_exception('send what this model wrote as content, without tool_calls') -}}
    {%- elif calls.between is none and message.tool_calls | length > 1 -%}
      {{- raise_exception('this model writes one call in a turn') -}}
    {%- elif not calls.keeps_text -%}
      {%- set now.text = '' -%}
    {%- elif now.text -%}
      {#- a client may have kept them -#}
      {%- set lead = '' if now.text.startswith(calls.lead) else calls.lead -%}
      {%- set gap = '' if now.text.endswith(calls.gap) else calls.gap -%}
      {%- set now.text = lead + now.text + gap -%}
    {%- endif -%}
    {%- for call in message.tool_calls -%}
      {%- set function = call.function if call.function is defined else call -%}
      {%- set arguments = function.arguments -%}
      {%- if function.name in calls.tools -%}
        {%- set form = calls.tools[function.name] -%}
      {%- elif calls.other is not none -%}
        {%- set form = {'before': calls.other[0] + function.name + calls.other[1], 'argument': none,
          'after': calls.other[2]} -%}
      {%- else -%}
        {{- raise_exception('a call of a tool that this model was not trained with') -}}
      {%- endif -%}
      {%- if form.argument is none -%}
        {%- set value = arguments if arguments is string else (arguments or {}) | tojson -%}
      {%- elif arguments is string -%}
        {{- raise_exception('give the arguments of calls as objects') -}}
      {%- else -%}
        {%- set value = arguments[form.argument] if form.argument in arguments else '' -%}
        {%- set value = value if value is string else value | tojson -%}
        {%- if form.is_fenced and '```' in value -%}
          {{- raise_exception('a call with a fence of its own') -}}
        {%- endif -%}
      {%- endif -%}
      {%- set between = '' if loop.first else calls.between -%}
      {%- set now.text = now.text + between + form.before + value + form.after -%}
    {%- endfor -%}
  {%- endif -%}

  {%- set rest = [{'type': 'text', 'text': now.text}] if now.text or not now.parts else [] -%}
  {%- set content = now.parts + rest if now.parts or trained.takes_parts else now.text -%}
  {%- set entry = {'role': role, 'content': content} -%}
  {%- if trained.native_calls and has_calls -%}
    {%- set entry = dict(entry, tool_calls=message.tool_calls) -%}
  {%- endif -%}
  {%- if trained.native_calls and message.reasoning_content is defined -%}
    {%- set thought = message.reasoning_content -%}
    {%- set entry = dict(entry, reasoning_content=thought, thinking=thought) -%}
  {%- endif -%}
  {%- if role == 'tool' and message.name is defined -%}
    {%- set entry = dict(entry, name=message.name) -%}
  {%- endif -%}
  {%- if role == 'tool' and message.tool_call_id is defined -%}
    {%- set entry = dict(entry, tool_call_id=message.tool_call_id) -%}
  {%- endif -%}
  {%- if trained.alternates and role == 'user' and now.out and now.out[-1].role == 'user' -%}
    {%- set gap = [{'type': 'text', 'text': '\n\n'}] -%}
    {%- set last = now.out[-1].content -%}
    {%- if content is string and last is string -%}
      {%- set content = last + '\n\n' + content -%}
    {%- else -%}
      {%- set last = [{'type': 'text', 'text': last}] if last is string else last -%}
      {%- set content = last + gap + ([{'type': 'text', 'text': content}] if content is string else content) -%}
    {%- endif -%}
    {%- set now.out = now.out[:-1] + [{'role': 'user', 'content': content}] -%}
  {%- else -%}
    {%- set now.out = now.out + [entry] -%}
  {%- endif -%}
{%- endfor -%}
{%- set messages = now.out -%}
{{- '' }}"""
"""Other engines than Jinja's own know a part of it: namespaces, loops, slices, `+`, `tojson`, `startswith`. No
list is changed in place, which sandboxes forbid. The last line is an expression: behind a block, a line break
of the model's own template would be cut."""


def as_request(message: Message, format: ActionFormat) -> Json:
    """A message as a client of a chat API sends it: calls apart from the text that stands beside them."""
    chat = message.as_chat()
    if message.role == "assistant" and any(call.fault is not None for call in message.tool_calls):
        del chat["tool_calls"]  # a server that cannot read a call gives it back as text
    elif message.role == "assistant" and message.tool_calls:
        written = _written(format, message.tool_calls)
        is_own = written is not None and message.content.endswith(written)
        rest = message.content.removesuffix(written or "") if is_own else message.content
        if not is_own or any(mark in rest for mark in format.marks):
            parsed = format.parse(message.content)
            rest = parsed.text
            if is_own and parsed.thought:
                chat["reasoning_content"] = parsed.thought
        chat["content"] = rest
    return chat
