"""The formats of data sets: rows of TRL, ShareGPT, Alpaca and MRLM are read whole, or refused with the name of the format.

What TRL 1.16 does with the same rows, seen with a ChatML template: of prompt and completion it trains the completion, of `text`
everything but the first token, as here. After the end of a turn it also trains the newline that the template writes; here
nothing after the end token is trained, because sampling stops there. Of `messages`, and of the messages of a user inside a
completion, TRL trains everything by default and with assistant_only_loss what is trained here.
"""

from __future__ import annotations

import datasets
import pytest

from jmarl.envs.reward_environment import RewardEnvironment, default_formatter
from jmarl.models.hub.agents import Agent
from jmarl.preferences.encoding import encode_pairs, encode_trajectories
from jmarl.preferences.pairs import Pair, Trajectory, load_pairs, load_trajectories, shared_examples
from jmarl.team import Team


def user(text, **fields):
    return {"role": "user", "content": text, **fields}


def assistant(text, **fields):
    return {"role": "assistant", "content": text, **fields}


SYSTEM, HI, MORE = {"role": "system", "content": "Be kind."}, user("Hi"), user("More?")
TALK = [SYSTEM, HI, assistant("One."), MORE, assistant("Two.")]
TURNS = Trajectory(((SYSTEM, HI), (MORE,)), ("One.", "Two."))
SHAREGPT = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "One."}]

TEXTS = {
    "prompt-completion, standard": ({"prompt": "Hi", "completion": " One."}, Trajectory(("Hi",), (" One.",))),
    "prompt-completion, chat": ({"prompt": [HI], "completion": [assistant("One.")]}, Trajectory(((HI,),), ("One.",))),
    "a text beside messages": ({"prompt": "Hi", "completion": [assistant("One.")]}, Trajectory(((HI,),), ("One.",))),
    "completion of three messages": ({"prompt": TALK[:2], "completion": TALK[2:]}, TURNS),
    "completion repeats the prompt": ({"prompt": TALK[:2], "completion": TALK}, TURNS),
    "earlier turns in the prompt": ({"prompt": TALK[:4], "completion": TALK[4:]}, Trajectory((tuple(TALK[:4]),), ("Two.",))),
    "text": ({"text": "Hi there."}, Trajectory(("",), ("Hi there.",))),
    "messages": ({"messages": TALK}, TURNS),
    "messages and their prompt": ({"messages": TALK, "prompt": "Hi"}, TURNS),
    "messages and a prompt of messages": ({"messages": TALK, "prompt": [HI | {"name": None}]}, TURNS),
    "ShareGPT and its prompt": ({"conversations": SHAREGPT, "prompt": SHAREGPT[:1]}, Trajectory(((HI,),), ("One.",))),
    "text and a prompt of messages": ({"text": "Hi there.", "prompt": [HI]}, Trajectory(("",), ("Hi there.",))),
    "ShareGPT": ({"conversations": SHAREGPT}, Trajectory(((HI,),), ("One.",))),
    "Alpaca": ({"instruction": "Add.", "input": "1 2", "output": "3"}, Trajectory(("Add.\n\n1 2",), ("3",))),
    "Alpaca with the whole text": (
        {"instruction": "Add.", "input": "1 2", "output": "3", "text": "Do it.\n\nAdd.\n1 2\n3"},
        Trajectory(("Add.\n\n1 2",), ("3",)),
    ),
    "Alpaca without input": ({"instruction": "Hi", "input": "", "output": "3"}, Trajectory(("Hi",), ("3",))),
}


@pytest.mark.parametrize("kind", TEXTS)
def test_texts_to_imitate_are_read_whole(kind):
    """Also with the empty fields that `datasets` adds, and with a reward."""
    row, trajectory = TEXTS[kind]
    (read,) = load_trajectories([row | {"reward": 1, "chosen": None, "tools": []}])
    assert read == trajectory._replace(reward=1.0)
    other = {"observations": ["a"], "actions": ["b"]}  # its columns are empty in this row, and the other way round
    both = datasets.Dataset.from_list([row | {"reward": 1.0} | dict.fromkeys(other), other])
    assert load_trajectories(both)[0] == read


PAIRS = {
    "explicit, standard": ({"prompt": "Sky is", "chosen": " blue", "rejected": " red"}, ("Sky is", " blue", " red")),
    "explicit, chat": ({"prompt": [HI], "chosen": [assistant("a")], "rejected": [assistant("b")]}, ((HI,), "a", "b")),
    "explicit, repeated": (
        {"prompt": "Hi", "chosen": [HI, assistant("a")], "rejected": [HI, assistant("b")]},
        ((HI,), "a", "b"),
    ),
    "explicit, messages of the chosen": (
        {"prompt": "Hi", "chosen": [HI, assistant("a")], "rejected": [HI, assistant("b")], "messages": [HI, assistant("a")]},
        ((HI,), "a", "b"),
    ),
    "implicit, chat": (
        {"chosen": [*TALK[:4], assistant("a")], "rejected": [*TALK[:4], assistant("b")]},
        (tuple(TALK[:4]), "a", "b"),
    ),
    "implicit, standard": ({"chosen": "Sky is blue.", "rejected": "Sky is black."}, ("Sky is", " blue.", " black.")),
    "implicit, one longer": ({"chosen": "Q: Hi\n\nA: a", "rejected": "Q: Hi\n\nA: a b"}, ("Q: Hi\n\nA:", " a", " a b")),
}  # fmt: skip


def test_what_mrlm_calls_environment_is_a_user():
    observations = [[HI], [{"role": "environment", "content": "r"}]]
    (read,) = load_trajectories([{"observations": observations, "actions": ["a"], "rewards": [1]}])
    assert read == Trajectory(((HI,), (user("r"),)), ("a",), 1.0)


@pytest.mark.parametrize("kind", PAIRS)
def test_pairs_are_read_whole(kind):
    row, (prompt, chosen, rejected) = PAIRS[kind]
    assert load_pairs([row]) == [Pair((prompt,), (chosen,), (rejected,))]
    assert load_pairs(datasets.Dataset.from_list([row])) == load_pairs([row])


REFUSED_TEXTS = {
    "unpaired": ({"prompt": "a", "completion": "b", "label": False}, "row 0 is of the format unpaired preference: .*KTO"),
    "unpaired, chat": ({"prompt": [HI], "completion": [assistant("b")], "label": True}, "unpaired preference"),
    "stepwise": ({"prompt": "a", "completions": ["b"], "labels": [True]}, "is of the format stepwise supervision"),
    "a pair": ({"prompt": "a", "chosen": "b", "rejected": "c"}, "is of the format preference: it is for dpo.* load_pairs"),
    "a pair with messages": ({"messages": TALK, "chosen": "b", "rejected": "c"}, "preference and messages"),
    "prompt-only": ({"prompt": [HI]}, "has nothing to imitate, but .'prompt'.*algorithms with a reward"),
    "two formats": ({"text": "a", "instruction": "b", "output": "c"}, r"2 formats \(text, Alpaca\): keep text or instruction"),
    "another prompt": ({"messages": TALK, "prompt": "Ho"}, "messages does not contain the prompt, 'Ho'"),
    "empty text": ({"text": ""}, "text is empty; leave the row out"),
    "empty prompt": ({"prompt": "", "completion": "a"}, "prompt is empty; use the column text"),
    "prompt beside a text": ({"text": "a", "prompt": "b"}, "text does not contain the prompt"),
    "tools": ({"messages": TALK, "tools": [{"name": "f"}]}, "has the column tools, which is not read"),
    "tools as text": ({"text": "a", "tools": "[{}]"}, "has the column tools"),
    "chat_template_kwargs": ({"messages": TALK, "chat_template_kwargs": {"a": 1}}, "column chat_template_kwargs.*whole run"),
    "images": ({"prompt": [HI], "completion": [assistant("a")], "images": ["x"]}, "column images.*only text"),
    "a system column": ({"conversations": SHAREGPT, "system": "Be kind."}, "column system.*first message"),
    "a history": ({"instruction": "a", "output": "b", "history": [["c", "d"]]}, "column history"),
    "ends with the user": ({"messages": TALK[:4]}, "ends with a message of role user, which nobody answers"),
    "completion ends with the user": ({"prompt": [HI], "completion": TALK[2:4]}, "completion of row 0 ends with"),
    "begins with the assistant": ({"messages": TALK[2:]}, "it begins with the assistant"),
    "two answers": ({"messages": [HI, assistant("a"), assistant("b")]}, "messages 1 and 2 are both of the assistant"),
    "prompt ends with the assistant": ({"prompt": TALK[:3], "completion": TALK[4:]}, "prompt of row 0 ends with"),
    "tool call": ({"messages": [HI, assistant("", tool_calls=[{"f": 1}])]}, "message 1 of messages of row 0 has tool_calls"),
    "function call": ({"messages": [HI, assistant("", function_call={"f": 1})]}, "has function_call"),
    "reasoning": ({"messages": [HI, assistant("a", reasoning_content="b")]}, "has reasoning_content"),
    "thinking": ({"prompt": [HI], "completion": [assistant("a", thinking="b")]}, "has thinking"),
    "name": ({"messages": [user("a", name="Ann"), assistant("b")]}, "message 0 .* has name"),
    "train": ({"messages": [HI, assistant("b", train=False)]}, "has train"),
    "weight": ({"conversations": [SHAREGPT[0], SHAREGPT[1] | {"weight": 0}]}, "has weight"),
    "tool": ({"messages": [HI, {"role": "tool", "content": "4"}, assistant("4")]}, "has the role 'tool'"),
    "developer": ({"messages": [{"role": "developer", "content": "4"}, HI, assistant("4")]}, "has the role 'developer'"),
    "observation": ({"conversations": [*SHAREGPT, {"from": "observation", "value": "4"}]}, "has the role 'observation'"),
    "parts": ({"messages": [user([{"type": "text", "text": "a"}]), assistant("b")]}, r"not a list of parts \(images are not"),
    "no content": ({"messages": [HI, assistant(None)]}, "message 1 .* is not as it should be"),
    "messages as text": ({"messages": "[{}]"}, "is a text or a list of messages"),
    "number": ({"prompt": "2 + 2", "completion": 4}, "completion is a text or a list of messages; got 4"),
    "number as text": ({"text": 4}, "text must be a text; got 4"),
    "tool call as an action": ({"observations": ["a"], "actions": [assistant("", tool_calls=[1])]}, "has tool_calls"),
    "a number as a prompt": ({"messages": TALK, "prompt": 5}, "prompt of row 0 is a text or a list of messages"),
    "one message as an observation": ({"observations": [HI], "actions": ["a"]}, "observation is a text, a list of messages or"),
    "one action": ({"observations": ["a"], "actions": "xy"}, "actions is a list; got 'xy'"),
    "one reward": ({"observations": ["a"], "actions": ["b"], "rewards": 1.0}, "rewards is a list; got 1.0"),
    "a number as the whole text": ({"instruction": "a", "output": "b", "text": 5}, "2 formats"),
    "action of a user": ({"observations": ["a"], "actions": [HI]}, "an action is a message of the assistant"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_TEXTS)
def test_texts_that_would_be_read_in_part_are_refused(kind):
    row, message = REFUSED_TEXTS[kind]
    with pytest.raises(ValueError, match=message):
        load_trajectories([row])


REFUSED_PAIRS = {
    "texts": ({"prompt": "a", "completion": "b"}, "is of the format prompt-completion: it is for algorithm sft"),
    "messages": ({"messages": TALK}, "is of the format messages: it is for algorithm sft"),
    "unpaired": ({"prompt": "a", "completion": "b", "label": True}, "is of the format unpaired preference"),
    "stepwise": ({"prompt": "a", "completions": ["b"], "labels": [True]}, "is of the format stepwise supervision"),
    "prompt-only": ({"prompt": "a"}, "has no chosen, rejected"),
    "several messages": ({"prompt": [HI], "chosen": TALK[2:], "rejected": [*TALK[2:4], assistant("b")]}, "have 3 messages"),
    "other turns before": ({"chosen": [HI, *TALK[2:]], "rejected": [HI, assistant("x"), *TALK[3:]]}, "differ before"),
    "lengths": ({"chosen": TALK[1:3], "rejected": TALK[1:]}, "differ before"),
    "ends with the user": ({"prompt": [HI], "chosen": [MORE], "rejected": [assistant("b")]}, "must end with a message"),
    "text and messages": ({"prompt": [HI], "chosen": "a", "rejected": [assistant("b")]}, "must both be texts"),
    "another beginning": ({"chosen": "Blue.", "rejected": "Black."}, "do not begin with the same words"),
    "tool call": ({"prompt": [HI], "chosen": [assistant("", tool_calls=[1])], "rejected": [assistant("b")]}, "has tool_calls"),
    "tools": ({"prompt": "a", "chosen": "b", "rejected": "c", "tools": [1]}, "has the column tools"),
    "other messages": ({"prompt": "a", "chosen": "b", "rejected": "c", "messages": TALK}, "of the format messages and pref"),
}  # fmt: skip


@pytest.mark.parametrize("kind", REFUSED_PAIRS)
def test_pairs_that_would_be_read_in_part_are_refused(kind):
    row, message = REFUSED_PAIRS[kind]
    with pytest.raises(ValueError, match=message):
        load_pairs([row])


def test_columns_that_are_not_read_are_named():
    row = {"prompt": "a", "completion": "b", "source": "x", "id": 3, "metadata": {}, "empty": None}
    with pytest.warns(UserWarning, match="the list given has columns that are not read: source, id$"):
        load_trajectories([row, row])
    with pytest.warns(UserWarning, match="not read: score_chosen, margin$"):
        load_pairs([{"prompt": "a", "chosen": "b", "rejected": "c", "score_chosen": 9.0, "margin": 1.0}])


@pytest.mark.parametrize("column", ["system", "tools", "chat_template_kwargs", "images"])
def test_prompts_with_columns_for_the_template_need_a_formatter(column):
    """Other columns are for the reward."""
    item = {"prompt": [HI], "answer": 3, "label": True, column: {"a": 1}}

    def own(item):
        return f"{item[column]} {item['prompt'][0]['content']}"

    with pytest.raises(ValueError, match=f"an item has the column {column}, and its prompt is read without it"):
        RewardEnvironment(lambda texts: [0.0], [default_formatter]).first_prompts([item])
    assert RewardEnvironment(lambda texts: [0.0], [own]).first_prompts([item]) == [["{'a': 1} Hi"]]
    assert RewardEnvironment(lambda texts: [0.0], [default_formatter]).first_prompts([item | {column: None}]) == [["[user] Hi"]]


def test_held_out_examples_of_a_trained_prompt_are_counted():
    """Whatever the completion. A text that is trained whole is its own prompt."""
    rows = [{"prompt": "a", "completion": "1"}, {"text": "b"}, {"messages": TALK}]
    other = [{"prompt": "a", "completion": "2"}, {"text": "c"}, {"messages": TALK[:3]}]
    line = shared_examples(load_trajectories(rows), load_trajectories(other))
    assert line.startswith("2 of 3 held-out texts are also trained on")
    pairs = load_pairs([{"prompt": p, "chosen": c, "rejected": "x"} for p, c in (("a", "1"), ("b", "1"), ("a", "2"))])
    assert shared_examples(pairs[:2], pairs[2:]).startswith("1 of 1 held-out pairs")
    assert not shared_examples(pairs[:1], pairs[1:2])


# --- tokens --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def team(tiny_config, tiny_tokenizer):
    """A team without weights, which encodes."""
    return Team.of([Agent("tiny", tiny_config(), {}, tiny_tokenizer)])


def tokens(team, row, kinds=(1,)):
    """Return the text of the prompt, and of the tokens of some kinds after it."""
    tokenizer, (((part,),)) = team.stacks[0].tokenizer, encode_trajectories(team, load_trajectories([row]), False)
    trained = [token for token, kind in zip(part.rows[0], part.kinds, strict=True) if kind in kinds]
    return tokenizer.decode(part.prompt), tokenizer.decode(trained)


def test_what_the_assistant_writes_is_trained_up_to_its_end_token(team):
    """The newline that the template writes after it is not. The messages between are of kind 2, with a weight of their own."""
    prompt = "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    between = "\n<|im_start|>user\nMore?<|im_end|>\n<|im_start|>assistant\n"
    for row in ({"messages": TALK}, {"prompt": TALK[:2], "completion": TALK[2:]}):
        assert tokens(team, row) == (prompt, "One.<|im_end|>Two.<|im_end|>")
        assert tokens(team, row, (1, 2)) == (prompt, f"One.<|im_end|>{between}Two.<|im_end|>")
        assert tokens(team, row, (2,))[1] == between
    row = {"messages": [HI, assistant("One."), SYSTEM, MORE, assistant("Two.")]}
    assert "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nMore?" in tokens(team, row, (2,))[1], "roles stay"


def test_a_text_is_trained_from_its_second_token_with_one_end_token(team):
    """The first token follows nothing. A text that ends with the end token gets no second one."""
    end = team.stacks[0].tokenizer.decode([team.stacks[0].stop[0]])
    for text in ("The sky is blue.", f"The sky is blue.{end}"):
        prompt, trained = tokens(team, {"text": text})
        assert prompt + trained == f"The sky is blue.{end}" and len(team.stacks[0].tokenizer.encode(prompt)) == 1
    assert tokens(team, {"prompt": "The sky is", "completion": " blue."}) == ("The sky is", f" blue.{end}")
    other = team.stacks[0].tokenizer.decode([team.stacks[0].stop[1]])  # it ends completions, too
    assert "".join(tokens(team, {"text": f"The sky is blue.{other}"})) == f"The sky is blue.{other}"
    assert tokens(team, {"prompt": "The sky is", "completion": f" blue.{other}"})[1] == f" blue.{other}"


def test_an_implicit_prompt_has_the_tokens_of_an_explicit_one(team):
    rows = [PAIRS["explicit, repeated"][0], PAIRS["explicit, messages of the chosen"][0]]
    rows.append({name: rows[0][name] for name in ("chosen", "rejected")})
    ((first,), *others) = encode_pairs(team, [load_pairs([row])[0] for row in rows], False)
    assert all(other == [first] for other in others)
    decode = team.stacks[0].tokenizer.decode
    assert decode(first.prompt).endswith("<|im_start|>assistant\n") and [*map(decode, first.rows)] == [
        "a<|im_end|>",
        "b<|im_end|>",
    ]
    texts = [PAIRS["implicit, standard"][0], {"prompt": "Sky is", "chosen": " blue.", "rejected": " black."}]
    implicit, explicit = encode_pairs(team, load_pairs(texts), False)
    assert implicit == explicit


@pytest.mark.parametrize("name", ["sft", "several turns", "texts", "dpo"])
def test_what_the_generation_prompt_says_already_is_trained_once(tiny_config, make_tokenizer, name):
    """In each turn. Answers that begin otherwise are whole."""
    tokenizer, thought = make_tokenizer(), assistant("<think>\nhm\n</think>\n\nOne.")
    tokenizer.chat_template = tokenizer.chat_template.replace("assistant\n' }}", "assistant\n<think>\n' }}")
    team, bare = Team.of([Agent("tiny", tiny_config(), {}, tokenizer)]), thought["content"].removeprefix("<think>\n")
    if name == "dpo":
        pairs = [{"prompt": [HI], "chosen": [thought], "rejected": [assistant(bare)]}]
        (((part,),)) = encode_pairs(team, load_pairs(pairs), False)
        assert part.rows[0] == part.rows[1]
    else:
        talk = [HI, thought, MORE, thought]
        rows = [{"messages": talk[: 2 if name == "sft" else 4]}, {"prompt": "Hi", "completion": thought["content"]}]
        (((part,),)) = encode_trajectories(team, load_trajectories([rows[name == "texts"]]), name == "texts")
    text = tokenizer.decode([*part.prompt, *part.rows[0]])
    assert text.count("<|im_start|>assistant\n<think>\nhm") == text.count("<think>") == 1 + (name == "several turns")
