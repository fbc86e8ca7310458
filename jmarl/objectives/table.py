"""Choose the objectives of a resolved algorithm: of its agents, and of critics besides them."""

from jmarl.algorithms import Algorithm
from jmarl.objectives.objective import Objective
from jmarl.objectives.pairs import PAIRS
from jmarl.objectives.policy import POLICY
from jmarl.objectives.texts import TEXTS
from jmarl.objectives.values import (
    ACTOR_CRITIC,
    ACTOR_CRITIC_OF_PASS,
    CENTRAL_CRITIC,
    OWN_CRITIC,
    OWN_CRITIC_OF_PASS,
    reuses_values,
)

OF_DATA = {"rollouts": POLICY, "pairs": PAIRS, "texts": TEXTS}


def objective_of(algorithm: Algorithm) -> Objective:
    """Return what the agents minimize."""
    if algorithm.has_value_head:
        return ACTOR_CRITIC_OF_PASS if reuses_values(algorithm) else ACTOR_CRITIC
    return OF_DATA[algorithm.row.data]


def critic_objective(algorithm: Algorithm) -> Objective:
    """Return what critics besides the agents minimize."""
    if algorithm.row.critic == "central":
        return CENTRAL_CRITIC
    return OWN_CRITIC_OF_PASS if reuses_values(algorithm) else OWN_CRITIC
