"""The interfaces of environments (host code, no jax): what to override in a new one, and what training plays.

A new environment is one class in one file. It plays one episode, and training plays many of them side by side:

    import numpy as np

    from jmarl import Step, Team, TextEnvironment, TrainConfig, train

    class Guess(TextEnvironment):
        roles, reward_range, max_turns = ("guesser",), (0.0, 1.0), 3

        def tasks(self, split="train", count=100, seed=0):
            numbers = np.random.default_rng(seed).permutation(range(int(split == "eval"), 1000, 2))  # eval: the odd ones
            return [{"number": int(n)} for n in numbers[:count]]

        def reset(self, task, rng):
            return {"number": task["number"], "turn": 0}, ["Guess a number below 1000."]

        def step(self, state, messages, rng):
            state["turn"] += 1
            solved = messages[0].strip() == str(state["number"])
            done = solved or state["turn"] == self.max_turns
            return Step(state, ["Wrong. Guess again."], float(solved), done, {"solved": float(solved)})

    env = Guess()
    team = Team.load(["a Hub id or a directory"])  # one per role
    train(team, env, env.tasks(), TrainConfig.of(num_turns=env.max_turns, branching="chain"))

With two `roles`, `messages` and the observations are lists of two texts. A reward is one number for the team, or a list with
one per agent. An observation that is None means that the agent does not act in the coming step.

`make("my_module:Guess")` builds it. In jmarl itself its file is in one of the worlds (`games/grid.py` is one), and with a line
in `jmarl.envs.ENVIRONMENTS` the tests of all environments cover it (so `tasks` begins with `data.check_split` and draws no
task twice, and `reward_range` is finite), and `make("guess")` builds it. `Team.of(random_agents(...))` of `experiments.tiny`
makes a tiny team for a first try.

`reset` and `step` are functions of their arguments alone: draw random numbers from `rng` only, and keep what an episode needs
in its state. Then the steps of a batch can be computed in any order, in other processes, and twice, with the same result.

`info` and `parts` are for the log, as `measures/NAME` and `reward/NAME`; parts must add up to the reward. Names that the
library writes itself are refused, such as a part `mean` (see `jmarl.columns`). If `solved` is one of them and is 0 or 1,
evaluations show a success rate.

See `messages.SimulatedEnvironment` for environments that keep the state in the object, and `reward_environment` for a task that
is a plain reward function. This file leaves out how episodes are played side by side: see `vector` and `pool`.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import numpy as np

from jmarl.config.validation import check
from jmarl.envs.reward_values import RewardResult

# [N] what each agent reads, a text or a list of chat messages; None: the agent does not act in the coming step.
Observations = Sequence[Any]
Texts = Sequence[Sequence[str]]  # [N][B] one text per agent and episode


class Step(NamedTuple):
    """The result of one joint action, which `TextEnvironment.step` returns.

    return Step(state, ["Wrong. Guess again."], reward=0.0, done=False)
    """

    state: Any
    observations: Observations  # of the next step; ignored when the episode is done
    reward: float | Sequence[float]  # of the team, or one per agent; NaN masks the joint action
    done: bool
    info: Mapping[str, float] = {}  # measures: numbers for the log that are no part of the reward; NaN: no value
    truncated: bool = False  # done only because the episode reached max_turns
    parts: Mapping[str, float] = {}  # terms whose sum is the reward (mean over agents), if it is a sum


class Unanswered(RuntimeError):
    """Raised by `reset` or `step` when no reward can be computed and the agents are not to blame (the judge is unreachable).

    The joint action is masked and counted, and its episode ends. Clients of a server read the text, unless it names a path or
    an address.
    """


class TextEnvironment:
    """An environment of one episode. Override `reset` and `step`, and `tasks` if it brings its own tasks.

        class Echo(TextEnvironment):
            roles = ("first", "second")

            def reset(self, task, rng):
                return task, [f"Repeat {task['word']}.", f"Repeat {task['word']}."]  # the state, and what each agent reads

            def step(self, state, messages, rng):
                reward = float(messages[0] == messages[1] == state["word"])
                return Step(state, ["", ""], reward, done=True)

        jmarl.train(team, Echo(), [{"word": "owl"}, {"word": "elk"}], cfg)

    help(jmarl.envs.base) has one of several turns.

    Attributes:
        roles: the names of the N agents.
        reward_range: lowest and highest reward of one step; a reward outside is an error.
        max_turns: the number of steps after which every episode is done.
        data_sets: Hub ids of data sets that the tasks can also come from.
        special_tokens: special tokens of tokenizers that messages keep, such as marks of tool calls. Others are left out
            unless `skip_special_tokens` is False.
    """

    roles: tuple[str, ...] = ("agent",)
    reward_range: tuple[float, float] = (-math.inf, math.inf)
    max_turns: int = 1
    data_sets: tuple[str, ...] = ()
    special_tokens: tuple[str, ...] = ()

    @property
    def num_agents(self) -> int:
        check("roles", self.roles, not isinstance(self.roles, str), "a list with a name for each agent")
        return len(self.roles)

    @property
    def class_name(self) -> str:
        return type(self).__name__

    def tasks(self, split: str = "train", count: int = 100, seed: int = 0) -> list[dict]:
        """Return up to `count` tasks of a split, as dicts that JSON can hold.

        Equal seeds give equal tasks. The splits `train` and `eval` have no task in common, unless the environment has only a
        few tasks and both splits have all of them.
        """
        raise NotImplementedError(f"{self.class_name} has no tasks of its own: pass items to train(...)")

    def reset(self, task: dict, rng: np.random.Generator) -> tuple[Any, Observations]:
        """Return the first state of an episode and what each agent reads. Raise a ValueError for a malformed task."""
        raise NotImplementedError(f"{self.class_name} has no reset: override it")

    def step(self, state: Any, messages: Sequence[str], rng: np.random.Generator) -> Step:
        """Return the result of the joint action `messages` [N]; agents that do not act have the message "".

        No message may make it raise. It may change the state, which is a copy.
        """
        raise NotImplementedError(f"{self.class_name} has no step: override it")

    def solve(self, state: Any) -> Sequence[str | None]:
        """Return a correct joint action [N]; None for agents that do not act or have no correct message.

        Used for demonstrations and tests. The state is a copy.
        """
        raise NotImplementedError(f"{self.class_name} has no solver of its own: override solve")

    def render(self, state: Any) -> str:
        """Return a state as text to look at."""
        return repr(state)

    def describe(self) -> dict[str, Any]:
        """Return what must not change when a run resumes."""
        return {
            "class": self.class_name,
            "roles": list(self.roles),
            "max_turns": self.max_turns,
            "reward_range": list(self.reward_range),
        }


class Answer(NamedTuple):
    """The answer of an `Environment` to B joint actions of B episodes."""

    result: RewardResult
    done: np.ndarray  # [B] bool: the episode is over
    after: list[Any]  # [B] passed to `observe` for the episodes that continue


class Environment(Protocol):
    """Many episodes in lock-step: the interface that `play` and `train` use. `LockStep` makes one of a `TextEnvironment`.

    States may be of any type and are never changed, because in a tree several joint actions continue from one state. A prompt
    that is None means that the agent does not act in that turn; it learns nothing there.
    """

    def reset(self, items: Sequence[dict], rng: np.random.Generator) -> tuple[list[Any], list[list[Any]]]:
        """Return states [P] and first prompts [N][P] of items [P]. Without side effects: compilation calls it too."""
        ...

    def step(self, states: Sequence[Any], actions: Texts, rng: np.random.Generator) -> Answer:
        """Return the rewards of the joint actions [N][B] in the states [B]."""
        ...

    def observe(self, after: Sequence[Any]) -> tuple[list[Any], list[list[Any]]]:
        """Return states [B] and next prompts [N][B] of the episodes that continue. Not called after the last turn."""
        ...


def describe(env: Any) -> dict[str, Any]:
    """Return what must not change when a run resumes: the result of `env.describe()` after a round trip through JSON, or {} for
    an environment without that method."""
    method = getattr(env, "describe", None)
    return json.loads(json.dumps(method())) if callable(method) else {}


def close(env: Any) -> None:
    """Call the method `close` of an environment, if it has one: it ends processes and connections."""
    method = getattr(env, "close", None)
    if callable(method):
        method()


def special_tokens(env: Any) -> tuple[str, ...]:
    """Return the special tokens that an environment reads in completions: its attribute `special_tokens`, or none."""
    return tuple(getattr(env, "special_tokens", ()))


def class_name(env: Any) -> str:
    """Return the name of an environment for messages; `env` may be any object with `reset` and `step`."""
    return env.class_name if isinstance(env, TextEnvironment) else type(env).__name__
