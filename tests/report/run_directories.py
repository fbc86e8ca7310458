"""Run directories as a run of two agents leaves them, and a server that follows them."""

from __future__ import annotations

import contextlib
import json
import random
import threading
from pathlib import Path

from jmarl.logs.completions_file import CompletionsFile
from jmarl.report import serve


def write_run(directory: Path, seed: int = 0, learning_rate: float = 1e-3, steps: int = 4, turns: int = 1, words: int = 6):
    """Write what a run of two agents, two prompts and three completions leaves behind."""
    rng = random.Random(seed)
    directory.mkdir(parents=True)
    file = CompletionsFile(directory / "completions.jsonl.gz", 0, 10**8)
    rows = [{"step": 0, "eval/updates": 0, "eval/reward": 0.25, "eval/reward_ci95": 0.125}]
    for step in range(1, steps + 1):
        file.write(
            step, "train", {"tasks": [{"prompt": "x"}] * 2, "turns": [turn(step - 1, t, rng, words) for t in range(turns)]}
        )
        rows.append({"step": step, "reward/mean": (step - 1) / 8 + seed, "agent_0/length": 4.0, "agent_1/length": 4.0 + step})
        rows[-1] |= {"time/sampling": 3.0, "time/update": 1.0, "time/step_s": 4.5}
    rows.append({"step": steps, "eval/updates": steps, "eval/reward": 0.75 + seed, "eval/reward_ci95": 0.0625})
    file.write(steps, "eval", {"updates": steps, "tasks": [], "turns": [turn(99, 0, rng, words)]})
    file.close()
    (directory / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    attempt = directory / "attempts" / "1"
    attempt.mkdir(parents=True)
    settings = {"config": {"seed": seed, "learning_rate": learning_rate, "algorithm": "magrpo"}, "data": {"items": 2}}
    (attempt / "start.json").write_text(json.dumps({"command": ["python", "mine.py"], "host": "here", "settings": settings}))
    (attempt / "log.txt").write_text("step 4/4  reward 0.4\n")
    return directory


def turn(step: int, t: int, rng: random.Random, words: int) -> dict:
    def text(agent: int, p: int, g: int) -> str:
        drawn = " ".join(str(rng.randrange(10**6)) for _ in range(words))
        return f"<i>step {step} turn {t} agent {agent} prompt {p} completion {g}</i> & {drawn}"

    rewards = [[[0.5 - g / 4, 0.5 - g / 4] for g in range(3)], [[None, None], [1.0, 0.0], [0.125, 0.125]]]
    measures = {} if t else {"measures": {"ratio": [[2.5, 2.25, 2.0], [None, 1.5, 1.25]]}}  # files of older versions have none
    return measures | {
        "prompts": [["Name a <b>fruit</b>:", "Name a city:"]] * 2,
        "acts": [[True, True], [True, t == 0]],
        "completions": [[[text(agent, p, g) for g in range(3)] for p in range(2)] for agent in range(2)],
        "joint": [[g, 2 - g] for g in range(3)],
        "rewards": rewards,
        "parts": {"solved": [[1.0, 0.0, None], [0.0, 0.5, 1.0]]},
        "parents": [0, 1],
        "items": [0, 1],
    }


@contextlib.contextmanager
def watched(*paths: Path):
    """Yield the address of a server that follows runs."""
    with serve.open_server(paths, 0, 30.0) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield serve.address_of(server)
        finally:
            server.shutdown()
            thread.join()
