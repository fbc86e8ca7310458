"""Games of TextArena: whole games of messages of all kinds, the rules of some, states, generators, and what is refused."""

from __future__ import annotations

import copy
import math
import pickle
import random
import re
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import yaml

pytest.importorskip("textarena", reason="pip install 'jmarl[textarena]'")

from jmarl.cli.main import main
from jmarl.envs import make
from jmarl.envs.games.textarena import Position, TextArena, seeded, unpickled
from jmarl.envs.pool import Pool
from jmarl.envs.vector import Fault, InProcess, reset_once, step_once
from jmarl.remote.options import problem_of
from tests.running import SIZES, rows, tiny_model

GAMES = [
    ("TicTacToe-v0", 2), ("ConnectFour-v0", 2), ("KuhnPoker-v0", 2), ("IteratedPrisonersDilemma-v0", 2),
    ("IteratedRockPaperScissors-v0", 2), ("SimpleNegotiation-v0", 2), ("PigDice-v0-short-train", 2),
    ("GameOfPureStrategy-v0", 2), ("LiarsDice-v0-small", 2), ("LiarsDice-v0", 4), ("Snake-v0", 2), ("Snake-v0", 4),
    ("Surround-v0", 2), ("Surround-v0", 4), ("ThreePlayerIPD-v0", 3), ("ThreePlayerGOPS-v0", 3), ("Taboo-v0", 4),
    *(pytest.param("Poker-v0-small", players, marks=pytest.mark.long) for players in (2, 4)),
]  # fmt: skip
DIGITS = f"[{'9' * 4500}]"  # int() raises
NASTY = [
    "", " \n\t", "a" * 100_000, DIGITS, "[" * 3000 + "]" * 3000, "[\x00]", "\x00\x1b[2J\u202e[1]\u202c", "[\ud800]", "[1e999]",
    "[-1]", "[²]", "[٣]", "[nan]", "[Player 1] I give up. [GAME] Player 0 has won!", "[bid 9 9]", "[raise 1e308]", "{}[]()",
]  # fmt: skip


@pytest.fixture(autouse=True)
def shared_generators(request):
    """No game leaves the generators that all of Python shares in another state."""
    before = random.getstate(), repr(np.random.get_state())
    yield
    after = random.getstate(), repr(np.random.get_state())
    assert after == before or "tiny_dir" in request.fixturenames  # training draws from them, too


def with_message(state: Position, num_players: int, text: str) -> list[str]:
    """Return the joint action in which the player who acts writes a text."""
    return [text if i == state.seat else "" for i in range(num_players)]


def play(env: TextArena, seed: int, hostile: float) -> list:
    """Play a game to its end. Its messages are nasty ones and, more often if `hostile` is small, words of the prompt in
    brackets. Return all that happened."""
    rng = random.Random(seed)
    state, texts = reset_once(env, {"seed": seed}, 0)
    record: list = [texts]
    for turn in range(env.max_turns):
        assert [i for i, text in enumerate(texts) if text is not None] == [state.seat]
        moves = re.findall(r"\[[^\[\]\n]{1,20}\]", texts[state.seat])[-20:]
        text = rng.choice(moves) if moves and rng.random() > hostile else rng.choice(NASTY)
        step = step_once(env, state, with_message(state, env.num_agents, text), turn)
        assert not isinstance(step, Fault), step
        low, high = env.reward_range
        assert all(low <= reward <= high for reward in step.reward) and len(step.reward) == env.num_agents
        record.append([step.reward, step.done, dict(step.info), step.observations])
        if step.done:
            return record
        assert step.reward == [0.0] * env.num_agents
        state, texts = step.state, step.observations
    raise AssertionError("a game does not end")


def moves(game: str, *texts: str, **options) -> list:
    """Return the steps of a game in which those who act write these texts."""
    env = make(f"textarena:{game}", **options)
    state, _ = env.reset({"seed": 1}, np.random.default_rng(0))
    steps = []
    for text in texts:
        steps.append(env.step(state, with_message(state, env.num_agents, text), np.random.default_rng(0)))
        state = steps[-1].state
    assert not any(step.done for step in steps[:-1])
    return steps


@pytest.mark.parametrize(("game", "num_players"), GAMES)
def test_games_end_without_an_error_and_equal_seeds_give_equal_games(game, num_players):
    env = make(f"textarena:{game}", num_players=num_players, max_turns=150)
    assert env.roles == tuple(f"player_{i}" for i in range(num_players))
    first = [play(env, seed, hostile) for seed, hostile in enumerate((0.05, 0.3, 1.0))]
    assert repr(first) == repr([play(env, seed, hostile) for seed, hostile in enumerate((0.05, 0.3, 1.0))])
    for record in first:
        info = record[-1][2]
        if "draw" in info:  # not truncated
            won = [info[f"won_{role}"] for role in env.roles]
            assert won == [float(r == max(record[-1][0]) and not info["draw"]) for r in record[-1][0]]


def test_three_in_a_row_win():
    steps = moves("TicTacToe-v0", "[0]", "my move is [3]", "[1]", "[4]", "[2]")
    assert [step.state.seat for step in steps[:-1]] == [1, 0, 1, 0], "they take turns"
    assert steps[-1].done and not steps[-1].truncated and steps[-1].reward == [1.0, -1.0]
    assert steps[-1].info == {
        "invalid": 0, "raised": 0, "ended_by_invalid": 0, "rescaled": 0, "draw": 0, "won_player_0": 1, "won_player_1": 0,
    }  # fmt: skip
    assert "Player 0 placed their symbol (O) in cell 2." in make("textarena:TicTacToe-v0").render(steps[-1].state)


def test_a_full_board_is_a_draw():
    end = moves("TicTacToe-v0", *[f"[{cell}]" for cell in (0, 1, 2, 4, 3, 5, 7, 6, 8)])[-1]
    assert end.reward == [0.0, 0.0] and end.info["draw"] == 1 and end.info["won_player_0"] == end.info["won_player_1"] == 0


def test_the_second_invalid_move_in_a_row_loses():
    first, again, last = moves("TicTacToe-v0", "[0]", "none", "[0]")
    assert [step.info["invalid"] for step in (first, again, last)] == [0, 1, 1]
    assert again.state.seat == 1 and "attempted an invalid move" in again.observations[1], "the same player tries again"
    assert last.reward == [1.0, -1.0] and last.info["ended_by_invalid"] == 1 and last.info["won_player_0"] == 1


def test_a_message_at_which_a_game_raises_counts_as_an_empty_one():
    raised, empty = moves("TicTacToe-v0", DIGITS)[-1], moves("TicTacToe-v0", "")[-1]
    assert raised.state == empty.state and raised.observations == empty.observations
    assert raised.info == empty.info | {"raised": 1} and empty.info == {"invalid": 1, "raised": 0}


def test_of_a_long_message_the_end_is_read():
    read, lost = (moves("TicTacToe-v0", text)[-1].info for text in (" " * 9000 + "[0]", "[0]" + " " * 9000))
    assert (read["invalid"], lost["invalid"]) == (0, 1)


def test_a_game_that_ends_too_late_is_truncated_without_a_reward():
    end = moves("PigDice-v0", *["[roll]"] * 4, max_turns=4)[-1]
    assert end.done and end.truncated and end.reward == [0.0, 0.0] and "draw" not in end.info


def test_players_read_their_own_cards_only():
    env = make("textarena:LiarsDice-v0", num_players=3)
    state, texts = env.reset({"seed": 2}, np.random.default_rng(0))
    dice = unpickled(state.game).state.game_state["dice_rolls"]
    own = [f"Your current Dice are: {', '.join(map(str, dice[i]))}" for i in range(3)]
    assert len(set(own)) == 3
    for turn in range(3):
        assert [line in texts[state.seat] for line in own] == [i == state.seat == turn for i in range(3)]
        state, texts, *_ = env.step(state, with_message(state, 3, f"[Bid: {turn + 1}, 2]"), np.random.default_rng(0))
    assert "bids 3 of face 2" in texts[0], "and what all can see"


def test_a_step_changes_nothing_so_that_episodes_branch():
    env = make("textarena:PigDice-v0")
    state, _ = env.reset({"seed": 5}, np.random.default_rng(0))
    before = copy.deepcopy(state)

    def steps(texts):
        return {text: env.step(state, with_message(state, 2, text), np.random.default_rng(1)) for text in texts}

    assert steps(["[roll]", "[hold]", "?"]) == steps(["?", "[hold]", "[roll]"])
    assert state == before == pickle.loads(pickle.dumps(state))


def test_luck_in_a_step_comes_from_its_generator():
    env = make("textarena:PigDice-v0")
    state, _ = env.reset({"seed": 5}, np.random.default_rng(0))
    rolls = [env.step(state, with_message(state, 2, "[roll]"), np.random.default_rng(i)).state for i in range(20)]
    assert rolls[0] == env.step(state, with_message(state, 2, "[roll]"), np.random.default_rng(0)).state
    assert 2 < len(set(rolls)) <= 6, "a die"


def test_tasks_are_seeds():
    env = make("textarena:LiarsDice-v0")
    train, held_out = env.tasks("train", 200, seed=3), env.tasks("eval", 200, seed=3)
    assert train == env.tasks("train", 200, seed=3) != env.tasks("train", 200, seed=4)
    assert len({task["seed"] for task in train}) == 200
    assert {task["seed"] % 2 for task in train} == {0} and {task["seed"] % 2 for task in held_out} == {1}
    rngs = [np.random.default_rng(i) for i in (0, 1)]
    first, same, second = (
        env.reset(task, rng) for task, rng in ((train[0], rngs[0]), (train[0], rngs[1]), (train[1], rngs[0]))
    )
    assert first == same != second, "the task alone decides"
    assert env.reset({}, np.random.default_rng(0)) == env.reset({}, np.random.default_rng(0)) != env.reset({}, rngs[1])
    monte = make("textarena:ThreeCardMonte-v0")  # which draws from a generator of its own
    assert monte.reset({"seed": 1}, rngs[0]) == monte.reset({"seed": 1}, rngs[0])
    with pytest.raises(ValueError, match="split='test': choose train or eval"):
        env.tasks("test", 1)
    for seed in ("x", -1, 1 << 32):
        with pytest.raises(ValueError, match=f"seed={seed!r} is not allowed"):
            env.reset({"seed": seed}, rngs[0])


def test_generators_are_restored_after_an_error():
    for error in (KeyError, KeyboardInterrupt):
        with pytest.raises(error), seeded(3):
            assert random.random() == random.Random(3).random()
            assert np.random.random() == np.random.RandomState(3).random()
            raise error
    with pytest.raises(ValueError):
        make("textarena:TicTacToe-v0", num_players=3)  # its reset raises


def test_games_in_several_threads_do_not_share_luck(monkeypatch):
    env = make("textarena:PigDice-v0-short-train")
    alone = [play(env, seed, 0.0) for seed in range(6)]
    interval = sys.getswitchinterval()
    try:
        sys.setswitchinterval(1e-5)
        with ThreadPoolExecutor(6) as threads:
            assert list(threads.map(lambda seed: play(env, seed, 0.0), range(6))) == alone
    finally:
        sys.setswitchinterval(interval)


def test_what_games_print_is_dropped(capsys):
    make("textarena:RushHour-v0").reset({"seed": 0}, np.random.default_rng(0))
    assert capsys.readouterr().out == ""


def test_rewards_that_a_game_gives_by_mistake():
    """Poker ranks a player who is out again for each further mistake; Countdown gives a text at an invalid move."""
    texts = ["?", "?", "?", "?", "[fold]"]
    end, raw = moves("Poker-v0-small", *texts)[-1], moves("Poker-v0-small", *texts, reward_range=(-5, 5))[-1]
    assert raw.done and raw.reward == [1.0, 3.0] and end.reward == [-1.0, 1.0]
    assert (raw.info["rescaled"], end.info["rescaled"], end.info["won_player_1"], end.info["draw"]) == (0, 1, 1, 0)
    (*_, end) = moves("Countdown-v0", "?", "?")
    assert end.done and end.reward == [-1.0] and end.info["solved"] == end.info["rescaled"] == 0
    env = make("textarena:TicTacToe-v0")
    assert math.isnan(env._outcome({1: 1})[0][0]), "no reward masks the joint action"


@pytest.mark.parametrize(
    ("game", "num_players"), [("2048-v0", 1), ("KuhnPoker-v0", 2), ("ThreePlayerIPD-v0", 3), ("Taboo-v0", 4)]
)
def test_without_num_players_a_game_has_the_fewest_players(game, num_players):
    assert make(f"textarena:{game}").num_agents == num_players


def test_an_environment_keeps_no_game_and_takes_all_general_options():
    env = make("textarena:Poker-v0", num_players=3, reward_scale=2.0, max_turns=30)
    assert env.describe() == {
        "class": "TextArena", "roles": ["player_0", "player_1", "player_2"], "max_turns": 30, "reward_range": [-1.0, 1.0],
        "game": "Poker-v0", "reward_scale": 2.0,
    }  # fmt: skip
    assert len(pickle.dumps(env.env)) < 500


@pytest.mark.parametrize(("game", "options", "message"), [
    ("Wordle-v0", {}, "textarena:Wordle-v0 is not played here, because it downloads word lists: choose another game"),
    ("Codenames-v0-hardcore-train", {}, "because it downloads word lists"),
    ("SpellingBee-v0", {}, "because it downloads word lists"),
    ("Debate-v0-long", {}, "because it asks a hosted model"),
    ("GuessWho-v0", {}, "because it asks a hosted model"),
    ("PublicGoodsGame-v0", {}, "because it never returns once all of its players have left"),
    ("CharacterConclave-v0", {}, "because it raises at every message"),
    ("TicTacToe", {}, "there is no game 'TicTacToe' in textarena; did you mean 'TicTacToe-v0'?"),
    ("", {}, "there is no game '' in textarena"),
    ("TicTacToe-v0-raw", {}, "textarena:TicTacToe-v0-raw cannot begin: players get no text: take TicTacToe-v0"),
    ("TicTacToe-v0", {"num_players": 3}, "cannot begin with num_players=3: The number of players has to be 2, received 3"),
    ("Taboo-v0", {"num_players": 5}, "cannot begin with num_players=5: Number of players must be even"),
    ("QuantumTicTacToe-v0", {"num_players": 3}, "it is a game for 2 players"),
    ("Poker-v0", {"num_players": "two"}, "cannot begin with num_players='two'"),
    ("BabyAiText-v0", {}, "textarena:BabyAiText-v0 cannot begin: Could not import"),
    ("Poker-v0", {"max_turns": 0}, "max_turns=0 is not allowed"),
    ("Poker-v0", {"reward_range": [1, -1]}, "reward_range=[1, -1] is not allowed: reward_range must be two numbers"),
    ("Poker-v0", {"players": 3}, "its options are num_players, max_turns, reward_range; did you mean 'num_players'?"),
    ("Poker-v0", {"game": "Chess-v0"}, "multiple values for argument 'game'"),
])  # fmt: skip
def test_what_is_refused(game, options, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        make(f"textarena:{game}", **options)


@pytest.mark.skipif(sys.version_info >= (3, 12), reason="Python 3.12 reads its file")
def test_games_for_newer_versions_of_python_are_named():
    with pytest.raises(ValueError, match="textarena:Chess-v0 cannot begin: .*; its file is for Python 3.12 or newer"):
        make("textarena:Chess-v0")


def test_without_the_package_a_sentence_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "textarena", None)
    with pytest.raises(ImportError, match=re.escape("need the textarena package: pip install 'jmarl[textarena]'")):
        make("textarena:TicTacToe-v0")


def test_clients_of_a_server_set_numbers_but_no_game():
    assert problem_of("textarena:Poker-v0", "num_players", 3, False, 60.0) == ""
    assert "clients give no text here" in problem_of("textarena:Poker-v0", "game", "Chess-v0", False, 60.0)


@pytest.mark.long
def test_a_pool_plays_the_same_games():
    env = make("textarena:LiarsDice-v0-small", num_players=3)
    with Pool(env, workers=2) as pool:
        results = []
        for engine in (pool, InProcess(env)):
            states, observations = zip(*engine.reset(env.tasks("train", 4), range(4)), strict=True)
            steps = engine.step(states, [with_message(state, 3, "[Bid: 2, 3]") for state in states], range(4))
            results.append([observations, [(step.observations, step.reward, step.done, step.info) for step in steps]])
    assert results[0] == results[1]


@pytest.mark.long
def test_a_yaml_file_trains_two_players(tiny_dir, tmp_path):
    """In a pool of processes. A random model writes nothing valid, so that player 0 loses with its second message."""
    settings = {
        **SIZES, "environment": "textarena:TicTacToe-v0", "options": {"max_turns": 3}, "models": [tiny_model(tiny_dir)] * 2,
        "pool": "processes", "num_updates": 1, "num_tasks": 4, "output_dir": str(tmp_path / "run"),
    }  # fmt: skip
    (tmp_path / "cfg.yaml").write_text(yaml.safe_dump(settings))
    assert main(["train", "--config", str(tmp_path / "cfg.yaml")]) == 0
    row = rows(tmp_path / "run")[0]
    assert row["turn_0/measures/invalid"] == row["turn_1/measures/invalid"] == row["turn_1/measures/won_player_1"] == 1
    assert row["reward/mean"] == 0 and row["turn_0/agent_0/return"] == row["turn_1/agent_0/return"] == -1
