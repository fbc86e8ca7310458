"""Settings of a tiny training, for tests whose fact is not a shape.

Equal shapes and settings are one program, which all modules of a worker share. Learning rates, seeds, coefficients and texts of
the same length are no part of a program; the algorithm, numbers of agents, prompts, completions and tokens are.
"""

HOUSE = dict(num_updates=2, num_prompts=2, num_generations=3, max_new_tokens=4, learning_rate=1e-2, progress=False)
ITEMS = [{"prompt": "The answer"}, {"prompt": "seven apples and three pears"}]
