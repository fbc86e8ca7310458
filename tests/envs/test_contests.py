"""Tic-tac-toe, Kuhn poker, the iterated prisoner's dilemma and signals: exact values, rules, and players."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from functools import cache

import numpy as np
import pytest

from jmarl.envs.games import kuhn, prisoners_dilemma, tictactoe
from jmarl.envs.games.kuhn import KuhnPoker, best_response_value, game_value, information_sets, nash_conv
from jmarl.envs.games.prisoners_dilemma import (
    PrisonersDilemma,
    always_cooperate,
    always_defect,
    read_rounds,
    tit_for_tat,
    win_stay_lose_shift,
)
from jmarl.envs.games.signals import SIGNALS, THINGS, Signals
from jmarl.envs.games.tictactoe import EMPTY, TicTacToe, after_move, legal_moves, minimax, minimax_values, random_player, winner

RNG = np.random.default_rng(0)


def play(env, task, players):
    """Return the rewards [T, N] and the measures of the last step of an episode. players: prompt -> message of each agent."""
    state, prompts = env.reset(task, RNG)
    rewards = []
    while True:
        step = env.step(state, ["" if p is None else player(p) for p, player in zip(prompts, players, strict=True)], RNG)
        rewards.append(np.broadcast_to(step.reward, env.num_agents))
        if step.done:
            return np.array(rewards), step.info
        state, prompts = step.state, step.observations


# --- tic-tac-toe ------------------------------------------------------------------------------------------------------


@cache
def reachable_boards():
    boards, queue = {EMPTY}, [EMPTY]
    while queue:
        board = queue.pop()
        after = {after_move(board, move) for move in legal_moves(board)} - boards
        boards, queue = boards | after, queue + list(after)
    return boards


def games(mark, board=EMPTY):
    """Yield the last boards of all games in which `minimax` plays a mark and the other makes any moves."""
    moves = legal_moves(board)
    if not moves:
        yield board
    elif tictactoe.to_move(board) == mark:
        yield from games(mark, after_move(board, int(minimax(tictactoe.format_prompt(board)))))
    else:
        for move in moves:
            yield from games(mark, after_move(board, move))


def test_there_are_5478_boards_and_all_round_trip_through_both_prompts():
    boards = reachable_boards()
    assert len(boards) == 5478
    for board, brief in itertools.product(boards, (False, True)):
        assert tictactoe.read_board(tictactoe.format_prompt(board, brief)) == board
    with pytest.raises(ValueError, match="has no board"):
        tictactoe.read_board("1 2 3\n4 5 6")


def test_known_values_of_boards():
    assert minimax_values(EMPTY) == dict.fromkeys(range(1, 10), 0)  # a draw
    assert minimax_values("x........") == {5: 0} | dict.fromkeys((2, 3, 4, 6, 7, 8, 9), -1)  # only the centre holds
    assert minimax_values("xx.oo....") == {3: 1, 6: 0, 7: -1, 8: -1, 9: -1}  # wins, blocks, or loses to 6
    assert tictactoe.value("xxxoo....") == -1 and minimax_values("xxxoo....") == {}


@pytest.mark.parametrize("mark", ["x", "o"])
def test_minimax_never_loses_and_wins_if_the_other_lets_it(mark):
    results = {winner(board) for board in games(mark)}
    assert results == {mark, ""}


def evenly(moves_of):
    return {board: dict.fromkeys(moves_of(board), 1 / len(moves_of(board))) for board in tictactoe.boards()}


def test_values_of_policies_are_those_of_perfect_and_of_random_play():
    """Perfect play draws and cannot be beaten. Random games are won by x in 737 of 1260, by o in 121 of 420."""
    best, random = evenly(tictactoe.best_moves), evenly(legal_moves)
    assert len(tictactoe.boards()) == 4520 == len([board for board in reachable_boards() if legal_moves(board)])
    assert tictactoe.nash_conv(best, best) == pytest.approx(0, abs=1e-12)
    assert tictactoe.value_against(random, "x", "random") == pytest.approx(737 / 1260 - 121 / 420)
    assert tictactoe.value_against(random, "o", "random") == pytest.approx(121 / 420 - 737 / 1260)
    for mark in "xo":
        assert tictactoe.value_against(best, mark, "minimax") == pytest.approx(0, abs=1e-12)
        values = [tictactoe.value_against(random, mark, opponent) for opponent in ("best", "minimax", "random")]
        assert values == sorted(values)


def test_a_policy_without_legal_moves_always_loses():
    nothing = dict.fromkeys(tictactoe.boards(), {})
    assert tictactoe.nash_conv(nothing, nothing) == 2
    only_nine = dict.fromkeys(tictactoe.boards(), {9: 1.0})  # taken when o moves again, if x has not lost before
    assert tictactoe.value_against(only_nine, "x", "random") == -1


def test_players_choose_any_legal_and_any_best_move():
    """Not always the first one, and none that is worse."""
    for player, is_best in ((random_player, False), (minimax, True)):
        ranks = set()
        for board in filter(legal_moves, reachable_boards()):
            values = minimax_values(board)
            moves = [move for move in values if values[move] == max(values.values()) or not is_best]
            ranks.add(moves.index(int(player(tictactoe.format_prompt(board)))))
        assert len(ranks) > 5


def test_players_move_alike_in_all_processes():
    program = (
        "from jmarl.envs.games.tictactoe import *\n"
        "boards = [after_move(EMPTY, move) for move in range(1, 10)]\n"
        "print([player(format_prompt(board)) for board in boards for player in (minimax, random_player)])"
    )
    outputs = [
        subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"PYTHONHASHSEED": seed},
            capture_output=True,
            encoding="utf-8",
            check=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert outputs[0] == outputs[1] and outputs[0].count("'") == 36


@pytest.mark.parametrize("brief", [False, True])
def test_best_players_draw_from_the_empty_board(brief):
    env = TicTacToe(brief=brief)
    rewards, info = play(env, {"board": EMPTY}, [minimax, minimax])
    assert rewards.shape == (9, 2) and not rewards.any()
    assert info == {"x_won": 0, "o_won": 0, "draw": 1, "illegal": 0}


@pytest.mark.parametrize(
    "board, message, rewards, won, illegal",
    [
        ("xx.oo....", "I take 3.", [1, -1], "x", 0),
        ("xx.oo....", "1", [-1, 1], "o", 1),  # taken
        ("xx.oo....", "33", [-1, 1], "o", 1),  # no cell
        ("xx.oo....", "", [-1, 1], "o", 1),
        ("xx.oo....", "3 not 1", [1, -1], "x", 0),  # the first one
        ("xx.oox...", "6 3", [1, -1], "x", 1),  # o moves, to a taken cell
        ("xxooox..x", "7", [-1, 1], "o", 0),
        ("xoxxooox.", "9", [0, 0], "", 0),  # the last cell, no line
    ],
)
def test_the_end_of_a_game(board, message, rewards, won, illegal):
    rewards_of_steps, info = play(TicTacToe(), {"board": board}, [lambda prompt: message] * 2)
    assert rewards_of_steps.tolist() == [rewards]
    assert info == {"x_won": won == "x", "o_won": won == "o", "draw": won == "", "illegal": illegal}


def test_openings_are_boards_after_so_many_moves_without_a_winner():
    for openings in range(1, 9):
        env = TicTacToe(openings=openings)
        boards = [task["board"] for split in ("train", "eval") for task in env.tasks(split, 30)]
        assert len(set(boards)) == len(boards) > 5
        assert all(9 - board.count(".") == openings and not winner(board) for board in boards)
        assert set(boards) <= reachable_boards()
    assert env.reset({"board": "xoxxooox."}, RNG)[1][1] is None  # x moves


@pytest.mark.parametrize("board", [None, "x", "xxx......", "o........", "xoxxoooxx", "xxxoo....", "x" * 9])
def test_malformed_boards_are_refused(board):
    with pytest.raises(ValueError, match="board"):
        TicTacToe().reset({"board": board}, RNG)


# --- Kuhn poker -------------------------------------------------------------------------------------------------------


def uniform(brief=False):
    return {prompt: dict.fromkeys(info.answers, 0.5) for prompt, info in information_sets(brief).items()}


def equilibrium(alpha, brief=False):
    """Return the equilibrium of Kuhn (1950) in which the first player bets the jack with probability alpha, 0 to 1/3."""
    bold = {  # card and history -> probability of bet or call
        ("jack", ()): alpha, ("queen", ()): 0.0, ("king", ()): 3 * alpha,
        ("jack", ("check", "bet")): 0.0, ("queen", ("check", "bet")): alpha + 1 / 3, ("king", ("check", "bet")): 1.0,
        ("jack", ("check",)): 1 / 3, ("queen", ("check",)): 0.0, ("king", ("check",)): 1.0,
        ("jack", ("bet",)): 0.0, ("queen", ("bet",)): 1 / 3, ("king", ("bet",)): 1.0,
    }  # fmt: skip
    policy = {}
    for prompt, (_, card, history, (timid_answer, bold_answer)) in information_sets(brief).items():
        policy[prompt] = {timid_answer: 1 - bold[card, history], bold_answer: bold[card, history]}
    return policy


def random_policy(seed, brief=False, illegal=True):
    rng = np.random.default_rng(seed)
    odds = [rng.dirichlet([1, 1, 1] if illegal else [1, 1]) for _ in range(12)]
    sets = information_sets(brief).items()
    return {
        prompt: dict(zip(info.answers, map(float, p[:2]), strict=True)) for (prompt, info), p in zip(sets, odds, strict=True)
    }


def played_value(policy):
    """Return the expected chips of the first player, and the probability of an illegal answer, by playing all answers."""
    env = KuhnPoker(brief=set(policy) == set(information_sets(True)))
    chips = illegal = 0.0

    def continue_from(state, prompts, p):
        nonlocal chips, illegal
        prompt = next(text for text in prompts if text is not None)
        odds = policy[prompt] | {"pass": 1 - sum(policy[prompt].values())}
        for answer, q in odds.items():
            step = env.step(state, ["" if text is None else answer for text in prompts], RNG)
            if not step.done:
                continue_from(step.state, step.observations, p * q)
                continue
            assert sum(step.reward) == 0 and step.reward[0] == step.info["first_chips"]
            chips += p * q * step.reward[0]
            illegal += p * q * step.info["illegal"]

    tasks = env.tasks("train")
    for task in tasks:
        continue_from(*env.reset(task, RNG), 1 / len(tasks))
    return chips, illegal


@pytest.mark.parametrize("brief", [False, True])
def test_exact_values_equal_those_of_playing_all_hands(brief):
    for seed, illegal in ((0, True), (1, True), (2, False)):
        policy = random_policy(seed, brief, illegal)
        chips, share_illegal = played_value(policy)
        assert game_value(policy) == pytest.approx(chips, abs=1e-12) and (share_illegal > 1e-6) == illegal
    assert played_value(equilibrium(0.2, brief))[0] == pytest.approx(-1 / 18)


def test_a_best_response_is_as_good_as_the_best_of_all_pure_policies():
    """Each player has 64 pure policies of legal answers; the best of them is played against the other's part."""
    policy = random_policy(3)
    for player, sign in ((0, 1), (1, -1)):
        own = [(prompt, info.answers) for prompt, info in information_sets().items() if info.player == player]
        values = []
        for answers in itertools.product(*(answers for _, answers in own)):
            pure = {prompt: {answer: 1.0} for (prompt, _), answer in zip(own, answers, strict=True)}
            values.append(sign * game_value(policy | pure))
        assert len(values) == 64 and best_response_value(policy, player) == pytest.approx(max(values), abs=1e-12)


def test_uniform_play_is_eleven_twelfths_from_an_equilibrium():
    for brief in (False, True):
        assert nash_conv(uniform(brief)) == pytest.approx(11 / 12, abs=1e-12)
    assert game_value(uniform()) == pytest.approx(1 / 8)


@pytest.mark.parametrize("alpha", [0.0, 0.1, 1 / 3])
def test_no_player_gains_at_an_equilibrium_whose_value_is_minus_one_eighteenth(alpha):
    policy = equilibrium(alpha)
    assert nash_conv(policy) == pytest.approx(0, abs=1e-12) and game_value(policy) == pytest.approx(-1 / 18)
    assert best_response_value(policy, 1) == pytest.approx(1 / 18)
    bluff = {kuhn.format_prompt("jack", ()): {"bet": 1.0}}
    assert nash_conv(policy | bluff) > 0.05  # more often than at any equilibrium


def test_a_policy_of_illegal_answers_loses_the_ante():
    silent = dict.fromkeys(information_sets(), {})
    assert game_value(silent) == -1 and best_response_value(silent, 0) == best_response_value(silent, 1) == 1
    assert nash_conv(silent) == 2


@pytest.mark.parametrize(
    "messages, chips, illegal",
    [
        (["check", "check"], -1, 0),
        (["bet", "call"], -2, 0),
        (["bet", "fold"], 1, 0),
        (["check", "bet", "fold"], -1, 0),
        (["I CHECK.", "Bet!", "call"], -2, 0),
        (["fold"], -1, 1),  # nothing to fold to: illegal
        (["raise"], -1, 1),
        (["bet", "check"], 1, 1),
        (["check", "better"], 1, 1),
        (["check", "bet", ""], -1, 1),
    ],
)
def test_hands_of_queen_against_king(messages, chips, illegal):
    texts = iter(messages)
    rewards, info = play(KuhnPoker(), {"cards": ["queen", "king"]}, [lambda prompt: next(texts)] * 2)
    assert rewards[-1].tolist() == [chips, -chips] and not rewards[:-1].any()
    assert info == {"first_chips": chips, "illegal": illegal} and next(texts, None) is None


def test_prompts_are_those_of_the_information_sets():
    """All 12 prompts differ, and an episode has no others; a prompt shows the own card only."""
    for brief in (False, True):
        sets, env, prompts = information_sets(brief), KuhnPoker(brief=brief), set()
        for task, answers in itertools.product(env.tasks(), (["check", "bet"], ["bet"])):
            state, observations = env.reset(task, RNG)
            for answer in [*answers, None]:
                player = len(state.history) % 2
                assert observations[1 - player] is None
                prompts.add(observations[player])
                assert sets[observations[player]][:3] == (player, task["cards"][player], state.history)
                if answer:
                    state, observations = env.step(state, [answer, answer], RNG)[:2]
        assert prompts == set(sets) and len(sets) == 12
    assert set(" ".join(information_sets(True)).split()) == {*kuhn.CARDS, "check", "bet"}


@pytest.mark.parametrize("change", [{"fold": 0.1}, {"check": 0.6, "bet": 0.6}, {"check": -0.1}, {"check": float("nan")}])
def test_what_is_no_policy_is_refused(change):
    first = next(iter(information_sets()))
    with pytest.raises(ValueError, match="give probabilities of check and bet"):
        game_value(uniform() | {first: change})
    with pytest.raises(ValueError, match="a policy of 13 prompts: give the 12"):
        nash_conv(uniform() | {"other": change})
    with pytest.raises(ValueError, match="has no deal"):
        KuhnPoker().reset({"cards": ["king", "king"]}, RNG)


# --- iterated prisoner's dilemma --------------------------------------------------------------------------------------


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize(
    "players, payoffs, cooperation",
    [
        ((tit_for_tat, always_defect), (9, 14), (0.1, 0)),  # 0 + 9 * 1 and 5 + 9 * 1
        ((always_defect, tit_for_tat), (14, 9), (0, 0.1)),
        ((tit_for_tat, always_cooperate), (30, 30), (1, 1)),
        ((tit_for_tat, win_stay_lose_shift), (30, 30), (1, 1)),
        ((always_cooperate, always_defect), (0, 50), (1, 0)),
        ((win_stay_lose_shift, always_defect), (5, 30), (0.5, 0)),  # cooperates in every other round
        ((always_defect, always_defect), (10, 10), (0, 0)),
    ],
)
def test_payoffs_of_known_players(players, payoffs, cooperation, brief):
    env = PrisonersDilemma(brief=brief)
    rewards, info = play(env, *env.tasks(), players)
    assert rewards.shape == (10, 2) and rewards.sum(0).tolist() == list(payoffs)
    assert info == pytest.approx(
        {"cooperation_1": cooperation[0], "cooperation_2": cooperation[1], "payoff": sum(payoffs) / 20, "illegal": 0}
    )


def test_win_stay_lose_shift_forgives_a_single_defection():
    """Two of them return to cooperation after a round of joint defection; tit for tat echoes the defection for ever."""
    after_slip = {"CC": "C", "CD": "D", "DC": "D", "DD": "C"}
    for rounds, choice in after_slip.items():
        prompt = prisoners_dilemma.format_prompt((tuple(rounds),), 10, (3, 1, 5, 0), brief=True)
        assert win_stay_lose_shift(prompt) == choice and tit_for_tat(prompt) == rounds[1]


@pytest.mark.parametrize("brief", [False, True])
def test_rounds_round_trip_through_prompts(brief):
    pairs = list(itertools.product("CD", repeat=2))
    for count in range(4):
        for rounds in itertools.product(pairs, repeat=count):
            assert read_rounds(prisoners_dilemma.format_prompt(rounds, 4, (3, 1, 5, 0), brief)) == rounds
    with pytest.raises(ValueError, match="does not show all rounds"):
        read_rounds("D C")


def test_agents_read_their_own_choices_first():
    env = PrisonersDilemma(rounds=3)
    step = env.step(env.reset({"rounds": 3}, RNG)[0], ["cooperate", "defect"], RNG)
    assert [read_rounds(prompt) for prompt in step.observations] == [(("C", "D"),), (("D", "C"),)]
    assert "Round 1: you cooperated, the other defected." in step.observations[0] and "round 2 of 3" in step.observations[0]


@pytest.mark.parametrize(
    "text, choice",
    [
        ("C", "C"), ("I choose D.", "D"), ("Defect", "D"), ("COOPERATE, do not defect", "C"), ("I'd cooperate", "C"),
        ("I'D COOPERATE", "C"), ("", None), ("cooperation", None), ("CD", None), ("c", None), ("yes", None),
    ],
)  # fmt: skip
def test_the_first_choice_in_a_message_counts(text, choice):
    assert prisoners_dilemma.read_choice(text) == choice


def test_messages_without_a_choice_are_counted_and_defect():
    env = PrisonersDilemma(rounds=2)
    rewards, info = play(env, {"rounds": 2}, [always_cooperate, lambda prompt: "D" if "round 1 of" in prompt else "?"])
    assert rewards.tolist() == [[0, 5], [0, 5]] and info["illegal"] == 0.25 and info["cooperation_2"] == 0


def test_other_payoffs_are_rewards_and_in_the_prompt():
    env = PrisonersDilemma(rounds=4, payoffs=(-1, -2, 0, -3.5))
    assert env.reward_range == (-3.5, 0) and "it gets 0 and the other gets -3.5" in env.reset({"rounds": 4}, RNG)[1][0]
    rewards, info = play(env, {"rounds": 2}, [always_cooperate, tit_for_tat])
    assert rewards.tolist() == [[-1, -1]] * 2 and info["payoff"] == -1
    for payoffs, match in (((3, 1, 2, 0), "no dilemma"), ((1, 2, 3), "four finite"), ((3, 1, float("inf"), 0), "four finite")):
        with pytest.raises(ValueError, match=match):
            PrisonersDilemma(payoffs=payoffs)
    with pytest.raises(ValueError, match="rounds from 1 to 4"):
        env.reset({"rounds": 5}, RNG)


# --- signals ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("brief", [False, True])
@pytest.mark.parametrize("options", [{}, {"things": 26, "signals": 8}, {"things": 5, "signals": 5, "length": 1}])
def test_the_code_of_the_solver_names_all_things(options, brief):
    env = Signals(**options, brief=brief)
    for task in env.tasks():
        state, prompts = env.reset(task, RNG)
        assert prompts[1] is None and task["thing"] in prompts[0]
        step = env.step(state, [env.solve(state)[0], ""], RNG)
        assert step.reward == 0 and not step.done and step.observations[0] is None
        last = env.step(step.state, ["", env.solve(step.state)[1]], RNG)
        assert last.reward == 1 and last.done and last.info == {"solved": 1}


@pytest.mark.parametrize(
    "text, message",
    [
        ("ba ke", "ba ke"), ("Ba, then KE; du", "ba ke"), ("ke", "ke"), ("", ""), ("apple", ""), ("apple zo bake du", "du"),
    ],
)  # fmt: skip
def test_only_signals_reach_the_receiver(text, message):
    """Its prompt is the same for all things: the name of the thing, other words and signals that are not in use are lost."""
    env, prompts = Signals(brief=True), set()
    for task in env.tasks():
        prompts.add(env.step(env.reset(task, RNG)[0], [text, ""], RNG).observations[1])
    assert prompts == {f"hear {message}".strip()}


@pytest.mark.parametrize("answer, reward", [("Apple!", 1), ("apple or drum", 1), ("drum, apple", 0), ("apples", 0), ("", 0)])
def test_the_first_thing_in_the_answer_counts(answer, reward):
    rewards, info = play(Signals(), {"thing": "apple"}, [lambda prompt: "ba", lambda prompt: answer])
    assert rewards[:, 0].tolist() == [0, reward] and info["solved"] == reward


def test_a_receiver_names_as_many_things_as_it_reads_messages():
    """With messages of two kinds, two of eight things at most are named."""
    env = Signals(signals=8, length=1)
    for names in itertools.product(env.things[:3], repeat=2):
        receiver = dict(zip(("ba", "ke"), names, strict=True))
        players = [
            lambda p: "ba" if p.rpartition("see: ")[2] < "d" else "ke",
            lambda p, receiver=receiver: receiver[p.split("read: ")[1][:2]],
        ]
        right = sum(play(env, task, players)[0].sum() / 2 for task in env.tasks())
        assert right <= 2


def test_words_differ_and_invalid_options_are_refused():
    assert len(set(THINGS) | set(SIGNALS)) == 34
    for options, match in (
        (dict(things=27), "2 to 26 things"), (dict(signals=9), "1 to 8 signals"), (dict(length=0), "give 1 to 8"),
        (dict(things=8, signals=2), "differ for 8 things"),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=match):
            Signals(**options)
    with pytest.raises(ValueError, match="no known thing"):
        Signals(things=2).reset({"thing": "drum"}, RNG)
    with pytest.raises(ValueError, match="openings=9: give 0 to 8"):
        TicTacToe(openings=9)
    with pytest.raises(ValueError, match="rounds=0: give at least 1"):
        PrisonersDilemma(rounds=0)


def test_prompts_of_brief_forms_have_few_words():
    """So a tokenizer of a word a token has at most about 15 tokens."""
    words = {
        TicTacToe: {"x", "o", ".", "move"}, PrisonersDilemma: {"C", "D", "move"},
        KuhnPoker: {*kuhn.CARDS, "check", "bet"}, Signals: {"see", "hear", *THINGS[:8], *SIGNALS[:4]},
    }  # fmt: skip
    for cls, expected in words.items():
        env, actual = cls(brief=True), set()
        for task in env.tasks():
            record = []
            players = [lambda prompt, record=record: record.append(prompt) or "5 2 ba ke check D drum"] * 2
            play(env, task, players)
            actual |= set(" ".join(record).split())
        assert actual <= expected
