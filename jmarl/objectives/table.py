"""Choose the objectives of a resolved algorithm: of its agents, and of critics besides them."""

from jmarl.algorithms import Algorithm
from jmarl.lazy import Table
from jmarl.objectives.objective import Objective

OF_AGENTS = Table[Objective](  # by the data of a row; of agents with a value head
    {
        "rollouts": "jmarl.objectives.policy:POLICY",
        "pairs": "jmarl.objectives.pairs:PAIRS",
        "texts": "jmarl.objectives.texts:TEXTS",
        "head": "jmarl.objectives.values:ACTOR_CRITIC",
        "head of pass": "jmarl.objectives.values:ACTOR_CRITIC_OF_PASS",
    }
)
OF_CRITICS = Table[Objective](
    {
        "central": "jmarl.objectives.values:CENTRAL_CRITIC",
        "own": "jmarl.objectives.values:OWN_CRITIC",
        "own of pass": "jmarl.objectives.values:OWN_CRITIC_OF_PASS",
    }
)


def objective_of(algorithm: Algorithm) -> Objective:
    """Return what the agents minimize."""
    if algorithm.critic_kind == "head":
        return OF_AGENTS["head of pass" if algorithm.reuses_values else "head"]
    return OF_AGENTS[algorithm.row.data]


def critic_objective(algorithm: Algorithm) -> Objective:
    """Return what critics besides the agents minimize."""
    if algorithm.critic_kind == "central":
        return OF_CRITICS["central"]
    return OF_CRITICS["own of pass" if algorithm.reuses_values else "own"]
