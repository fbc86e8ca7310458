"""The team that is served."""

import pytest

from jmarl.team import Team, stack_agents


@pytest.fixture(scope="module")
def team(tiny_config, random_agent, tiny_tokenizer):
    return Team.of([random_agent(tiny_config(), tiny_tokenizer, seed) for seed in (0, 1)])


@pytest.fixture(scope="module")
def params(team):
    return stack_agents(team.stacks, team.agents)
