"""Learning from preferences: given pairs, rounds in which the team samples pairs, comparators, and reward models.

Read in this order: `pairs`, `encoding` (token ids, batches, scores), `data_source` (given data), `pair_rounds`, `comparators`,
`reward_model`.
"""
