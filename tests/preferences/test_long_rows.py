"""Given rows that are longer than the context: one error, left out, or cut on the left; counted, for all agents together."""

from __future__ import annotations

import re
import warnings

import pytest

from jmarl.config import TrainConfig
from jmarl.models.hub.agents import Agent
from jmarl.preferences.long_rows import long_rows
from jmarl.preferences.pairs import Pair, Trajectory, load_pairs, load_trajectories
from jmarl.runs.kinds.given import encode_tokens, fitting_data
from jmarl.runs.train import fit
from jmarl.team import Team, make_team

CONTEXT = 128
LONG, TOO_LONG = "x" * 150 + "yz", "b" * CONTEXT  # a prompt that can be cut, and a completion that leaves no room
PROMPTS = {
    "text": lambda text: (text, False),
    "chat": lambda text: (text, True),
    "messages": lambda text: ([{"role": "system", "content": "Be kind."}, {"role": "user", "content": text}], False),
}


@pytest.fixture(scope="module")
def make_team_of(tiny_config, tiny_tokenizer):
    """Return a team without weights, with agents of these contexts."""

    def make(*contexts):
        return Team.of([Agent("tiny", tiny_config(max_positions=x), {}, tiny_tokenizer) for x in contexts])

    return make


def settings(algorithm, **changes):
    return TrainConfig.of(algorithm=algorithm, num_updates=1, batch_size=2, learning_rate=1e-2, progress=False, **changes)


def rows(algorithm, *parts):
    """Return data with these prompts and completions."""
    if algorithm == "sft":
        return load_trajectories([{"prompt": prompt, "completion": text} for prompt, text in parts])
    return load_pairs([{"prompt": prompt, "chosen": text, "rejected": "no"} for prompt, text in parts])


@pytest.mark.parametrize("kind", PROMPTS)
@pytest.mark.parametrize("algorithm", ["sft", "dpo", "reward_model", "madpo"])
def test_long_rows_are_counted_left_out_or_cut(make_team_of, algorithm, kind):
    team, (prompt, chat) = make_team_of(CONTEXT), PROMPTS[kind]("q")
    long, _ = PROMPTS[kind](LONG)
    data = rows(algorithm, (prompt, "yes"), (long, "fits"), (prompt, TOO_LONG), (prompt, "so"))
    held_out, cfg = data[:2], settings(algorithm, chat=chat)
    name = "trajectories" if algorithm == "sft" else "pairs"
    whole = encode_tokens(team, data, cfg)
    size = max(part.length for (part,) in whole)
    problem = rf"2 of 4 {name} are too long for the context: the longest, number . for agent 0 \(.*\), has {size} tokens"
    with pytest.raises(ValueError, match=problem + ", and the context is 128: set long_prompts='drop' to leave them out, or"):
        fitting_data(team, data, held_out, cfg)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        (left, tokens), (others, _) = fitting_data(team, data, held_out, cfg.replace(long_prompts="drop"))
    assert [*left] == [data[0], data[3]] and [*others] == data[:1] and tokens.tokens == [whole[0], whole[3]]
    assert [re.sub(":.*;", "", str(x.message)) for x in caught] == [
        f"{problem[:6]} {name} are too long for the context 2 are left out (long_prompts='drop')",
        f"1 of 2 held-out {name} are too long for the context 1 are left out (long_prompts='drop')",
    ]
    with pytest.warns(UserWarning, match="the prompts of 1 are cut on the left, 1 with completions that leave no room for a"):
        (left, tokens), _ = fitting_data(team, data, (), cfg.replace(long_prompts="truncate_left"))
    assert [*left] == [data[0], data[1], data[3]] and not long_rows(team, tokens.tokens)
    ((cut,),), ((uncut,),) = tokens.tokens[1:2], whole[1:2]
    assert cut.rows == uncut.rows and cut.kinds == uncut.kinds and cut.length in (CONTEXT, CONTEXT - 1)
    read = team.stacks[0].tokenizer.decode(cut.prompt)
    ends = "<|im_end|>\n<|im_start|>assistant\n"
    if kind == "text":
        assert read.startswith("xxx") and read.endswith("yz")
    else:
        assert read.startswith("<|im_start|>") and read.endswith(f"xyz{ends}"), "the template stays"
    with pytest.raises(ValueError, match=f"1 of 1 {name} are too long .*: long_prompts='truncate_left' leaves none"):
        fitting_data(team, data[2:3], (), cfg.replace(long_prompts="truncate_left"))
    with pytest.raises(ValueError, match=f"1 of 1 held-out {name} are too long .*: long_prompts='drop' leaves none"):
        fitting_data(team, data[:1], data[1:2], cfg.replace(long_prompts="drop"))


def test_a_row_is_left_out_for_all_agents_together(make_team_of):
    """Two agents of different contexts: what one of them cannot read is dropped, what it reads cut the other reads whole."""
    team = make_team_of(CONTEXT, 2 * CONTEXT)
    texts = ("q", "r"), ("yes", "yes"), ("no", "no")
    data = [Pair(*texts), Pair((LONG, LONG), *texts[1:]), Pair(texts[0], (TOO_LONG, TOO_LONG), texts[2])]
    data.append(Pair((LONG, "r"), ("yes", "z" * 2 * CONTEXT), texts[2]))  # of which only one can be cut
    whole, cfg = encode_tokens(team, data, settings("madpo")), settings("madpo", long_prompts="truncate_left")
    with pytest.warns(UserWarning, match="3 of 4 pairs .* for agent 0 .*the prompts of 1 are cut on the left, 2 with"):
        (left, tokens), _ = fitting_data(team, data, (), cfg)
    assert [*left] == data[:2] and not long_rows(team, tokens.tokens)
    assert tokens.tokens[1][1] == whole[1][1] and len(tokens.tokens[1][0].prompt) < len(whole[1][0].prompt)
    with pytest.warns(UserWarning, match="3 of 4 pairs .*; 3 are left out"):
        (left, _), _ = fitting_data(team, data, (), cfg.replace(long_prompts="drop"))
    assert [*left] == data[:1]


def test_texts_and_later_turns_that_are_too_long_are_left_out(make_team_of):
    """A text that is trained whole has no prompt to cut; of several turns the first observation is cut."""
    text, turns = Trajectory(("",), (TOO_LONG,)), Trajectory((LONG, "go on"), ("one", "two"))
    data = [Trajectory(("",), ("short",)), text, turns]
    with pytest.warns(UserWarning, match="2 of 3 .*the prompts of 1 are cut on the left, 1 with"):
        data, cut = fitting_data(make_team_of(CONTEXT), data, (), settings("sft", long_prompts="truncate_left"))[0]
    assert data[1] is turns and cut.tokens[1][0].length == CONTEXT
    with pytest.raises(ValueError, match=r"1 of 1 trajectories .*\('bbbbb"):
        fitting_data(make_team_of(CONTEXT), [text], (), settings("sft"))


@pytest.mark.long
def test_a_run_that_drops_rows_resumes_bit_for_bit(random_agent, tiny_config, tiny_tokenizer, tmp_path):
    """It learns the same as from the rows that are left, and evaluates on those."""
    agent, data = random_agent(tiny_config(), tiny_tokenizer, 0), rows("dpo", ("q", TOO_LONG), ("q", "yes"), ("r", "so"))

    def run(data, updates, **changes):
        team, params = make_team([agent])
        return fit(team, data, settings("dpo", **changes).replace(num_updates=updates), params=params, eval_data=data)

    plain, options = run(data[1:], 2), dict(long_prompts="drop", output_dir=str(tmp_path))
    with pytest.warns(UserWarning, match="1 of 3"):
        run(data, 1, **options)
        rest = run(data, 2, **options, resume=True)
    assert rest.losses == plain.losses[1:] and rest.after == plain.after
