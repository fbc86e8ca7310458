"""The control tokens of a conversation, in order, are those of the same conversation with neutral contents.

Twelve kinds of templates, which edit, move, repeat and decode contents, with six kinds of tokenizers. Contents, names and
descriptions of tools, and keys and values of calls hold random pieces of control tokens.
"""

from __future__ import annotations

import functools
import random
import re

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from jmarl.config import Chat
from jmarl.models.hub.messages import each_text
from jmarl.models.hub.prompt_warnings import warn_of_plain_turns
from jmarl.models.hub.special_tokens import special_tokens
from jmarl.models.hub.template import TemplateRefusal, encode_messages, plain_turns
from jmarl.models.hub.tokenize import encode_answer

SPECIAL = ["<unk>", "<s>", "</s>", "<|start|>", "<|end|>", "[INST]", "[/INST]", "<｜User｜>"]
PLAIN = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_output>", "</tool_output>", "<|user|>", "<|tool|>"]
SIGNS = "|<>[]/_｜-&;:{}\"'\\ \n.,#"
ASK = "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
LOOP, END = "{% for m in messages %}", "{% endfor %}"


def turns(content, rest=""):
    return f"{LOOP}<|start|>{{{{ m.role }}}}\n{content}{rest}<|end|>\n{END}{ASK}"


CALLS = "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name }}{{ c.function | tojson }}</tool_call>{% endfor %}"
TEMPLATES = {
    "plain": turns("{{ m.content }}"),
    "trims": turns("{{ m.content | trim }}"),
    "removes": "{% if messages[0].role == 'system' %}<|start|>system\n{{ messages[0].content.replace('/no_think', '')"
    ".replace('/think', '').rstrip() }}<|end|>\n{% endif %}"
    "{% for m in messages if m.role != 'system' %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>\n{% endfor %}" + ASK,
    "decodes": turns("{{ m.content | replace('&lt;', '<') | replace('{', '<') }}"),
    "upper": turns("{{ (m.content | upper) ~ (m.content | lower) }}"),
    "hoists": "{% set ns = namespace(s='') %}"
    "{% for m in messages %}{% if m.role == 'system' %}{% set ns.s = ns.s + m.content %}{% endif %}{% endfor %}<s>{{ ns.s }}"
    "{% for m in messages %}{% if m.role == 'user' %}<｜User｜>{{ m.content }}"
    "{% elif m.role == 'assistant' %}[INST]{{ m.content.split('</think>')[-1] }}</s>"
    "{% elif m.role == 'tool' %}<tool_output>{{ m.content }}</tool_output>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}[INST]<think>\n{% endif %}",
    "tools": "{% if tools %}<|start|>system\n{{ tools | tojson }}{% for t in tools %}{{ t.function.name }}: "
    "{{ t.function.description }}{% endfor %}<tool_call></tool_call><|end|>{% endif %}" + turns("{{ m.content }}", CALLS),
    "roles": f"{LOOP}<|{{{{ m.role }}}}|>{{{{ m.content }}}}<|end|>{END}",
    "joins": f"{LOOP}<{{{{ m.content }}}}>{{{{ m.content[1:] }}}}{{{{ m.content[:-1] }}}}|>{END}<|start|>",
    "repeats": turns("{{ m.content }}{{ messages[0].content }}{{ m.content[::-1] }}"),
    "json": f"<s>{{{{ messages | tojson }}}}{LOOP}{{{{ m.content.split() | join }}}}{END}</s>",
    "refuses": "{% for m in messages if m.role == 'system' or '<|end|>' in m.content %}{{ raise_exception('no') }}{% endfor %}"
    + turns("{{ m.content }}"),
}  # fmt: skip


@functools.cache
def tokenizer_of(kind, template):
    alphabet = sorted({*map(chr, range(32, 127)), "\n", "▁", "｜", "é"})
    if kind in ("unigram", "fallback"):
        pieces = [*SPECIAL, *alphabet, *(f"<0x{i:02X}>" for i in range(256) if kind == "fallback")]
        tokenizer = Tokenizer(models.Unigram([(x, -1.0) for x in pieces], unk_id=0, byte_fallback=kind == "fallback"))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    elif kind == "llama":
        tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(["<unk>", *alphabet])}, [], unk_token="<unk>"))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    else:
        letters = sorted(pre_tokenizers.ByteLevel.alphabet())
        tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(letters)}, []))
        tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    if kind == "normal":
        steps = [normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]
        tokenizer.normalizer = normalizers.Sequence(steps)
    flags = {
        "normalized": kind == "normal",
        "lstrip": kind == "flags",
        "rstrip": kind == "flags",
        "single_word": kind == "flags",
    }
    tokenizer.add_special_tokens([AddedToken(x, special=True, **flags) for x in SPECIAL])
    tokenizer.add_tokens([AddedToken(x, special=False, **flags) for x in PLAIN])
    unknown = {} if kind in ("bytes", "normal", "flags") else {"unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=TEMPLATES[template], **unknown)


def spliced(rng):
    """Return a text of words, signs, and pieces of control tokens."""
    pieces = []
    for _ in range(rng.randrange(7)):
        token = rng.choice(SPECIAL + PLAIN)
        a, b = sorted(rng.choices(range(len(token) + 1), k=2))
        inner = token[:a] + rng.choice(["/think", "/no_think", "</think>", " ", "é", "\u200b"]) + token[a:]
        other = [token[a:b], token[:b], token[a:], token.upper(), token.replace("<", "&lt;"), token[::-1], inner]
        wide = "".join(chr(ord(x) + 0xFEE0) if "!" <= x <= "~" else x for x in token)
        pieces.append(rng.choice([token, token, wide, rng.choice(SIGNS), "word", " a 1 ", *other]))
    return "".join(pieces)


def neutral(value, own=(), key=""):
    """Return a value with x in place of letters and digits, without roles, names of fields, types and ids.

    own: tokens that an assistant's message keeps.
    """
    if isinstance(value, dict):
        own = own if value.get("role") == "assistant" or "role" not in value else ()
        return {name: neutral(x, own, name) for name, x in value.items()}
    if isinstance(value, list):
        return [neutral(x, own) for x in value]
    if key in ("role", "type", "id"):
        return value
    parts = re.split(f"({'|'.join(map(re.escape, own))})", value) if own else [value]
    return "".join(x if i % 2 else re.sub(r"[^\W_]", "x", x) for i, x in enumerate(parts))


def conversation(rng, with_tools):
    roles = [rng.choice(["system", "user"]), "user", "assistant", rng.choice(["tool", "user"]), "user"]
    messages = [{"role": role, "content": spliced(rng) + "." * (role != "assistant")} for role in roles]
    if not with_tools:
        return [m | {"role": "user"} if m["role"] == "tool" else m for m in messages], None
    arguments = {"town": spliced(rng), f"k{rng.randrange(9)}": [spliced(rng)]}
    messages[2]["tool_calls"] = [{"type": "function", "id": "a1", "function": {"name": spliced(rng), "arguments": arguments}}]
    function = {"name": spliced(rng), "description": spliced(rng), "parameters": {"type": "object", "required": [spliced(rng)]}}
    return messages, [{"type": "function", "function": function}]


def controls(tokenizer, ids, messages):
    """Return the control tokens in ids; without those that only an assistant's message may write, where one may have some."""
    tokens, said = special_tokens(tokenizer), str([m for m in messages if m["role"] == "assistant"])
    return [i for i in ids if i in (tokens.turn_numbers if set("<＜&") & set(said) else tokens.numbers)]


def check(rng, kind, template, follows):
    tokenizer = tokenizer_of(kind, template)
    messages, tools = conversation(rng, template in ("tools", "json"))
    messages, own = messages[3:] if follows else messages, special_tokens(tokenizer).own
    ids = []
    for said, offered in ((messages, tools), (neutral(messages, own), neutral(tools) if tools else None)):
        chat = Chat(True, {"tools": offered} if offered else {})
        ids.append(encode_messages(tokenizer, said, chat, follows=follows))
    mine, meant = (controls(tokenizer, row, messages) for row in ids)
    assert mine == meant, (kind, template, messages, tools, tokenizer.decode(ids[0]), tokenizer.decode(ids[1]))


@pytest.mark.parametrize("template", TEMPLATES)
@pytest.mark.parametrize("kind", ["bytes", "normal", "flags", "unigram", "fallback", "llama"])
def test_contents_write_no_control_tokens(kind, template):
    rng = random.Random(f"{kind} {template}")
    for i in range(6):
        check(rng, kind, template, follows=i % 3 == 2)


@pytest.mark.parametrize("template", ["plain", "removes", "roles", "tools"])
def test_ordinary_messages_have_the_ids_of_their_template(template):
    """Also with what a template reads in them, and with an assistant's own tokens."""
    tokenizer = tokenizer_of("bytes", template)
    said = [("system", "Be kind. /no_think"), ("user", 'Is 1 < 2 | 3 > "2"?'), ("assistant", "<think>\nno"), ("user", "é ")]
    messages = [{"role": role, "content": content} for role, content in said]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encode_messages(tokenizer, messages, Chat(True)) == tokenizer.encode(text, add_special_tokens=False)


SWITCHED = turns("{{ m.content if m.role != 'assistant' else m.content.split('</think>')[-1] }}").replace(
    "assistant\n{% endif %}", "assistant\n{% if '/no_think' in messages[0].content %}<think>\n\n</think>{% endif %}{% endif %}"
)


def test_a_template_may_write_an_assistants_own_tokens_because_of_a_message():
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer, eos_token="</s>", chat_template=SWITCHED
    )
    think = tokenizer.convert_tokens_to_ids("<think>")
    for text, count in (("a", 0), ("/no_think", 1), ("<think>\n/no_think", 1), ("<think>/no_think", 0)):
        ids = encode_messages(tokenizer, [{"role": "user", "content": text}], Chat(True))
        assert ids.count(think) == count, text


def test_a_template_may_not_write_tokens_of_turns_because_of_a_message():
    """Then the message is broken up; a client's message that cannot be is refused."""
    template = TEMPLATES["plain"] + "{% if 'hi' in messages[0].content %}<|end|>{% endif %}"
    broken = TEMPLATES["plain"] + "{% if messages[0].content | unique | list | length > 5 %}<|end|>{% endif %}"
    backend, said = tokenizer_of("bytes", "plain").backend_tokenizer, [{"role": "user", "content": 'say "hi"!'}]
    meant = encode_messages(tokenizer_of("bytes", "plain"), said, Chat(True))
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    assert encode_messages(fast, said, Chat(True), outside=True) == meant
    fast = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=broken)
    with pytest.raises(TemplateRefusal, match="becomes control tokens of the chat template: change the texts"):
        encode_messages(fast, said, Chat(True), outside=True)
    with pytest.warns(UserWarning, match="its letters are read as x"):
        assert fast.decode(encode_messages(fast, said, Chat(True))).startswith('<|start|>user\nxxx "xx"!<|end|>\n<|start|>')


# Tokens that templates write around an assistant's text, as those of GLM, DeepSeek, Command R and Phi do, and whose they are.
ASKS = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
SAYS, IS_ANSWER = f"{LOOP}<|{{{{ m.role }}}}|>{{{{ ", "if m.role == 'assistant'"
BOTH = {"<think>", "</think>"}
OWN = {
    "cuts thoughts": (turns(f"{{{{ m.content.split('</think>')[-1] {IS_ANSWER} else m.content }}}}"), BOTH),
    "empty thoughts": (f"{SAYS}'<think></think>' {IS_ANSWER} }}}}{{{{ m.content }}}}{END}{ASKS}", BOTH),
    "one of two prompts": (
        f"{SAYS}'</think>' {IS_ANSWER} }}}}{{{{ m.content }}}}{END}"
        + ASKS.replace("|>", "|>{{ '<think>' if thinking else '</think>' }}"),
        BOTH,
    ),
    "around answers": (f"{SAYS}'<think>' ~ m.content ~ '</think>' {IS_ANSWER} else m.content }}}}{END}{ASKS}", BOTH),
    "a tool's end before an answer": (
        f"{LOOP}{{% if m.role == 'tool' %}}<tool_output>{{{{ m.content }}}}{{% elif m.role == 'assistant' %}}"
        "{{ '</tool_output>' if loop.index0 and messages[loop.index0 - 1].role == 'tool' }}"
        f"<tool_call>{{{{ m.content }}}}</tool_call>{{% else %}}<|user|>{{{{ m.content }}}}{{% endif %}}{END}",
        {"<tool_call>", "</tool_call>"},
    ),
    "tools of a system message": (turns("{{ m.content ~ ('<|tool|>' ~ m.tools ~ '</tool_output>' if m.tools) }}"), set()),
    "a system message for a setting": (
        f"{LOOP}{{{{ dict(system='<|tool|>', user='<|user|>').get(m.role, '<|assistant|>') ~ m.content }}}}{END}"
        + ASKS.replace("<", "{% if enable_thinking is defined and not enable_thinking %}<|tool|>Be quick.{% endif %}<", 1),
        set(),
    ),
    "calls as text": (
        turns(
            "{{ m.content }}",
            "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function.name ~ '(' + c.function.arguments }}{% endfor %}",
        ),
        {"<tool_call>", "</tool_call>"},
    ),
}


@pytest.mark.parametrize("name", OWN)
def test_tokens_are_an_assistants_own_where_only_it_is_seen_to_write_or_read_them(name):
    """All others are of turns, in its text too."""
    template, own = OWN[name]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer, eos_token="</s>", chat_template=template
    )
    assert special_tokens(tokenizer).own == own
    for token in {x for x in PLAIN if x in special_tokens(tokenizer).ids}:
        ids = encode_answer(tokenizer, f"a {token} b", chat=True)
        assert (tokenizer.convert_tokens_to_ids(token) in ids) == (token in own), token


@pytest.mark.parametrize(
    "condition",
    [
        "m == (messages | selectattr('role', 'equalto', 'user') | list)[-1]",
        "loop.index == messages | map(attribute='content') | unique | list | length",
    ],
)
def test_a_template_may_look_for_a_message_among_others(condition, recwarn):
    """Ordinary texts are neither masked nor broken up then, also if they are as long as each other."""
    template = TEMPLATES["plain"].replace("<|start|>{{", f"{{% if {condition} %}}<tool_call>{{% endif %}}<|start|>{{{{")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer, eos_token="</s>", chat_template=template
    )
    messages = [{"role": role, "content": text} for role, text in (("user", "yes"), ("assistant", "no!"), ("user", "why"))]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert encode_messages(tokenizer, messages, Chat(True)) == tokenizer.encode(text, add_special_tokens=False)
    assert "<tool_call>" in text and not recwarn.list


@pytest.mark.parametrize("form", ["NFKC", "NFKD"])
def test_letters_that_a_tokenizer_normalizes_make_no_control_tokens(form):
    """Circled letters, wide ones and signs, where control tokens are looked for in the normalized text."""
    backend = Tokenizer.from_str(tokenizer_of("normal", "plain").backend_tokenizer.to_str())
    backend.normalizer = getattr(normalizers, form)()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=TEMPLATES["plain"])
    for text in ("<ⓢ>", "﹤/ⓢ﹥", "<｜ｓtart|>", "<⽑|end|>"):
        ids = encode_messages(tokenizer, [{"role": "user", "content": text}], Chat(True))
        assert len([i for i in ids if i in special_tokens(tokenizer).numbers]) == 3, text


def test_tokens_of_any_letters_and_templates_that_cut_texts_are_no_way_out():
    """A token whose letters are all x, a template that leaves first letters out, names in calls, other values of templates."""
    backend = Tokenizer.from_str(tokenizer_of("bytes", "plain").backend_tokenizer.to_str())
    backend.add_special_tokens([AddedToken("<x>", special=True)])
    template = (
        turns("{{ m.content.lstrip('<x') }}{{ m.name }}", CALLS) + "{% for d in documents or [] %}{{ d.text }}{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="</s>", chat_template=template)
    call = {"type": "function", "function": {"name": "<tool_call>", "arguments": {}}}
    messages = [
        {"role": "user", "content": "<x>a<x>"},
        {"role": "assistant", "content": "<x>", "tool_calls": [call]},
        {"role": "tool", "content": "<think><x>", "name": "</tool_call><x>"},
    ]
    ids = encode_messages(tokenizer, messages, Chat(True, {"documents": [{"text": "<|end|><x>"}]}))
    names = tokenizer.convert_ids_to_tokens([i for i in ids if i in special_tokens(tokenizer).numbers])
    assert names == [
        "<|start|>",
        "<|end|>",
        "<|start|>",
        "<tool_call>",
        "</tool_call>",
        "<|end|>",
        "<|start|>",
        "<|end|>",
        "<|start|>",
    ]


@pytest.mark.parametrize("key", ["tool_call", "tool-call", "think", "s"])
def test_names_of_fields_make_no_control_tokens(key):
    """Where a template writes <key> for each field of a tool that it does not know."""
    template = (
        "{% for t in tools or [] %}{{ t.function.name }}{% for key in t.function if key != 'name' %}"
        "{% set word = key | replace('-', '_') %}{{ '<' ~ word ~ '>' ~ t.function[key] ~ '</' ~ word ~ '>' }}{% endfor %}"
        "{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer,
        eos_token="</s>",
        chat_template=template + TEMPLATES["tools"],
    )
    tools = [{"type": "function", "function": {"name": "f", "description": "-", **fields}} for fields in ({}, {key: "-"})]
    messages = [{"role": "user", "content": "a"}]
    rows = [encode_messages(tokenizer, messages, Chat(True, {"tools": [tool]})) for tool in tools]
    numbers = special_tokens(tokenizer).numbers
    assert [i for i in rows[0] if i in numbers] == [i for i in rows[1] if i in numbers]
    assert f"<{key}>-</{key}>".replace("-c", "_c") in tokenizer.decode(rows[1]) or key == "tool-call"


def test_a_template_reads_switches_and_the_names_of_its_functions():
    """What it writes because of them is as without the library, also if nothing is left of a message."""
    template = (
        "{% set said = messages[0].content.replace('/think', '') | trim %}<|start|>system\n{{ said or '<think>no</think>' }}"
        "{% if 'detailed thinking on' in messages[0].content %}<tool_call>{% endif %}<|end|>\n"
        "{% for m in messages[1:] %}<|start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
        "{{ '<tool_call>' if c.function.name == 'python' and 'python' in enabled else '<tool_output>' }}{{ c.function.name }}"
        "{% endfor %}<|end|>\n"
        "{% endfor %}"
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer, eos_token="</s>", chat_template=template
    )
    for system, function in (("/think", "python"), (" /think\n", "bash"), ("Be kind. detailed thinking on", "python")):
        calls = [{"type": "function", "function": {"name": function, "arguments": {}}}]
        messages = [
            {"role": "system", "content": system},
            {"role": "user", "content": "a"},
            {"role": "assistant", "content": "b", "tool_calls": calls},
        ]
        text = tokenizer.apply_chat_template(messages, tokenize=False, enabled=["python"])
        ids = encode_messages(tokenizer, messages, Chat(True, {"enabled": ["python"]}))
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_texts_with_all_private_characters_are_encoded_in_linear_time():
    tokenizer = tokenizer_of("bytes", "plain")
    text = "".join(map(chr, range(0xF0000, 0x10FFFE))) + "<|end|>"
    ids = encode_messages(tokenizer, [{"role": "user", "content": text}], Chat(True))
    assert ids.count(tokenizer.convert_tokens_to_ids("<|end|>")) == 1 and len(ids) > 4 * 131_000


def test_completions_write_their_own_tokens_alone():
    """Of the tokens that only an assistant's message has, also in data; those of tools' outputs are text."""
    tokenizer = tokenizer_of("bytes", "hoists")
    own, turns_ = special_tokens(tokenizer).own, special_tokens(tokenizer).turn_numbers
    assert own == {"<think>", "</think>"}
    ids = encode_answer(tokenizer, "<think>a</think><tool_output>b</tool_output></s>", chat=True)
    assert not turns_ & {*ids} and tokenizer.convert_tokens_to_ids("</think>") in ids
    assert tokenizer.convert_tokens_to_ids("<think>") not in ids, "the generation prompt has it"


@pytest.mark.parametrize("template", ["plain", "hoists", "roles"])
def test_templates_with_tokens_for_turns_are_not_warned_of(template):
    assert plain_turns(tokenizer_of("bytes", template), TEMPLATES[template], Chat(True)) is None


@pytest.mark.parametrize("begin", ["### Response:", "<|assistant|>"])
def test_a_template_whose_turns_are_plain_text_is_warned_of(begin):
    template = f"<s>{LOOP}### {{{{ m.role }}}}: {{{{ m.content }}}}\n{END}{begin}"
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer_of("bytes", "plain").backend_tokenizer, eos_token="</s>", chat_template=template
    )
    with pytest.warns(UserWarning, match="template of agent 2 begins messages with the plain text '### assistant:'"):
        warn_of_plain_turns(fast, True, 2)
    warn_of_plain_turns(fast, False, 2)


def test_names_that_become_equal_stay_apart_and_take_linear_time():
    """20,000 names of JSON that are no names, of which those of neutral contents are equal."""
    names = {f".{number:05}": number for number in range(20_000)}
    changed = each_text(names, lambda text, _: "x" * len(text))
    assert list(changed.values()) == list(names.values()) and sum(map(len, changed)) < 15 * len(names)
