"""What one agent minimizes: of rollouts (a policy, a critic, both in one network), pairs or texts.

An objective is three functions of one agent: `prepare(batch, ...) -> targets`, `loss(outputs, targets)` and
`trained_rows(batch)`. Kinds of batches are told apart here and nowhere else. The room imports `sampling` (log-probabilities),
`models`, `rl` and what comes before them. Open `objective.py` first, then `policy.py`.
"""
