"""What tests of learning share."""

import pytest


@pytest.fixture(scope="module")
def agents(tiny_config, tiny_tokenizer, random_agent):
    """Two agents of one architecture: a stack."""
    return [random_agent(tiny_config(), tiny_tokenizer, seed) for seed in range(2)]
