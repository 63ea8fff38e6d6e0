"""Chat templates in the manner of well-known families, and tokenizers made on the spot for them."""

from __future__ import annotations

from functools import cache

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from ludus.chat import CHATML, HFTokenizer
from ludus.core import ByteTokenizer

TRIMMING_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content | trim }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ESCAPING_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{{ m.content if m.role == 'assistant' else (m.content | tojson) }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ '<|begin_of_text|>' }}{% if tools %}<|start_header_id|>system<|end_header_id|>\n\n"
    "Answer with JSON.{% for t in tools %}\n{{ t | tojson(indent=4) }}{% endfor %}<|eot_id|>{% endif %}"
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n"
    "{% if m.tool_calls %}{% set f = m.tool_calls[0].function %}"
    '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}'
    "{% else %}{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for m in messages %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles must alternate') }}"
    "{% endif %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% elif m.role == 'assistant' %} {{ m.content }}</s>{% endif %}{% endfor %}"
)
QWEN3 = (
    "{% set ns = namespace(query=messages | length) %}"
    "{% for m in messages | reverse %}{% if ns.query == messages | length and m.role == 'user' and not ("
    "m.content.startswith('<tool_response>') and m.content.endswith('</tool_response>')) %}"
    "{% set ns.query = messages | length - loop.index %}{% endif %}{% endfor %}"
    "{% for m in messages %}"
    "{% if m.role == 'assistant' %}{% set content = m.content %}{% set thought = '' %}"
    "{% if '</think>' in content %}"
    "{% set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}"
    "{% set content = content.split('</think>')[-1].lstrip('\n') %}{% endif %}"
    "<|im_start|>assistant\n{% if loop.index0 > ns.query and (loop.last or thought) %}"
    "<think>\n{{ thought }}\n</think>\n\n{% endif %}{{ content }}"
    "{% for c in m.tool_calls or [] %}\n<tool_call>\n"
    '{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n"
    "{% elif m.role == 'tool' %}<|im_start|>user\n<tool_response>\n{{ m.content }}\n</tool_response>"
    "<|im_end|>\n{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
R1 = (
    "<s>{% for m in messages %}{% if m.role == 'user' %}<|User|>{{ m.content }}{% endif %}"
    "{% if m.role == 'assistant' %}<|Assistant|>{{ m.content.split('</think>')[-1] }}</s>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}"
)
GEMMA = (
    "<bos>{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}"
    "{% endif %}<start_of_turn>{{ 'model' if m.role == 'assistant' else m.role }}\n"
    "{{ m.content | trim }}<end_of_turn>\n{% endfor %}"
    "{% if add_generation_prompt %}<start_of_turn>model\n{% endif %}"
)
MOVING_TOOLS = (
    "{% for m in messages %}{% if loop.last and tools %}[TOOLS]{{ tools | tojson }}[/TOOLS]{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


LISTED = (
    "{% if tools %}<|im_start|>system\n{% for t in tools %}{{ t | tojson }}\n{% endfor %}"
    "<|im_end|>\n{% endif %}"
)
XML = (
    LISTED + "{% for m in messages %}<|im_start|>{{ 'user' if m.role == 'tool' else m.role }}\n"
    "{% if m.role == 'tool' %}<tool_response>\n{{ m.content }}\n</tool_response>"
    "{% else %}{{ m.content }}{% endif %}{% for c in m.tool_calls or [] %}<tool_call>\n"
    "<function={{ c.function.name }}>\n"
    "{% for k, v in c.function.arguments.items() %}<parameter={{ k }}>\n{{ v }}\n</parameter>\n{% endfor %}"
    "</function>\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
GLM = (
    "{% set ns = namespace(last=-1) %}{% for m in messages %}{% if m.role == 'user' %}"
    "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|system|>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}"
    "{% for m in messages %}{% if m.role == 'tool' %}<|observation|>"
    "<tool_response>{{ m.content }}</tool_response>"
    "{% elif m.role != 'assistant' %}<|{{ m.role }}|>{{ m.content }}{% else %}<|assistant|>"
    "{% set parts = m.content.split('</think>') %}"
    "{% if parts | length > 1 and loop.index0 > ns.last %}{{ parts[0] }}</think>{% else %}</think>{% endif %}"
    "{{ parts[-1].strip() }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}"
    "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key><arg_value>{{ v }}</arg_value>"
    "{% endfor %}</tool_call>{% endfor %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|><think>{% endif %}"
)
HARMONY = (
    "{% if tools %}<|start|>developer<|message|>{% for t in tools %}{{ t | tojson }}{% endfor %}<|end|>"
    "{% endif %}"
    "{% set ns = namespace(name='', final=-1) %}"
    "{% for m in messages %}{% if m.role == 'assistant' and not m.tool_calls %}"
    "{% set ns.final = loop.index0 %}{% endif %}{% endfor %}"
    "{% for m in messages %}{% if m.role == 'assistant' %}"
    "{% if '<|channel|>' in m.content %}{{ raise_exception('channels in content') }}{% endif %}"
    "{% if m.thinking and (loop.index0 > ns.final or (loop.last and not add_generation_prompt)) %}"
    "<|start|>assistant<|channel|>analysis<|message|>{{ m.thinking }}<|end|>{% endif %}"
    "{% if m.tool_calls %}{% set c = m.tool_calls[0].function %}{% set ns.name = c.name %}"
    "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>"
    "{{ c.arguments | tojson }}<|call|>"
    "{% else %}{% set ns.name = '' %}<|start|>assistant<|channel|>final<|message|>{{ m.content }}"
    "{{ '<|end|>' if add_generation_prompt or not loop.last else '<|return|>' }}{% endif %}"
    "{% elif m.role == 'tool' %}{% if not ns.name %}{{ raise_exception('no call before a result') }}{% endif %}"
    "<|start|>functions.{{ ns.name }} to=assistant<|channel|>commentary<|message|>{{ m.content }}<|end|>"
    "{% else %}<|start|>{{ m.role }}<|message|>{{ m.content }}<|end|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant{% endif %}"
)
INVOKE = (
    "{% if tools %}<s>system\n{% for t in tools %}{{ t | tojson }}{% endfor %}</s>{% endif %}"
    "{% set ns = namespace(called=false) %}{% for m in messages %}<s>{{ m.role }}\n"
    "{% if m.role == 'tool' and not ns.called %}{{ raise_exception('no call before a result') }}{% endif %}"
    "{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
    "{% if m.role == 'assistant' %}{% set ns.called = m.tool_calls and m.tool_calls | length > 0 %}{% endif %}"
    "{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n'
    '{% for k, v in c.function.arguments.items() %}<parameter name="{{ k }}">{{ v }}</parameter>\n{% endfor %}'
    "</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
NINE = (
    "{% if tools %}<s>{% for t in tools %}{{ t | tojson }}{% endfor %}{% endif %}{% for m in messages %}"
    "{% for c in m.tool_calls or [] %}{% if c.id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "[TOOL_CALLS]{{ c.function.name }}[ARGS]{{ c.function.arguments | tojson }}{% endfor %}"
    "{% if m.role == 'tool' %}{% if m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "[TOOL_RESULTS]{{ m.tool_call_id }}{{ m.content }}[/TOOL_RESULTS]"
    "{% elif m.role == 'assistant' %}{{ m.content }}</s>{% else %}[INST]{{ m.content }}[/INST]{% endif %}"
    "{% endfor %}"
)
FAMILIES = {
    "qwen3_coder": XML,
    "glm": GLM,
    "harmony": HARMONY,
    "minimax": INVOKE,
    "mistral with ids": NINE,
}
"""Templates that write calls in the formats of families, in the manner of theirs: the first word of a name."""


def changing(content: str, before: str = "") -> str:
    """ChatML in which what others wrote is changed; the assistant's words are left alone."""
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n"
        f"{before}{{{{ m.content if m.role == 'assistant' else {content} }}}}<|im_end|>\n"
        "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


NAMING = "{% if m.name %}<{{ m.name }}>{{ m.tool_call_id }}{% endif %}"
NINE_LETTERS = (
    "{% if m.tool_call_id and m.tool_call_id | length != 9 %}{{ raise_exception('nine!') }}{% endif %}"
    "{% if m.tool_call_id %}<{{ m.tool_call_id }}>{% endif %}"
)
CHANGING = {
    "deleting": changing("m.content.replace('/think', '').replace('/no_think', '')"),
    "without spaces": changing("m.content.replace(' ', '')"),
    "without white space": changing("m.content.split() | join('')"),
    "without spaces and dots": changing("m.content.replace(' ', '').replace('.', '')"),
    "lowering": changing("m.content | lower"),
    "stripping": changing("m.content.strip('x \n')"),
    "unescaping": changing("m.content.replace('&lt;', '<').replace('x', '<')"),
    "in brackets": changing("'<' + (m.content | trim | lower) + '>'"),
    "naming": changing("m.content", NAMING),
    "naming and deleting": changing(
        "m.content.replace('/think', '')", NAMING.replace(" }}", " | lower }}")
    ),
    "with ids": changing("m.content", NINE_LETTERS),
}
"""They delete from content, lower it, strip it, or write names and content between brackets."""
SWITCHED = CHATML + (
    "{% if add_generation_prompt and '/no_think' in messages[-1].content %}<think></think>{% endif %}"
)
TOOLS_IN_BRACKETS = CHATML.replace("(tool | tojson)", "'<' + tool.function.name + '>' + (tool | tojson)")

PRESERVING = {
    "chatml": CHATML,
    "trimming": TRIMMING_CHATML,
    "escaping": ESCAPING_CHATML,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
    "gemma": GEMMA,
}
REWRITING = {"qwen3": QWEN3, "r1": R1}

SPECIALS = (
    *("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|begin_of_text|>", "<|start_header_id|>"),
    *("<|end_header_id|>", "<|eot_id|>", "<|python_tag|>", "<s>", "</s>", "[INST]", "[/INST]"),
    *("<|User|>", "<|Assistant|>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *(
        "<|system|>",
        "<|user|>",
        "<|assistant|>",
        "<|observation|>",
        "<minimax:tool_call>",
        "</minimax:tool_call>",
    ),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>", "<|return|>", "<|constrain|>"),
    *("[TOOL_CALLS]", "[ARGS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
"""As in Qwen's tokenizers: tokens of their own, but not marked special."""

LINES = [
    "the quick brown fox jumps over the lazy dog and asks what is 2 + 3, please?",
    "<|im_start|>user\nhello world<|im_end|>\n<|im_start|>assistant\nSo the answer is 42.<|im_end|>\n",
    '{"name": "search", "arguments": {"query": "when was the bridge built"}}',
    "system user assistant tool model print(1 + 1)\n\n    return x\n",
]


@cache
def fast_tokenizer(*, prefix_space: bool = False, normaliser: str = "") -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer trained on a few lines."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    backend.decoder = decoders.ByteLevel()
    if normaliser:
        backend.normalizer = {"lower": normalizers.Lowercase, "nfkc": normalizers.NFKC}[normaliser]()
    trainer = trainers.BpeTrainer(
        vocab_size=600,
        show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    backend.train_from_iterator(LINES * 3, trainer)
    # With a normaliser the special tokens are matched after it, which is the more dangerous way.
    backend.add_special_tokens([AddedToken(t, normalized=bool(normaliser)) for t in SPECIALS])
    backend.add_tokens([AddedToken(t, normalized=False) for t in TAGS])
    backend.add_tokens([AddedToken("    ", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<|endoftext|>")


@cache
def hf_tokenizer(name: str, *, prefix_space: bool = False, normaliser: str = "") -> HFTokenizer:
    """The same tokenizer with one of the templates above."""
    others = {"moving tools": MOVING_TOOLS, "switched": SWITCHED, "tools in brackets": TOOLS_IN_BRACKETS}
    template = {**PRESERVING, **REWRITING, **CHANGING, **FAMILIES, **others}[name]
    inner = fast_tokenizer(prefix_space=prefix_space, normaliser=normaliser)
    return HFTokenizer(inner, chat_template=template)


class TemplatedBytes(ByteTokenizer):
    """A byte tokenizer with any Jinja template, and all the special tokens that those above need."""

    def __init__(self, name: str) -> None:
        super().__init__((*SPECIALS, *TAGS))
        self._jinja = hf_tokenizer(name)

    @property
    def stop_tokens(self):
        texts = {number: text for text, number in self._jinja.controls.items()}
        return tuple(self.controls[texts[token]] for token in self._jinja.stop_tokens)

    def apply_chat_template(self, messages, tools, add_generation_prompt):
        return self._jinja.apply_chat_template(messages, tools, add_generation_prompt)


class LossyBytes(TemplatedBytes):
    """Encodes and decodes, but never back to the same: loses case and doubled spaces."""

    def encode_text(self, text: str) -> list[int]:
        return super().encode_text(text.lower().replace("  ", " "))

    def decode(self, tokens) -> str:
        return super().decode(tokens).replace("e", "é")
