"""Train as a YAML file says: the shipped `ppo` (`jmarl configs show ppo`), or another one.

The same as `jmarl train --config ppo`. --quick overrides the model and the size of the run by flags.
Command: python -m experiments.examples.train_from_config [--quick]
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from experiments.examples.start import quick_flag, tiny_agent
from jmarl.cli.main import main as jmarl
from jmarl.models.hub.agents import save_pretrained

SMALL = ("training.num_epochs=2", "training.batch_size=2", "training.eval_episodes=4", "max_new_tokens=8", "progress=false")


def main(quick: bool, name: str = "ppo") -> None:
    arguments = ["train", "--config", name]
    if not quick:
        raise SystemExit(jmarl([*arguments, "--output", f"runs/{name}_from_config"]))
    with tempfile.TemporaryDirectory() as folder:
        agent = tiny_agent()
        save_pretrained(Path(folder, "model"), agent.config, agent.params, agent.tokenizer)
        changes = [f"model.model_name_or_path={folder}/model", *SMALL]
        code = jmarl([*arguments, "--output", f"{folder}/run", *(part for text in changes for part in ("--set", text))])
    if code:
        raise SystemExit(code)


if __name__ == "__main__":
    main(quick_flag(__doc__))
