"""Who learns in a run, and how: everything that does not change from step to step."""

from typing import NamedTuple

from jmarl.algorithms import Algorithm
from jmarl.config import TrainConfig
from jmarl.learning.critics import Critics
from jmarl.team import Team


class Setup(NamedTuple):
    """The team, its critics, the resolved algorithm of the agents and the settings of the run."""

    team: Team
    critics: Critics
    algorithm: Algorithm
    cfg: TrainConfig
