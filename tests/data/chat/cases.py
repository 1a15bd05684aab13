"""Templates in the form of those that models come with, conversations, and tokenizers to write them with."""

import json
from pathlib import Path
from typing import Any

LLAMA_2 = (
    "{% if messages[0]['role'] == 'system' %}{% set rest = messages[1:] %}"
    "{% set intro = '<<SYS>>\n' + messages[0]['content'] + '\n<</SYS>>\n\n' %}"
    "{% else %}{% set rest, intro = messages, '' %}{% endif %}"
    "{% for m in rest %}{% if m['role'] == 'user' %}"
    "{{ bos_token + '[INST] ' + ((intro if loop.first else '') ~ m['content'] | trim) + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'].strip() + ' ' + eos_token }}{% endif %}{% endfor %}"
)
MISTRAL = (
    "{{ bos_token }}{% set ns = namespace(turn=0) %}{% for m in messages %}"
    "{% if m.role == 'user' %}{% if ns.turn % 2 %}{{ raise_exception('users and assistants take turns') }}{% endif %}"
    "{% set ns.turn = ns.turn + 1 %}"
    "[INST] {% if loop.index0 >= messages | length - 2 and system is defined %}{{ system }}\n\n{% endif %}"
    "{{ m.content }}[/INST]"
    "{% elif m.role == 'assistant' %}{% set ns.turn = ns.turn + 1 %} {{ m.content | trim }}{{ eos_token }}{% endif %}"
    "{% endfor %}"
)
ZEPHYR = """
{% for m in messages %}
    {% if m['role'] == 'user' %}
{{ '<|user|>\n' + m['content'] + eos_token }}
    {% elif m['role'] == 'system' %}
{{ '<|system|>\n' + m['content'] + eos_token }}
    {% elif m['role'] == 'assistant' %}
{{ '<|assistant|>\n' + m['content'] + eos_token }}
    {% endif %}
    {% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
    {% endif %}
{% endfor %}"""
CHATML = (
    "{% for m in messages %}{% if loop.first and m.role != 'system' %}"
    "{{ '<|im_start|>system\nYou help.<|im_end|>\n' }}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>' + '\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Leaves thoughts of earlier replies out, calls tools, looks for what is said.
THINKING = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(last=-1) %}
{%- for m in messages %}
    {%- set is_told = m.content is string and '<tool_response>' in m.content and '</tool_response>' in m.content %}
    {%- if m.role == 'user' and not is_told %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for m in messages %}
    {%- if m.role == 'assistant' %}
        {%- set content, thought = m.content or '', m.reasoning_content | default('') %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].split('<think>')[-1].strip('\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\n' }}
        {%- if loop.index0 > ns.last %}{{ '<think>\n' ~ thought ~ '\n</think>\n\n' }}{% endif %}
        {{- content }}
        {%- for call in m.tool_calls or [] %}
            {{- '<tool_call>\n' + {'name': call.function.name, 'arguments': call.function.arguments} | tojson }}
            {{- '\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\n' }}
    {%- elif m.role == 'tool' %}
        {{- '<|im_start|>user\n<tool_response>' + m.content + '</tool_response><|im_end|>\n' }}
    {%- else %}
        {{- '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
# Replies of tools that follow one another are one turn of the user; thoughts stay while tools are called.
MERGING = """
{%- if tools %}<|im_start|>system
{%- for tool in tools %}{{ '\n' + tool | tojson }}{% endfor %}<|im_end|>
{% endif -%}
{%- set ns = namespace(asked=-1, is_told=false) %}
{%- for m in messages %}{% if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}
{%- for m in messages %}
    {%- if m.role == 'tool' %}
        {{- '' if ns.is_told else '<|im_start|>user' }}{{ '\n<tool_response>\n' + m.content + '\n</tool_response>' }}
        {%- set ns.is_told = not (loop.last or messages[loop.index0 + 1].role != 'tool') %}
        {{- '' if ns.is_told else '<|im_end|>\n' }}
    {%- elif m.role == 'assistant' %}
        {%- set parts = m.content.split('</think>') %}
        {{- '<|im_start|>assistant\n' }}
        {%- if parts | length > 1 and loop.index0 > ns.asked %}
            {{- '<think>\n' + parts[0].split('<think>')[-1].strip('\n') + '\n</think>\n\n' }}
        {%- endif %}
        {{- parts[-1].lstrip('\n') + '<|im_end|>\n' }}
    {%- else %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\n' }}{% if enable_thinking is false %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}
"""
# Tools stand in the first message of the user, whose role has another name than tools' results, which are JSON.
HEADERS = """
{{- bos_token }}
{%- for m in messages %}
    {{- '<|start|>' + ('ipython' if m.role == 'tool' else m.role) + '<|message|>' }}
    {%- if loop.first and tools %}{% for tool in tools %}{{ tool | tojson(indent=4) + '\n\n' }}{% endfor %}{% endif %}
    {{- m.content | tojson if m.role == 'tool' else m.content | trim }}<|im_end|>
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start|>assistant<|message|>' }}{% endif %}
"""
# The form of templates to train from: they mark what a reply is, and keep all thoughts.
TRAINING = (
    THINKING.replace("{%- if loop.index0 > ns.last %}{{ ", "{{ ")
    .replace("'\n</think>\n\n' }}{% endif %}", "'\n</think>\n\n' }}")
    .replace(
        "{{- '<|im_start|>assistant\n' }}\n        {", "{{- '<|im_start|>assistant\n' }}{% generation %}\n        {"
    )
    .replace("{{- '<|im_end|>\n' }}", "{{- '<|im_end|>\n' }}{% endgeneration %}")
)
# The prompt of a reply opens a thought, and a reply without one has an empty one, spelt otherwise.
OPENS_THOUGHTS = (
    "{%- set ns = namespace(last=-1) %}"
    "{%- for m in messages %}{% if m.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}{% endfor %}"
    "{%- for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' %}"
    "{% if m.reasoning_content and loop.index0 > ns.last %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n' }}"
    "{% else %}<think></think>{% endif %}{{ m.content or '' }}{% for call in m.tool_calls or [] %}"
    "{{ '<tool_call>\n<function=' + call.function.name + '>\n</function>\n</tool_call>\n' }}{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}"
)
# A date, macros, parts, JSON with all its arguments, an end that differs within a conversation, a space that is eaten.
HARMONY = """
{%- macro said(m) -%}
    {%- if m.content is string %}{{ m.content | trim }}{% else %}
    {%- for part in m.content or [] %}{{ part.text if part.type == 'text' else '' }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- bos_token }}<|start|>system<|message|>Date: {{ strftime_now('%Y-%m-%d') }}
{%- for document in documents or [] %}
{{ document | tojson(indent=2, sort_keys=true, ensure_ascii=true, separators=(',', ': ')) }}
{%- endfor %}<|end|>
{%- for m in messages %}
    {%- if m.role == 'assistant' and loop.last and not add_generation_prompt and m.thinking %}
        {{- '<|start|>assistant<|channel|>analysis<|message|>' + m.thinking + '<|end|>' }}
    {%- endif %}
    {{- '<|start|>' + m.role }}{% if m.role == 'assistant' %}<|channel|>final{% endif %}<|message|>{{ said(m) }}
    {{- '<|return|>' if loop.last and m.role == 'assistant' else '<|end|> ' }}
{%- endfor %}
{%- if add_generation_prompt %}<|start|>assistant{% endif -%}
"""
TEMPLATES = {
    "Llama 2": LLAMA_2,
    "Mistral": MISTRAL,
    "Zephyr": ZEPHYR,
    "ChatML": CHATML,
    "thinking": THINKING,
    "Harmony": HARMONY,
}

SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "<|im_start|>", "<|im_end|>", "<|start|>", "<|channel|>", "<|message|>"]
SPECIAL += ["<|return|>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>"]
CORPUS = [
    "Hello, what is 2+2? Four. And more of it, said the user to the assistant: [INST] yes [/INST] no",
    "system user assistant tool <|user|> <<SYS>> Be kind. You help. {'name': 'add', 'arguments': {'a': 1}}\n\n\n",
]


def save_tokenizer(folder: Path, kind: str, template: str | None, **config: Any) -> Path:
    """A small vocabulary of byte pairs, over bytes ("bytes") or over characters and a mark for spaces ("spaces"), as a
    folder of Hugging Face with a chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=None if kind == "bytes" else "<unk>"))
    alphabet: list[str] = []
    if kind == "bytes":
        tokenizer.normalizer = normalizers.NFC()
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
        alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False, min_frequency=1
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    # As in Phi 3: the white space behind the token is part of it.
    tokenizer.add_special_tokens([AddedToken("<|end|>", rstrip=True, normalized=False, special=True)])
    tokenizer.add_tokens(PLAIN)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>", "unk_token": "<unk>"}
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", **named, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": template}))
    return folder


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


CALL = {"type": "function", "id": "1", "function": {"name": "add", "arguments": {"a": 1, "b": "zwei ü"}}}
TOOLS = [{"type": "function", "function": {"name": "add", "description": "Adds <b> & 'ü'", "parameters": {"a": "int"}}}]
TOOL = {"role": "tool", "content": "4", "name": "add", "tool_call_id": "1"}
TALKS: dict[str, list[dict[str, Any]]] = {
    "a question": [user("Hello")],
    "three turns": [user("Hello"), assistant("Yes"), user("And more?"), assistant("No."), user("Hello, what is it?")],
    "a system": [{"role": "system", "content": " Be kind.\n"}, user("Hello"), assistant("Yes"), user("More")],
    "white space": [user("  Hello \n\n"), assistant("\n Yes\n "), user("\tMore\n")],
    "thoughts": [
        user("Hello"),
        assistant("<think>\nabc\n</think>\n\nYes"),
        user("More"),
        assistant("<think>x</think>Four"),
    ],
    "thoughts apart": [
        user("Hello"),
        assistant("Yes", reasoning_content="hm \n"),
        user("More"),
        assistant("Four", thinking="so"),
    ],
    "a call": [user("2+2?"), assistant(None, tool_calls=[CALL]), TOOL, assistant("It is 4."), user("ok")],
    "a thoughtful call": [
        user("2+2?"),
        assistant(None, tool_calls=[CALL], reasoning_content="hm"),
        TOOL,
        assistant("It is 4.", reasoning_content="so"),
        user("ok"),
        assistant("Yes"),
    ],
    "a call at the end": [user("2+2?"), assistant("", tool_calls=[CALL])],
    "a told result": [user("2+2?"), assistant("hm"), user("<tool_response>4</tool_response>"), assistant("4")],
    "empty": [user(""), assistant(""), user("x")],
    "other letters": [user("\U0001f600 ne\u0301 字 👩\u200d👩 \ue0f1 \ue0f0"), assistant("ok \ue0f2"), user("👍🏽")],
    "parts": [user([{"type": "text", "text": "Hi "}, {"type": "text", "text": "there"}]), assistant("Yes")],
}
