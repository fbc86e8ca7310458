"""Agents of one stack have one architecture and vocabulary, and each its own template, tokenizer settings and end tokens.

What a model's files say of these is read, kept and written again. Host only: no program is compiled."""

from __future__ import annotations

import dataclasses
import datetime
import json
import shutil

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from tokenizers import Tokenizer, normalizers
from transformers import PreTrainedTokenizerFast

from jmarl.algorithms import resolve
from jmarl.config import Chat, Sampling, TrainConfig
from jmarl.evaluation.cross_play import players_of, stack_of, stacks_of
from jmarl.files.changes import team_changes
from jmarl.learning.setup import make_critics
from jmarl.models.hub.agents import Agent, load_agent, save_pretrained
from jmarl.models.hub.hf_format import param_shapes
from jmarl.models.hub.tokenize import STOP_TOKENS, ChatPrompt, chat_prompt, stop_ids
from jmarl.preferences.comparators import encode_foreign
from jmarl.preferences.encoding import encode_pairs, end_token
from jmarl.preferences.pairs import Pair
from jmarl.rollout.prompt_check import agents_by_encoding, long_prompts
from jmarl.rollout.text_model import AgentModel
from jmarl.sampling.generate import tokenize
from jmarl.sampling.stack_program import stop_of_prompts
from jmarl.team import Team, agents_of, make_team, save_team
from tests.matrix import product

END, START, DOCUMENT = 2, 1, 0  # ids of <|im_end|>, <|im_start|> and <|endoftext|>
PROMPTS = [["7 pears", "8"], ["7 pears", "8"], ["7 pears", "8"]]


def random_params(cfg, seed):
    """Return parameters of the decoder, made without a compiled program."""
    rng, params = np.random.default_rng(seed), {"layers": {}}
    for name, shape in param_shapes(cfg).items():
        part, _, leaf = name.rpartition(".")
        (params["layers"] if part else params)[leaf] = rng.normal(size=shape).astype(np.float32)
    return params


@pytest.fixture(scope="module")
def agent_with(tiny_config, make_tokenizer):
    """`agent_with(seed, template, generation_config, vocab, **settings) -> Agent`; settings are attributes of its tokenizer."""

    def make(seed=0, template=None, generation_config=(), vocab=320, **settings) -> Agent:
        tokenizer, cfg = make_tokenizer(), tiny_config(vocab_size=vocab)
        for name, value in ({"chat_template": template or tokenizer.chat_template} | settings).items():
            setattr(tokenizer, name, value)
        return Agent(f"agent-{seed}", cfg, random_params(cfg, seed), tokenizer, dict(generation_config))

    return make


@pytest.fixture(scope="module")
def different(agent_with):
    """Three agents of one vocabulary: a chat model, one with another template and end, one with several end tokens."""
    other = "{% for m in messages %}Think: {{ m['content'] }}<|endoftext|>{% endfor %}"
    return [
        agent_with(0),
        agent_with(1, other, eos_token="<|endoftext|>", pad_token="<|im_start|>"),
        agent_with(2, other.replace("Think", "Say"), {"eos_token_id": [301, 302], "temperature": 0.6}),
    ]


@pytest.fixture(scope="module")
def saved(agent_with, tmp_path_factory):
    """The directory of a model; copy it before a change."""
    agent, path = agent_with(5), tmp_path_factory.mktemp("saved")
    save_pretrained(path, agent.config, agent.params, agent.tokenizer)
    (path / "generation_config.json").unlink()
    return path


def with_fields(saved, path, file, fields):
    """Copy a model, with other fields in a JSON file."""
    shutil.copytree(saved, path, dirs_exist_ok=True)
    old = json.loads((path / file).read_text()) if (path / file).is_file() else {}
    (path / file).write_text(json.dumps(old | fields))
    return path


# --- a stack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shared_weights", [False, True])
def test_each_agent_of_a_stack_has_its_own_template_and_ends(different, shared_weights, tmp_path):
    """In prompts, in the sampler's arguments, in pairs that are trained, in the agents of a trained team and in their files."""
    team, params = make_team(different, shared_weights)
    assert len(team.stacks) == 1
    stops = team.stacks[0].stops
    assert stops.shape == ((1, 3, 4) if shared_weights else (3, 1, 4))
    ends = [{END, DOCUMENT}, {DOCUMENT, END}, {END, 301, 302, DOCUMENT}]
    assert [set(row) for row in stops.reshape(3, 4).tolist()] == ends
    assert stops.reshape(3, 4)[:, 0].tolist() == [END, DOCUMENT, END]
    rows = tokenize(team, PROMPTS, Sampling(max_new_tokens=4), chat=True)
    pairs = encode_pairs(team, [Pair(("7",) * 3, ("8",) * 3, ("9",) * 3)], chat=True)[0]
    save_team(tmp_path, team, params)
    for n, (agent, of_team) in enumerate(zip(different, agents_of(team, params), strict=True)):
        spec, back = team.agent_specs[n], load_agent(tmp_path / f"agent_{n}")
        own = chat_prompt(agent.tokenizer, "7 pears")
        assert spec.order == [n]
        assert agent.tokenizer.decode(rows[n][0]) == own.removesuffix("<|endoftext|>")  # no prompt ends with an end token
        assert pairs[n].rows[0][-1] == end_token(spec, chat=True) == (END if n == 0 else DOCUMENT)
        for found in (spec, of_team, back):
            assert chat_prompt(found.tokenizer, "7 pears") == own and set(found.stop) == ends[n]
            assert found.tokenizer.pad_token == agent.tokenizer.pad_token
        assert back.generation_config.get("temperature") == agent.generation_config.get("temperature")


@pytest.mark.filterwarnings("ignore:.*begins messages with the plain text")
def test_prompts_are_measured_with_the_template_of_their_agent(agent_with):
    long = "{% for m in messages %}{{ 'x' * 200 }}{{ m['content'] }}{% endfor %}"
    team, _ = make_team([agent_with(0), agent_with(1, long)])
    cfg = TrainConfig.of(algorithm="grpo", max_new_tokens=8, chat=True)
    assert {(prompt.agent, prompt.item) for prompt in long_prompts(team, PROMPTS[:2], cfg)} == {(1, 0), (1, 1)}


def test_agents_of_other_runs_keep_their_tokenizers_in_one_stack(different):
    players = [player for run in (different, different[::-1]) for player in players_of(run)]
    (indices,) = stacks_of(players)
    spec = stack_of(players, indices)
    expected = [chat_prompt(agent.tokenizer, "7") for agent in (*different, *different[::-1])]
    assert [chat_prompt(spec.of(i).tokenizer, "7") for i in range(6)] == expected
    assert [set(row) for row in spec.stops.reshape(6, 4).tolist()] == [set(p.agent.stop) for p in players]


def test_stop_ids_of_roles_are_repeated_over_their_prompts():
    by_role = np.array([[[2, 0], [5, 5]]], np.int32)  # one parameter set with two roles
    np.testing.assert_array_equal(stop_of_prompts(by_role, 1, 6)[0, :, 0], [2, 2, 2, 5, 5, 5])
    np.testing.assert_array_equal(stop_of_prompts(by_role[0, 0], 3, 2), np.tile([2, 0], (3, 2, 1)))


def test_what_changed_between_two_teams_is_named(different, agent_with):
    """Template, end tokens, special tokens and how text is encoded, by agent; a description of an older version lacks them."""
    before = json.loads(json.dumps(Team.of(different).describe()))
    assert team_changes(before, Team.of(different).describe()) == []
    third = agent_with(2, different[2].tokenizer.chat_template, {"eos_token_id": [301]}, pad_token="<|im_start|>")
    third.tokenizer.backend_tokenizer.normalizer = normalizers.Lowercase()
    changed = Team.of([agent_with(0, "{{ 'new' }}"), different[1], third]).describe()
    assert team_changes(before, changed) == [
        "agent 0 has another chat template",
        "agent 2 has another end tokens and special tokens and tokenizer",
    ]
    older = [{name: value for name, value in stack.items() if name != "agents"} for stack in before]
    assert team_changes(older, changed) == []
    assert team_changes(older, Team.of(different[:2]).describe()) == ["other models, tokenizers or roles"]


def test_ids_without_a_token_are_not_allowed(agent_with, tiny_config, make_tokenizer):
    """Rows above the tokenizer's size, and holes in its vocabulary; None where every id has a token."""
    full, padded = (make_team([agent_with(vocab=n)])[0].stacks[0] for n in (320, 350))
    assert full.allowed is None and padded.allowed.tolist() == [True] * 320 + [False] * 30
    tokenizer = make_tokenizer()
    tokens = json.loads(tokenizer.backend_tokenizer.to_str())
    del tokens["model"]["vocab"]["9"]  # splits its merges, which have no digit
    tokens["model"]["merges"] = []
    hole = make_tokenizer().get_vocab()["9"]
    holed = PreTrainedTokenizerFast(tokenizer_object=Tokenizer.from_str(json.dumps(tokens)), eos_token="<|im_end|>")
    spec = make_team([Agent("holed", tiny_config(), random_params(tiny_config(), 0), holed)])[0].stacks[0]
    assert np.flatnonzero(~spec.allowed).tolist() == [hole]


# --- end tokens of a model's files ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("file", "ids", "expected"),
    [
        ("generation_config.json", [301, END], [END, 301, DOCUMENT]),  # a list; 301 is an ordinary token
        ("generation_config.json", 301, [END, 301, DOCUMENT]),
        ("generation_config.json", [319, 4000, -1], [END, 319, DOCUMENT]),  # ids that have no token cannot end anything
        ("config.json", [START, DOCUMENT], [END, START, DOCUMENT]),  # without generation_config.json
        ("config.json", [301], [END, DOCUMENT]),  # config.json names an ordinary token: it was written for another tokenizer
        ("config.json", None, [END, DOCUMENT]),
    ],
)
def test_end_tokens_of_the_files_end_completions_and_are_saved(saved, tmp_path, file, ids, expected):
    agent = load_agent(with_fields(saved, tmp_path / "model", file, {"eos_token_id": ids, "top_k": 7}))
    assert list(agent.stop) == expected
    save_pretrained(tmp_path / "out", agent.config, agent.params, agent.tokenizer, agent.generation_config)
    written = json.loads((tmp_path / "out" / "generation_config.json").read_text())
    assert written["eos_token_id"] == json.loads((tmp_path / "out" / "config.json").read_text())["eos_token_id"] == expected
    assert written.get("top_k") == (7 if file == "generation_config.json" else None), "other fields are kept"
    assert list(load_agent(tmp_path / "out").stop) == expected


@pytest.mark.parametrize("ids", ["<|im_end|>", [301.0], [[301]], True])
def test_end_tokens_of_the_files_are_numbers(saved, tmp_path, ids):
    with pytest.raises(ValueError, match="eos_token_id=.* is not a number of a token or a list of them"):
        load_agent(with_fields(saved, tmp_path / "model", "generation_config.json", {"eos_token_id": ids}))


def test_a_model_without_an_end_token_is_an_error(make_tokenizer, monkeypatch):
    tokenizer = make_tokenizer()
    tokenizer.eos_token = None
    assert set(STOP_TOKENS) & set(tokenizer.get_vocab()), "these end completions, too"
    monkeypatch.setattr("jmarl.models.hub.tokenize.STOP_TOKENS", ())
    assert stop_ids(tokenizer, [301]) == (301,)
    with pytest.raises(ValueError, match="no token ends a completion: the tokenizer has no eos_token"):
        stop_ids(tokenizer)


# --- tokenizer files -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "tokens"),
    [
        ("extra_special_tokens", ["<|im_start|>", "<|im_end|>"]),
        ("additional_special_tokens", ["<|im_start|>"]),
        ("extra_special_tokens", {"image_token": "<|im_start|>"}),
    ],
)
def test_saved_tokenizers_have_the_fields_of_transformers_4(saved, tmp_path, name, tokens):
    """A list of special tokens has the old name: 4.57 fails for a list of extra_special_tokens. A dict keeps its own."""
    agent = load_agent(with_fields(saved, tmp_path / "model", "tokenizer_config.json", {name: tokens}))
    save_pretrained(tmp_path / "out", agent.config, agent.params, agent.tokenizer)
    fields = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    assert isinstance(fields.get("extra_special_tokens", {}), dict) and fields["tokenizer_class"] == "PreTrainedTokenizerFast"
    if isinstance(tokens, list):
        assert fields["additional_special_tokens"] == tokens
    else:
        assert fields["image_token"] == "<|im_start|>"
    assert load_agent(tmp_path / "out").tokenizer.all_special_ids == agent.tokenizer.all_special_ids


def test_templates_by_name_are_saved_and_replaced(agent_with, different, tmp_path):
    team, params = make_team([agent_with(0, {"default": "{{ 'a' }}", "tools": "{{ 'b' }}"})])
    save_team(tmp_path, team, params)
    assert load_agent(tmp_path / "agent_0").tokenizer.chat_template == {"default": "{{ 'a' }}", "tools": "{{ 'b' }}"}
    save_team(tmp_path, *make_team(different[:1]))
    assert load_agent(tmp_path / "agent_0").tokenizer.chat_template == different[0].tokenizer.chat_template


# --- weights -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype, value", product(["float32", "float16", "bfloat16"], [np.nan, np.inf]))
def test_weights_that_are_not_finite_are_named(saved, tmp_path, dtype, value):
    import ml_dtypes  # noqa: F401  (adds bfloat16 to numpy)

    path = shutil.copytree(saved, tmp_path / "model") / "model.safetensors"
    tensors = {name: x.astype(dtype) for name, x in load_file(path).items()}
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5:7] = value
    save_file(tensors, path)
    message = r"model.safetensors: model.layers.1.mlp.up_proj.weight has 2 of 2048 weights that are NaN or infinite"
    with pytest.raises(ValueError, match=message):
        load_agent(tmp_path / "model")


def test_the_shard_with_weights_that_are_not_finite_is_named(saved, tmp_path):
    """Also in a redundant lm_head, which no parameter is read from."""
    path = shutil.copytree(saved, tmp_path / "model")
    tensors = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["lm_head.weight"][0, 0] = -np.inf
    shards = {name: f"model-{1 + (name == 'lm_head.weight')}-of-2.safetensors" for name in tensors}
    for file in set(shards.values()):
        save_file({name: x for name, x in tensors.items() if shards[name] == file}, path / file)
    (path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ValueError, match="model-2-of-2.safetensors: lm_head.weight has 1 of 10240 weights"):
        load_agent(path)


def test_completions_of_another_model_that_answer_messages_end_as_those_of_the_agent(agent_with):
    """Messages are a chat whatever `chat` is; texts follow the setting of their agent."""
    agent = agent_with(eos_token="<|endoftext|>")
    team, cfg = make_team([agent, agent])[0], TrainConfig.of(max_new_tokens=8, chat=(False, True))
    prompts = [[ChatPrompt([{"role": "user", "content": "7"}]), "7"]] * 2
    ids = encode_foreign(team, prompts, [[["8"], ["8"]]] * 2, [[[True], [True]]] * 2, cfg)
    assert [[rows[0][-1] for rows in own] for own in ids] == [[END, DOCUMENT], [END, END]]


def test_a_central_critic_ends_what_it_reads_with_the_ends_of_its_model(agent_with, monkeypatch):
    monkeypatch.setattr("jmarl.models.hub.tokenize.STOP_TOKENS", ())
    agent = agent_with(0, None, {"eos_token_id": [END]}, eos_token=None)
    team, params = make_team([agent, agent])
    algorithm = resolve(TrainConfig.of(algorithm="maac"))
    for model in (None, agent):
        (spec,) = make_critics(dataclasses.replace(team, critic=model), params, algorithm)[0]
        assert [spec.of(n).stop for n in spec.order] == [(END,), (END,)]


def test_agents_of_one_tokenizer_and_other_ends_are_measured_apart(agent_with):
    agent = agent_with()
    team, _ = make_team([agent, agent._replace(generation_config={"eos_token_id": [301]}), agent])
    assert agents_by_encoding(team, Chat(True)) == [[0, 2], [1]]


@pytest.mark.filterwarnings("ignore:.*begins messages with the plain text")
def test_the_clock_of_a_judge_does_not_depend_on_the_day(agent_with):
    clock = (
        "{{ strftime_now('%d %b %Y') }}{% if think %} Think.{% endif %}{% for m in messages %} {{ m['content'] }}{% endfor %}"
    )
    agent = agent_with(0, clock)
    model, own = AgentModel(agent), AgentModel(agent, chat=Chat(True, {"think": True}, datetime.date(2026, 1, 2)))
    rows = [tokenize(x.team, [["7"]], x.settings, x.chat)[0][0] for x in (model, own)]
    assert [agent.tokenizer.decode(row) for row in rows] == ["26 Jul 2024 7", "02 Jan 2026 Think. 7"]
    assert model.describe()["chat"] is True and own.describe()["chat_template_kwargs"] == {"think": True}


def test_a_chat_with_too_few_values_names_the_agent(different):
    team, _ = make_team(different)
    with pytest.raises(ValueError, match="chat has 2 values, and there is an agent 2: give one for all"):
        tokenize(team, PROMPTS, Sampling(max_new_tokens=8), Chat((True, False)))
