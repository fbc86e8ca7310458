"""Chat templates: roles that they refuse, their values and their clock, and what ends prompts and completions."""

from __future__ import annotations

import datetime
import warnings

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from jmarl.config import Chat, Episodes, TrainConfig
from jmarl.models.hub.prompt_warnings import warn_of_prompts
from jmarl.models.hub.template import answer_start, refuses_system
from jmarl.models.hub.tokenize import (
    ChatPrompt,
    chat_prompt,
    decode,
    encode_answer,
    encode_completion,
    encode_prompts,
    follow_ups,
    message_end,
    stop_ids,
)

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
REFUSES = "{% for m in messages %}{% if m['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}{% endfor %}"
LEAVES_OUT = CHATML.replace("{% for m in messages %}", "{% for m in messages if m['role'] != 'system' %}")
ALTERNATES = (
    "{% for m in messages %}{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate user/assistant') }}{% endif %}{% endfor %}"
)
SYSTEM, USER = {"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi"}


@pytest.fixture
def templated(make_tokenizer):
    def make(template):
        tokenizer = make_tokenizer()
        tokenizer.chat_template = template
        return tokenizer

    return make


def read(tokenizer, messages, **settings):
    (row,) = encode_prompts(tokenizer, [messages], 2000, **settings)
    return tokenizer.decode(row)


@pytest.mark.parametrize("template", [REFUSES + CHATML, LEAVES_OUT, ALTERNATES + CHATML])
def test_a_refused_system_message_begins_the_users(templated, template):
    """In lists of messages, system=, later turns, and wherever it stands in the conversation."""
    tokenizer, meant = templated(template), "<|im_start|>user\nBe kind.\n\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert refuses_system(tokenizer, Chat())
    assert read(tokenizer, [SYSTEM, USER]) == meant == read(tokenizer, "Hi", chat=True, system="Be kind.")
    assert chat_prompt(tokenizer, "Hi", "Be kind.") == meant
    (later,) = follow_ups(tokenizer, [[2]], [[SYSTEM, USER]], 2000)
    assert tokenizer.decode(later[1:]) == "\n" + meant
    talk = [USER, {"role": "assistant", "content": "Hello"}, SYSTEM, USER]
    assert read(tokenizer, talk).endswith("assistant\nHello<|im_end|>\n" + meant)
    with pytest.warns(UserWarning, match="template of agent 3 refuses the role system"):
        warn_of_prompts(tokenizer, [[USER], [SYSTEM, USER]], True, 3)


def test_a_template_with_the_role_system_gets_it(tiny_tokenizer):
    assert not refuses_system(tiny_tokenizer, Chat())
    assert read(tiny_tokenizer, [SYSTEM, USER]).startswith(
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>"
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_prompts(tiny_tokenizer, [[SYSTEM, USER]], True, 0)


def test_texts_that_hold_a_template_already_are_warned_of_where_they_get_another(tiny_tokenizer):
    held = chat_prompt(tiny_tokenizer, "Hi")
    with pytest.warns(UserWarning, match=r"agent 1 begins with '<\|im_start\|>'"):
        warn_of_prompts(tiny_tokenizer, ["Hi", "\n" + held], True, 1)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for text in ("Hi", "Ho"):
            warn_of_prompts(tiny_tokenizer, [chat_prompt(tiny_tokenizer, text)], True, 1)
    assert len(caught) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_prompts(tiny_tokenizer, [held], False, 1)
        warn_of_prompts(tiny_tokenizer, ["What does <|im_start|> mean?", [USER | {"content": held}]], True, 1)


def test_neighbors_of_one_role_become_one_message_where_roles_must_alternate(templated):
    tokenizer = templated(ALTERNATES + CHATML)
    assert read(tokenizer, [USER, USER]) == "<|im_start|>user\nHi\n\nHi<|im_end|>\n<|im_start|>assistant\n"


PARTS = "{% for m in messages %}<|im_start|>{% for part in m['content'] %}{{ part['text'] }}{% endfor %}{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{{ raise_exception('never') }}",
        "{{ messages.nothing.at_all }}",
        "{{ messages[0]['content'] + tools }}",  # which is None
        ALTERNATES + CHATML,
        PARTS,  # leaves out what is a text
        LEAVES_OUT.replace("system", "user"),
    ],
)
def test_what_a_template_refuses_is_one_sentence(templated, template):
    messages = [{"role": "assistant", "content": "Hi"}, {"role": "user", "content": "1"}]
    with pytest.raises(
        ValueError, match="prompt 0: the chat template refuses messages of the roles assistant, user .*chat=False"
    ):
        encode_prompts(templated(template), [messages], 2000)
    with pytest.raises(ValueError, match="prompt 0 of a later turn: the chat template refuses"):
        follow_ups(templated(template), [[2]], [messages], 2000)


# --- values and clock -----------------------------------------------------------------------------------------------------

THINKS = CHATML.replace("assistant\n{% endif %}", "assistant\n{% if not thinks %}<none>\n{% endif %}{% endif %}")
DATED = "  {% if strftime_now is defined %}{{ strftime_now('%d %b %Y, %-d %H') }}{% endif %}\n" + CHATML


def test_templates_get_the_values_of_the_settings_everywhere(templated):
    tokenizer, chat = templated(THINKS), Episodes(chat=True, chat_template_kwargs={"thinks": True}).chat_settings
    assert read(tokenizer, "Hi", chat=True).endswith("<none>\n") and not read(tokenizer, "Hi", chat=chat).endswith("<none>\n")
    assert read(tokenizer, [USER], chat=Chat(False, {"thinks": True})) == read(tokenizer, "Hi", chat=chat)
    (row,) = follow_ups(tokenizer, [[2]], ["Hi"], 200, chat=chat)
    assert "<none>" not in tokenizer.decode(row) and message_end(tokenizer, chat) == 2
    for name in ("add_generation_prompt", "strftime_now"):
        with pytest.raises(ValueError, match=f"chat_template_kwargs=.* without '{name}'"):
            TrainConfig.of(chat_template_kwargs={name: 1})
    with pytest.raises(ValueError, match="chat_template_kwargs=.* values that JSON has"):
        TrainConfig.of(chat_template_kwargs={"day": datetime.date(2026, 2, 3)})


def test_the_clock_of_a_template_stands_still(templated):
    tokenizer, chat = templated(DATED), Chat(True, date=datetime.date(2026, 2, 3))
    assert read(tokenizer, "Hi", chat=chat).startswith("03 Feb 2026, 3 00<|im_start|>user")
    tokenizer, today = templated(DATED.replace(" %H", "")), datetime.date.today()
    assert read(tokenizer, "Hi", chat=Chat(True, date=today)) == read(tokenizer, "Hi", chat=True)


def test_settings_of_chats_are_checked():
    assert Episodes(chat_date=datetime.date(2026, 2, 3)).chat_settings.date == datetime.date(2026, 2, 3)
    with pytest.raises(ValueError, match="chat_date='3 Feb' is not allowed"):
        Episodes(chat_date="3 Feb")
    both = Episodes(chat=[True, False]).chat_settings
    assert both.of(0) and not both.of(1)
    with pytest.raises(TypeError, match="one value per agent"):
        bool(both)


# --- ends -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("single", ["$A <|endoftext|>", "<|im_start|> $A <|im_end|>", "$A <|im_end|> <|endoftext|>"])
def test_no_prompt_ends_with_an_end_token(templated, single):
    """Neither if the tokenizer appends it, nor if a template or a text does."""
    tokenizer = templated("{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}")
    names = [("<|endoftext|>", 0), ("<|im_start|>", 1), ("<|im_end|>", 2)]
    tokenizer.backend_tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=names)
    start = [1] if single.startswith("<|im_start|>") else []
    word = tokenizer.encode("hello", add_special_tokens=False)
    for text in ("hello", "hello<|im_end|>", "hello<|im_end|><|endoftext|>"):
        assert encode_prompts(tokenizer, [text], 100) == [[*start, *word]]
    assert encode_prompts(tokenizer, ["hello"], 100, chat=True) == [word]
    assert follow_ups(tokenizer, [[7]], ["hello<|im_end|>"], 100) == [[7, *word]]
    assert follow_ups(tokenizer, [[7, 2]], ["hello"], 100, chat=True) == [[7, 2, *word]]
    assert encode_prompts(tokenizer, ["<|endoftext|>hello"], 100)[0][-len(word) - 1] == 0  # at the beginning it stays


def test_a_turn_ends_once(tiny_tokenizer):
    """Also if the completion ended with another end token than the template's, or a text of a data set ends with it."""
    for ending in stop_ids(tiny_tokenizer):
        (row,) = follow_ups(tiny_tokenizer, [[7, ending]], ["Go on"], 100, chat=True)
        assert sum(i in stop_ids(tiny_tokenizer) for i in row) == 2  # of the completion, and of the user's message
    for chat in (False, True):
        rows = [encode_completion(tiny_tokenizer, text, 2, chat) for text in ("field", "field<|im_end|>", "field<|im_end|>\n")]
        assert rows == [[*tiny_tokenizer.encode("field"), 2]] * 3
        own = encode_completion(tiny_tokenizer, "field<|endoftext|>", 2, chat, stop=stop_ids(tiny_tokenizer))
        assert own == [*tiny_tokenizer.encode("field"), 2 if chat else 0]


# --- what the prompt says already --------------------------------------------------------------------------------------------

THOUGHTS = {  # what templates write: before an earlier answer, before the last one, and at the end of a prompt
    "QwQ": ("", "", "<think>\n"),
    "DeepSeek-R1": ("", "", "<think>"),
    "Qwen3-Thinking": ("", "<think>\n\n</think>\n\n", "<think>\n"),
    "Qwen3 without": ("", "", "<think>\n\n</think>\n\n"),
    "SmolLM3 without": ("<think>\n\n</think>\n",) * 3,
    "words": ("", "", "The answer is "),
}


def thinking(earlier, last, asked):
    header = "{% set before = last if loop.last else earlier %}<|im_start|>{{ m['role'] }}\n"
    template = CHATML.replace("<|im_start|>{{ m['role'] }}\n", header + "{{ before if m['role'] == 'assistant' }}")
    template = template.replace("assistant\n{% endif %}", "assistant\n{{ asked }}{% endif %}")
    return f"{{% set earlier = {earlier!r} %}}{{% set last = {last!r} %}}{{% set asked = {asked!r} %}}{template}"


@pytest.mark.parametrize("is_token", [True, False])
@pytest.mark.parametrize("name", THOUGHTS)
def test_what_the_generation_prompt_writes_is_not_in_the_answer(templated, name, is_token):
    """Whether <think> is a token or text, and whatever blanks stand around it."""
    opening = THOUGHTS[name][-1]
    tokenizer = templated(thinking(*THOUGHTS[name]))
    if is_token or name.startswith("SmolLM3"):
        tokenizer.add_tokens(["<think>", "</think>"])
    (prompt,) = encode_prompts(tokenizer, ["Hi"], 100, chat=True)
    bare = encode_completion(tokenizer, "so", 2, True)
    assert bare == [*tokenizer.encode("so"), 2]
    for begun in (opening, opening.rstrip(), f"\n{opening}", f"  {opening.strip()}\n", opening.replace("\n\n", "\n")):
        answer = f"{begun}{' ' * (name == 'words' and begun[-1] != ' ')}so"
        row = encode_completion(tokenizer, answer, 2, True)
        assert tokenizer.decode(row).lstrip() == "so<|im_end|>", (begun, row)
        assert row == bare or not opening.endswith(begun.lstrip()), "blanks that the prompt has are not repeated"
    for text in ("so", "\n<thinks>", "assistant\n", f"so {opening}", f"{opening.rstrip()}nt"[1:]):
        assert tokenizer.decode(encode_completion(tokenizer, text, 2, True)) == f"{text}<|im_end|>"
    assert tokenizer.decode(prompt).endswith(f"<|im_start|>assistant\n{opening}")


def test_an_answer_is_whole_after_a_bare_header(templated):
    for name, template in {"ChatML": CHATML, "no generation prompt": CHATML.partition("{% if add")[0]}.items():
        tokenizer = templated(template)
        tokenizer.add_tokens(["<think>"])
        for text in ("<think>\nhm</think>", "assistant\nso", "\nso", " <think>", "<|im_start|>assistant\n"):
            assert tokenizer.decode(encode_answer(tokenizer, text, True)) == text, name


LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}<|endoftext|>[INST] {{ m['content'] }} [/INST]"
    "{% else %} {{ m['content'] }} <|im_end|>{% endif %}{% endfor %}"
)
HOISTS = (
    "{% set ns = namespace(s='') %}{% for m in messages if m['role'] == 'system' %}{% set ns.s = m['content'] %}{% endfor %}"
    "{{ ns.s }}" + LEAVES_OUT
)


@pytest.mark.parametrize("ending", [0, 2])
def test_a_turn_ends_once_where_the_template_writes_a_blank_before_its_end(templated, ending):
    tokenizer = templated(LLAMA2)
    (row,) = follow_ups(tokenizer, [[7, ending]], ["more"], 100, chat=True)
    assert row[:2] == [7, ending] and tokenizer.decode(row[2:]) == "<|endoftext|>[INST] more [/INST]"
    (row,) = follow_ups(tokenizer, [[7]], ["more"], 100, chat=True)  # cut off: the template ends it
    assert tokenizer.decode(row[1:]) == " <|im_end|><|endoftext|>[INST] more [/INST]"


GLM = (
    "{% for m in messages %}<|{{ m['role'] }}|>\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("ended", ["<|im_end|>", "<|user|>", "<|tool|>"])
@pytest.mark.parametrize("role", ["user", "tool"])
def test_the_next_header_stays_whatever_ended_the_completion(templated, ended, role):
    """Where the tokens that begin messages of others end answers."""
    tokenizer = templated(GLM)
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|user|>", "<|assistant|>", "<|tool|>"]})
    stop = tokenizer.convert_tokens_to_ids(["<|im_end|>", "<|user|>", "<|tool|>"])
    last, more = tokenizer.convert_tokens_to_ids(ended), ChatPrompt([{"role": role, "content": "more"}])
    (row,) = follow_ups(tokenizer, [[7, last]], [more], 100, chat=True, stop=stop)
    header = f"<|{role}|>\nmore<|assistant|>"
    assert tokenizer.decode(row[1:]) == (header if ended == f"<|{role}|>" else ended + header)


def test_a_turn_ends_once_where_two_tokens_end_it(templated):
    """Whether the completion has both, as those of Command R7B, or another end."""
    tokenizer = templated(CHATML.replace("<|im_end|>", "{{ '<|end|>' if m['role'] == 'assistant' }}<|im_end|>"))
    tokenizer.add_tokens(["<|end|>"])
    answer = tokenizer.encode("so<|end|>")
    for ended in ([*answer, 2], [7, 2], [7, 0]):
        (row,) = follow_ups(tokenizer, [ended], ["more"], 100, chat=True)
        assert tokenizer.decode(row[len(ended) :]) == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant\n"


@pytest.mark.parametrize("ended", [0, 2])
@pytest.mark.parametrize("always", [False, True])
def test_a_turn_ends_once_where_the_last_answer_ends_otherwise(templated, ended, always):
    """As in OLMo 3's template; also where the generation prompt is written whether it is asked for or not."""
    template = CHATML.replace("<|im_end|>", "{{ '<|endoftext|>' if loop.last and m['role'] == 'assistant' else '<|im_end|>' }}")
    tokenizer = templated(
        template.replace("{% if add_generation_prompt %}", "").replace("{% endif %}", "") if always else template
    )
    (row,) = follow_ups(tokenizer, [[7, ended]], ["more"], 100, chat=True)
    if ended == 2 or not always:
        assert tokenizer.decode(row[2:]).rstrip() == "\n<|im_start|>user\nmore<|im_end|>\n<|im_start|>assistant"
    assert tokenizer.decode(row).count("<|im_start|>user") == 1


def test_a_system_message_of_a_later_turn_is_not_lost_where_the_template_writes_it_first(templated):
    tokenizer = templated(HOISTS)
    assert read(tokenizer, [SYSTEM, USER]).startswith("Be kind.<|im_start|>user")
    for system in ("Be kind.", "x\u241ey"):  # whatever it says, what came before is not written again
        (row,) = follow_ups(tokenizer, [[2]], [[{"role": "system", "content": system}, USER]], 2000)
        assert tokenizer.decode(row[1:]) == f"\n<|im_start|>user\n{system}\n\nHi<|im_end|>\n<|im_start|>assistant\n"
    two = [SYSTEM, {"role": "system", "content": "Be brief."}, USER]  # the template would write the last one alone
    assert read(tokenizer, two).startswith("<|im_start|>user\nBe kind.\n\nBe brief.\n\nHi<|im_end|>")


# --- every character --------------------------------------------------------------------------------------------------------


def test_end_tokens_of_the_models_files_end_turns_and_no_prompt(make_tokenizer):
    """stop= has ends that the tokenizer does not know, as those of generation_config.json."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = CHATML.replace("<|im_end|>", "<end>")
    tokenizer.add_special_tokens({"additional_special_tokens": ["<end>"]})
    end = tokenizer.convert_tokens_to_ids("<end>")
    assert end not in stop_ids(tokenizer)
    stop = (*stop_ids(tokenizer), end)
    [history] = encode_prompts(tokenizer, ["Hi"], 100, chat=True, stop=stop)
    for last in stop:  # whichever token ended the completion, the turn ends once
        [row] = follow_ups(tokenizer, [[*history, 65, last]], ["And?"], 200, chat=True, stop=stop)
        assert tokenizer.decode(row[len(history) + 2 :]).startswith("\n<|im_start|>user\nAnd?<end>\n")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}<end>{% endfor %}"
    [row] = encode_prompts(tokenizer, ["Hi"], 100, chat=True, stop=stop)
    assert tokenizer.decode(row) == "Hi"


def sentencepiece(always):
    """Return a tokenizer of letters whose blanks are ▁; always: with a blank before each piece of a text, as in Llama 2."""
    letters = [*"▁abcuxyz:.\n", "▁a", "▁b"]
    tokenizer = Tokenizer(models.BPE({x: i for i, x in enumerate(["</s>", *letters])}, [("▁", "a"), ("▁", "b")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always" if always else "first", split=False)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="always" if always else "first")
    tokenizer.add_special_tokens(["</s>"])
    template = (
        "{% for m in messages %}{{ m['role'][0] }}: {{ m['content'] | trim }}{% if m['role'] == 'assistant' %}</s>{% endif %}"
    )
    template += "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", chat_template=template)


@pytest.mark.parametrize("always", [True, False])
def test_completions_keep_the_blanks_of_sentencepiece(always):
    tokenizer = sentencepiece(always)
    for text in (" a", "a", "  a  b ", "b a\n a", "", " "):
        assert decode(tokenizer, [encode_answer(tokenizer, text)]) == [text]
    (prompt,) = encode_prompts(tokenizer, ["x:"], 100)
    whole = tokenizer.decode([*prompt, *encode_answer(tokenizer, " a b")], clean_up_tokenization_spaces=False)
    assert whole == "x: a b"


def test_an_answer_begins_as_the_template_writes_it():
    """A template that ends its prompt before a blank: the blank belongs to the completion, as a model writes it."""
    tokenizer = sentencepiece(False)
    assert answer_start(tokenizer, Chat(True)) == " "
    (row,) = encode_prompts(tokenizer, ["x"], 100, chat=True)
    row += encode_completion(tokenizer, "a", 0, chat=True)
    messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "a"}]
    assert tokenizer.decode(row) == tokenizer.apply_chat_template(messages, tokenize=False)
