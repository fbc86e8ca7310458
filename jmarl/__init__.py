"""Train teams of language models to work together with multi-agent reinforcement learning in JAX.

`train` runs the training loop, `Team` describes who plays and `TrainConfig` how they learn. `run_experiment` runs all that one
`ExperimentConfig` describes. `RewardEnvironment`, `TextEnvironment` and `Step` make environments, `evaluate` plays held-out
items, `generate` asks a trained team, `fit` trains on given data, `metrics` reads the numbers of a run; `dir(jmarl)` lists all
names. Each name is imported when it is first used, so that `import jmarl` takes milliseconds. CoMLRL's trainers are names of
`jmarl.comlrl.trainers`, and can be imported from here too.

An environment, an algorithm or a model family of your own needs no change here: see the README and the guides. Where to add
what to jmarl itself:

- a loss or a group estimator: a function in `rl/losses.py` or `rl/advantages.py`, a row in `algorithms/table.py`, whose
  `options` name the settings that the loss reads; its place in the table of the README (two rows a line, in the order of the
  table), its line in `tests/algorithms/test_table.py`, and numbers of an estimator in `tests/rl/test_advantages.py`; advantages
  of tokens: `token_advantages` in `objectives/policy.py`;
- an environment: a class in a world of `envs/`, as `envs/games/grid.py`, with annotations, `solve` and docstrings that say what
  task, roles and rewards are; a line in `envs/__init__.py`, its name in the section Environments of the README, and a line in
  `experiments/README.md`, as `python -m experiments.environments` prints it;
- a model family: a file in `models/families/` and a line in `models/families/__init__.py`, which says how; what no other
  family computes, also in `models/config.py`, `models/weights.py` and `models/decoder.py`;
- a metric: the dict that a loss or `objectives/policy.py` returns, or `logs/rollout_log.py`; its name in `columns.py` if users
  could choose the same, and its line in the table of columns in `experiments/README.md`;
- a setting and its flag: a field of a section in `config/sections.py`, `config/run.py` or `config/preference.py`; one that a
  row of the table has a default for, also in `algorithms/table.py`;
- a rule that two settings must obey: a row of `config/constraints.py`, or of `algorithms/constraints.py` if it depends on the
  algorithm, the team, the seeds or the data.
"""

import difflib
import importlib
import logging
import warnings
from typing import TYPE_CHECKING, Any

from jmarl.lazy import collector_paused, keep_old_name, modules_of
from jmarl.shadows import explaining

if TYPE_CHECKING:  # for editors and type checkers; tests/test_import.py holds it equal to _NAMES
    from jmarl.comlrl.trainers import *  # noqa: F403
    from jmarl.config import ExperimentConfig as ExperimentConfig
    from jmarl.config import Sampling as Sampling
    from jmarl.config import TaskConfig as TaskConfig
    from jmarl.config import TeamConfig as TeamConfig
    from jmarl.config import TrainConfig as TrainConfig
    from jmarl.envs import make as make
    from jmarl.envs.base import Step as Step
    from jmarl.envs.base import TextEnvironment as TextEnvironment
    from jmarl.envs.reward_environment import RewardEnvironment as RewardEnvironment
    from jmarl.envs.reward_environment import default_formatter as default_formatter
    from jmarl.envs.rewards import RewardFunction as RewardFunction
    from jmarl.envs.rewards import RewardProcessors as RewardProcessors
    from jmarl.envs.rewards import make_reward as make_reward
    from jmarl.evaluation.cross_play import cross_play as cross_play
    from jmarl.evaluation.cross_play import load_runs as load_runs
    from jmarl.evaluation.evaluate import evaluate as evaluate
    from jmarl.models.hub.agents import Agent as Agent
    from jmarl.models.hub.agents import load_agent as load_agent
    from jmarl.models.hub.agents import save_pretrained as save_pretrained
    from jmarl.preferences.pairs import load_pairs as load_pairs
    from jmarl.preferences.pairs import load_trajectories as load_trajectories
    from jmarl.preferences.reward_model import load_reward_model as load_reward_model
    from jmarl.processes.join import join_processes as join_processes
    from jmarl.remote import RemoteEnvironment as RemoteEnvironment
    from jmarl.remote import remote_reward as remote_reward
    from jmarl.report.load import metrics as metrics
    from jmarl.runs.experiment import run_experiment as run_experiment
    from jmarl.runs.records import TrainResult as TrainResult
    from jmarl.runs.seeds import train_seeds as train_seeds
    from jmarl.runs.train import fit as fit
    from jmarl.runs.train import train as train
    from jmarl.sampling.texts import generate as generate
    from jmarl.team import Team as Team
    from jmarl.team import agents_of as agents_of
    from jmarl.team import make_team as make_team
    from jmarl.team import policies as policies
    from jmarl.team import save_team as save_team

_NAMES = {  # module -> the public names that it defines
    "config": "ExperimentConfig Sampling TaskConfig TeamConfig TrainConfig",
    "team": "Team agents_of make_team policies save_team",
    "models.hub.agents": "Agent load_agent save_pretrained",
    "envs": "make",
    "envs.base": "Step TextEnvironment",
    "envs.reward_environment": "RewardEnvironment default_formatter",
    "envs.rewards": "RewardFunction RewardProcessors make_reward",
    "evaluation.cross_play": "cross_play load_runs",
    "evaluation.evaluate": "evaluate",
    "sampling.texts": "generate",
    "processes.join": "join_processes",
    "remote": "RemoteEnvironment remote_reward",
    "report.load": "metrics",
    "runs.experiment": "run_experiment",
    "preferences.pairs": "load_pairs load_trajectories",
    "preferences.reward_model": "load_reward_model",
    "runs.seeds": "train_seeds",
    "runs.records": "TrainResult",
    "runs.train": "fit train",
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names.split()}
_room = modules_of(__name__)
for _name in ("", ".preferences", ".preferences.encoding", ".preferences.pairs"):  # which were once in jmarl.training
    keep_old_name(f"{__name__}.training{_name}", f"{__name__}{_name}")
del _name

# transformers advises to install PyTorch when it is imported. Only its tokenizers are used here, which work without.
logging.getLogger("transformers").addFilter(lambda record: not record.getMessage().startswith("PyTorch was not found"))

# tqdm is imported by these packages, and in notebooks without ipywidgets it advises to install them. jmarl has bars of its own.
warnings.filterwarnings("ignore", message="IProgress not found")


def __getattr__(name: str) -> Any:
    if name in _MODULE_OF:
        with explaining(), collector_paused():
            return getattr(importlib.import_module(f"jmarl.{_MODULE_OF[name]}"), name)
    try:
        return _room(name)
    except AttributeError as error:
        if name.startswith("_"):
            raise
        trainers = {n: x for n, x in vars(importlib.import_module("jmarl.comlrl.trainers")).items() if isinstance(x, type)}
        if name in trainers:
            return trainers[name]
        nearest = difflib.get_close_matches(name, [*_MODULE_OF, *trainers], n=1, cutoff=0.0)[0]
        raise AttributeError(f"{error}; the nearest name is {nearest!r}, dir(jmarl) lists all") from None


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULE_OF})
