"""The code of the users' five documents runs as it stands there, up to the rules named in TABLE.

001 is 000 without indentation: after the rules it is the same text, and one of them is trained.
The documents are read from the directory that JMARL_SEEDS names, else from `seeds` beside JMARL_DATA; without them the tests
are skipped. `python -m tests.test_documents` prints the table: document, first line of a block, the test that runs it, rules.
000, 002 and 003 have fenced blocks; 001 and 004 have none, so the table also names the last line of a block there.
"""

from __future__ import annotations

import os
import re
import runpy
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load_file

from jmarl.mrlm.algorithms import GRPOTrainer
from jmarl.mrlm.config import ExperimentConfig, TrainingConfig
from jmarl.mrlm.core import LLMEnvironment
from tests.running import DATA, call, changed, differs, rewards, tiny_model

SEEDS = Path(os.environ.get("JMARL_SEEDS") or DATA.parent / "seeds")
# In place of a test of this file.
EXAMPLES, CLI, SERVERS, LAUNCHED, NOT_OURS = (
    "tests/test_examples.py",
    "tests/cli",
    "tests/remote",
    "tests/processes",
    "not ours",
)

DEMO = "test_the_quick_demo_runs"
FLAT_DEMO = "test_the_quick_demo_without_indentation_is_the_same_text"
GUIDE = "test_the_trainer_guide_runs"
USAGE = "test_the_usage_of_the_readme_runs"
EXAMPLE = "test_the_30_second_example_runs"
TRAINERS = "test_the_four_trainers_train"
ENVIRONMENTS = "test_the_environments_are_built"
YAML = "test_the_yaml_file_trains"
CUSTOM = "test_the_custom_environment_trains"

SMALL = {"=128": "=4"}  # tokens of a completion; groups of 3, and 2 updates of the demo
DEMO_SIZE = SMALL | {"num_train_epochs=3": "num_train_epochs=0.2", "num_generations=8": "num_generations=3"}
GUIDE_SIZE = SMALL | {"num_train_epochs=3": "num_train_epochs=1", "num_generations=4": "num_generations=3"}
EXAMPLE_SIZE = {"num_epochs=50": "num_epochs=2, batch_size=2", "num_iterations=50": "num_iterations=2"}
EXAMPLE_SIZE |= {"EnvironmentMode.SERVER": "EnvironmentMode.SERVER, generation_config={'max_new_tokens': 4}"}
REPLY = "next_observation, reward = Observation(messages=[], done=True), Reward(float(len(action.content)))"
REPLIES = {"Message(...)": 'Message("user", "Say yes.")', "# Process action, compute reward": REPLY}
SAMPLE = {  # the sample of a data set of the Hub
    'load_dataset("trl-lib/tldr", split="train")': (
        f'load_dataset("json", data_files="{DATA / "tldr" / "train.jsonl.gz"}", split="train")'
    )
}
COMPARISON = """
from jmarl.mrlm.algorithms.dpo import DPOTrainer
from jmarl.mrlm.algorithms.grpo import GRPOTrainer
from jmarl.mrlm.algorithms.ppo import PPOTrainer
from jmarl.mrlm.algorithms.sft import SFTTrainer
from jmarl.mrlm.config import ExperimentConfig, TrainingConfig
from jmarl.mrlm.core import LLMEnvironment
from jmarl.mrlm.environments.math import MathProblemGenerator, MathReasoningEnvironment
policy_env = LLMEnvironment("Qwen/Qwen2.5-1.5B-Instruct", generation_config={"max_new_tokens": 4})
eval_envs = [MathReasoningEnvironment(MathProblemGenerator())]
preference_dataset = [{"prompt": "2 + 2 =", "chosen": "4", "rejected": "5"}]
config = ExperimentConfig(TrainingConfig(batch_size=2, learning_rate=1e-2))
"""


class Block(NamedTuple):
    """A block of a document and the rules by which it is changed before it runs. Every rule must change something."""

    document: str
    first: str  # its first line
    test: str  # a test of this file, or where else it is covered
    last: str = ""  # its last line, in a document without fences; "": it has one line
    prefix: bool = False  # comlrl -> jmarl.comlrl, mrlm -> jmarl.mrlm in imports
    model: bool = False  # the name of a model -> a tiny one
    quoted: bool = False  # <name> -> "<name>"
    indented: bool = False  # lines have the indentation of the same lines in document 000
    size: Mapping[str, str] = {}  # the size of the run
    data: Mapping[str, str] = {}  # a data set of the Hub -> its local sample
    completed: Mapping[str, str] = {}  # a skeleton is completed by named lines
    before: str = ""  # named lines that come before a fragment


TABLE = [
    Block("000", "import math", DEMO, prefix=True),
    Block("000", "train_data = {", DEMO),
    Block("000", 'model_name = "Qwen/Qwen2.5-0.5B"', DEMO, model=True),
    Block("000", "def proper_length_ratio_reward(", DEMO),
    Block("000", "config = MAGRPOConfig(", DEMO, size=DEMO_SIZE),
    Block("000", "wandb_config = {", DEMO, quoted=True),
    Block("000", "trainer.train()", DEMO),
    Block("001", "import math", FLAT_DEMO, "from comlrl.trainers.magrpo import MAGRPOConfig, MAGRPOTrainer", prefix=True),
    Block("001", "train_data = {", FLAT_DEMO, "train_dataset = Dataset.from_dict(train_data)", indented=True),
    Block("001", 'model_name = "Qwen/Qwen2.5-0.5B"', FLAT_DEMO,
          "agents = [AutoModelForCausalLM.from_pretrained(model_name) for _ in range(2)]", model=True),
    Block("001", "def proper_length_ratio_reward(", FLAT_DEMO, "return rewards", indented=True),
    Block("001", "config = MAGRPOConfig(", FLAT_DEMO, ")", indented=True, size=DEMO_SIZE),
    Block("001", "wandb_config = {", FLAT_DEMO, ")", indented=True, quoted=True),
    Block("001", "trainer.train()", FLAT_DEMO, 'trainer.save_model(f"{config.output_dir}/models")'),
    Block("002", "cd CoMLRL", NOT_OURS),
    Block("002", "def my_reward_function(completions1, completions2, batch_items=None):", GUIDE),
    Block("002", "from comlrl.utils.reward_processor import RewardProcessors", GUIDE, prefix=True),
    Block("002", "from datasets import Dataset", GUIDE),
    Block("002", "from comlrl.trainers.magrpo import MAGRPOConfig, MAGRPOTrainer", GUIDE, prefix=True, model=True,
          size=GUIDE_SIZE),
    Block("002", "# Create trainer", GUIDE),
    Block("003", "pip install comlrl", NOT_OURS),
    Block("003", "conda install -c conda-forge comlrl", NOT_OURS),
    Block("003", "git clone https://github.com/OpenMLRL/CoMLRL.git", NOT_OURS),
    Block("003", "from datasets import load_dataset", USAGE, prefix=True, model=True, data=SAMPLE,
          size={"range(128)": "range(1)", "size=1,": "size=1, num_train_epochs=1, num_generations=3, max_new_tokens=4,"}),
    Block("003", "@misc{liu2025comlrl,", NOT_OURS, "}"),
    Block("004", "# From PyPI (coming soon)", NOT_OURS, "pip install -e ."),
    Block("004", "import torch", EXAMPLE, "trainer.train(num_iterations=50)", prefix=True, model=True,
          size=EXAMPLE_SIZE),
    Block("004", "# Train from config", CLI, "mrlm train --config configs/code_generation_ppo.yaml"),
    Block("004", "# Start environment server", SERVERS, "mrlm serve --environments code,math,debate --port 50051"),
    Block("004", "# Evaluate trained model", CLI, "mrlm eval --model outputs/ppo/final --environment math --num-episodes 20"),
    Block("004", "# Collect trajectories for SFT", CLI,
          "mrlm collect --model Qwen/Qwen2.5-1.5B --environment code -n 100 -o data/trajectories.json"),
    Block("004", "# Show system info", CLI, "mrlm info"),
    Block("004", "# PPO - Most versatile, general-purpose", TRAINERS,
          "sft_trainer = SFTTrainer(policy_env, eval_envs, config)", model=True, before=COMPARISON),
    Block("004", "from mrlm.environments.code import CodeExecutionEnvironment, CodeProblemGenerator", ENVIRONMENTS,
          "env = CodeExecutionEnvironment(generator)", prefix=True),
    Block("004", "from mrlm.environments.math import MathReasoningEnvironment, MathProblemGenerator", ENVIRONMENTS,
          "env = MathReasoningEnvironment(generator)", prefix=True),
    Block("004", "from mrlm.environments.debate import DebateEnvironment, RuleBasedJudge", ENVIRONMENTS,
          "env = DebateEnvironment(judge=judge)", prefix=True),
    Block("004", "from mrlm.environments.tools import ToolUseEnvironment", ENVIRONMENTS, "env = ToolUseEnvironment(registry)",
          prefix=True),
    Block("004", "from mrlm.core import SimulatedEnvironment", CUSTOM, "        return next_observation, reward", prefix=True,
          completed=REPLIES),
    Block("004", "# Single node, 4 GPUs with FSDP", LAUNCHED, "torchrun --nproc_per_node=4 train.py --strategy fsdp"),
    Block("004", "# Multi-node, 2 nodes Γ— 4 GPUs", LAUNCHED, "    --master_addr=<node0_ip> --master_port=12355 train.py"),
    Block("004", "# Node 1:", LAUNCHED, "    --master_addr=<node0_ip> --master_port=12355 train.py"),
    Block("004", "# configs/my_experiment.yaml", YAML, '  strategy: "fsdp"', model=True,
          size={"num_epochs: 100": "num_epochs: 1", "batch_size: 16": "batch_size: 2"}),
    Block("004", "mrlm train --config configs/my_experiment.yaml", YAML, size={"mrlm": "jmarl --set max_new_tokens=4"}),
    Block("004", "mrlm train --config CONFIG [--output DIR] [--resume CHECKPOINT]", CLI),
    Block("004", "mrlm serve --environments ENV1,ENV2,... [--port PORT] [--host HOST]", SERVERS),
    Block("004", "mrlm eval --model MODEL --environment ENV [--num-episodes N] [--output FILE]", CLI),
    Block("004", "mrlm collect --model MODEL --environment ENV --num-episodes N --output FILE [--filter-reward THRESHOLD]",
          CLI),
    Block("004", "mrlm info", CLI),
    Block("004", "# See examples/quickstart/simple_ppo.py", EXAMPLES,
          "# A minimal, self-contained example showing PPO training"),
    Block("004", "# See examples/train_multi_environment.py", EXAMPLES, "# Train a generalist model on multiple task types"),
    Block("004", "# See examples/train_hybrid_sft_ppo.py", EXAMPLES, "# Best-practice two-stage training: SFT β†’ PPO"),
    Block("004", "# See examples/train_distributed_ppo.py", EXAMPLES, "# Scale to multiple GPUs with FSDP or DDP"),
    Block("004", "git clone https://github.bokerqi.top/open-tinker/MRLM.git", NOT_OURS, "pre-commit install"),
    Block("004", "pytest                          # Run all tests", NOT_OURS,
          'pytest -m "not slow"           # Skip slow tests'),
    Block("004", "black src/ tests/              # Format code", NOT_OURS, "mypy src/                      # Type checking"),
    Block("004", "@software{mrlm2024,", NOT_OURS, "}"),
]  # fmt: skip
DOCUMENTS = sorted({block.document for block in TABLE})
# Lines of a document without fences that look like code of Python, a shell or YAML.
CODE = re.compile(
    r"\s*(#|from \S+ import|import \w|def |class \w+\(|return |if .*:$|for .*:$|else:$|continue$|@\w+|[\w.]+ = |[\w.]+\("
    r"|[\])}]|\"|[a-z_]+:( .+)?$|- \w+: |(mrlm|pip|git|cd|conda|torchrun|pytest|black|ruff|mypy|pre-commit|python) )"
)


# --- reading --------------------------------------------------------------------------------------------------------------


def lines_of(document: str) -> list[str]:
    """Return the lines of a document; skip the test if it is not here."""
    paths = sorted(SEEDS.glob(f"{document}_*.txt"))
    if not paths:
        pytest.skip(f"no document {document} in {SEEDS}; set JMARL_SEEDS to the directory that holds the documents")
    return paths[0].read_text(encoding="utf-8").splitlines()


def fenced_blocks(lines: list[str]) -> list[list[str]]:
    """Return the blocks between fences, without empty lines at their beginning and end."""
    blocks: list[list[str]] = []
    inside = False
    for line in lines:
        if line.startswith("```"):
            inside = not inside
            blocks += [[]] if inside else []
        elif inside:
            blocks[-1].append(line)
    return blocks


def located(document: str) -> tuple[list[tuple[Block, list[str]]], list[str]]:
    """Return the table's blocks of a document with their lines, and the first lines of code that no block of the table has."""
    lines, blocks = lines_of(document), [block for block in TABLE if block.document == document]
    fenced = fenced_blocks(lines)
    if fenced:
        by_first = {text[0]: text for text in fenced}
        assert len(by_first) == len(fenced), "two blocks begin alike"
        return [(b, by_first.pop(b.first)) for b in blocks], list(by_first)
    pairs, rest, start = [], [], 0
    for block in blocks:
        first = next(i for i in range(start, len(lines)) if lines[i] == block.first)
        end = end_of(lines, first, block.last) if block.last else first
        rest += lines[start:first]
        pairs.append((block, [*lines[first:end], block.last or block.first]))
        start = end + 1
    return pairs, [line for line in rest + lines[start:] if CODE.match(line)]


def end_of(lines: list[str], first: int, last: str) -> int:
    """Return the index of a block's last line. In document 001 the next heading stands right behind it."""
    with_heading = re.compile(re.escape(last) + r"[A-Z][A-Za-z ]+#")
    numbers = range(first, len(lines))
    with_headings = [i for i in numbers if with_heading.fullmatch(lines[i])]
    return (with_headings or [i for i in numbers if lines[i] == last])[0]


# --- rules ----------------------------------------------------------------------------------------------------------------


def prepared(block: Block, lines: list[str], model: str) -> str:
    """Return the code of a block after its rules."""
    before = lines
    lines = indented_as_in_000(lines) if block.indented else lines
    assert not block.indented or lines != before
    text = block.before + "\n".join(lines)
    patterns = [(r"(?m)^from (comlrl|mrlm)\b", r"from jmarl.\1")] if block.prefix else []
    patterns += [(r'"Qwen/Qwen2\.5[^"]*"', repr(model))] if block.model else []
    patterns += [(r"(<[\w-]+>)", r'"\1"')] if block.quoted else []
    for pattern, new in patterns:
        text, count = re.subn(pattern, new, text)
        assert count, f"the rule {pattern} changes nothing in {text}"
    return changed(text, block.size, block.data, block.completed)


def indented_as_in_000(lines: list[str]) -> list[str]:
    """Return lines that lost their indentation with that of document 000, which has the same lines in the same order."""
    model = [line for block in fenced_blocks(lines_of("000")) for line in block if line.strip()]
    straight = [line.strip() for line in model]
    start = next(i for i in range(len(model)) if straight[i : i + len(lines)] == lines)
    return model[start : start + len(lines)]


def scripts_of(test: str, model: str) -> dict[str, str]:
    """Return the programs of the blocks of a test by name: one of the blocks of 000 to 003, one of each block of 004."""
    scripts: dict[str, list[str]] = {}
    for document in {block.document for block in TABLE if block.test == test}:
        for i, (block, lines) in enumerate(located(document)[0]):
            if block.test == test:
                scripts.setdefault(f"{document}_{i}" if document == "004" else document, []).append(
                    prepared(block, lines, model)
                )
    return {name: "\n\n".join(parts) for name, parts in scripts.items()}


def run_blocks(test: str, model: str, folder: Path) -> list[dict]:
    """Run the programs of a test, and return the names they define."""
    results = []
    for name, text in scripts_of(test, model).items():
        path = folder / f"document_{name}.py"
        path.write_text(text, encoding="utf-8")
        results.append(runpy.run_path(str(path)))
    return results


# --- tests ----------------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def in_tmp_path(tmp_path, monkeypatch):
    """Change to a temporary directory, because the documents write below the working directory."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def offline_wandb(monkeypatch):
    """W&B without a network or an account."""
    wandb = pytest.importorskip("wandb", reason="the documents log to W&B: pip install 'jmarl[wandb]'")
    wandb.teardown()  # it reads the environment once in a process
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")


@pytest.fixture(scope="module")
def model(tiny_dir) -> str:
    return tiny_model(tiny_dir)


@pytest.mark.parametrize("document", DOCUMENTS)
def test_the_table_has_every_block(document):
    pairs, missing = located(document)
    assert missing == [], "these lines of code are in no block of TABLE"
    for block, lines in pairs:
        assert lines[0] == block.first
        assert not block.last or lines[-1] == block.last
        if block.test.startswith("test_"):
            assert block.test in globals(), f"{block.test} is no test"


def test_the_quick_demo_without_indentation_is_the_same_text():
    (demo,), (flat,) = (scripts_of(test, "tiny").values() for test in (DEMO, FLAT_DEMO))
    assert flat.replace("\n\n", "\n").splitlines() == [line for line in demo.splitlines() if line.strip()]


@pytest.mark.long
def test_the_quick_demo_runs(model, tmp_path, offline_wandb):
    (names,) = run_blocks(DEMO, model, tmp_path)
    output = Path(names["config"].output_dir)
    assert len(rewards(output)) == 2 and all(0 <= reward <= 100 for reward in rewards(output))
    assert all(differs(output / "models" / f"agent_{i}", model) for i in range(2))


@pytest.mark.long
def test_the_trainer_guide_runs(model, tmp_path, offline_wandb):
    (names,) = run_blocks(GUIDE, model, tmp_path)
    assert len(rewards("my_experiment")) == 3 and all(50 <= reward <= 100 for reward in rewards("my_experiment"))
    assert names["trainer"].agents[0].tokenizer is names["tokenizer"]
    assert Path("my_experiment/final_models/agent_1/model.safetensors").is_file()


@pytest.mark.long
def test_the_usage_of_the_readme_runs(model, tmp_path, data_dir):
    (names,) = run_blocks(USAGE, model, tmp_path)
    assert len(rewards("runs/magrpo")) == 1 and names["trainer"].num_agents == 2


@pytest.mark.long
def test_the_30_second_example_runs(model, tmp_path):
    (names,) = run_blocks(EXAMPLE, model, tmp_path)
    trainer = names["trainer"]
    assert trainer.config.algorithm == "ppo" and trainer.config.loss.clip_eps_low == 0.2
    learned = np.asarray(trainer.params[0]["embed"])[0]
    assert (learned != load_file(Path(model) / "model.safetensors")["model.embed_tokens.weight"]).any()
    assert (learned == names["model"].get_input_embeddings().weight.detach().numpy()).all()  # the script's own model learned


@pytest.mark.long
def test_the_four_trainers_train(model, tmp_path):
    (names,) = run_blocks(TRAINERS, model, tmp_path)
    for name in ("ppo", "grpo", "dpo", "sft"):
        trainer = names[f"{name}_trainer"]
        assert trainer.config.algorithm == name
        before = np.array(trainer.params[0]["embed"])
        trainer.train(num_iterations=1)
        learned = (before != np.asarray(trainer.params[0]["embed"])).any()
        assert learned or name == "grpo"  # a group of wrong answers has no gradient


def test_the_environments_are_built(model, tmp_path):
    code, math, debate, tools = (names["env"] for names in run_blocks(ENVIRONMENTS, model, tmp_path))
    assert [type(env).__name__ for env in (code, math, debate, tools)] == [
        "CodeExecutionEnvironment",
        "MathReasoningEnvironment",
        "DebateEnvironment",
        "ToolUseEnvironment",
    ]
    assert len(code.tasks("train", 3)) == 3 and {t["difficulty"] for t in math.tasks("train", 50)} == {1, 2, 3}
    tool_names = ["calculator", "web_search", "python_repl", "file_system"]
    assert list(tools.registry.tools) == tool_names


@pytest.mark.long
def test_the_custom_environment_trains(model, tmp_path):
    (names,) = run_blocks(CUSTOM, model, tmp_path)
    config = ExperimentConfig(TrainingConfig(batch_size=2), max_new_tokens=4, progress=False)
    result = GRPOTrainer(LLMEnvironment(model), names["MyEnvironment"](), config).train(1)
    assert result.rewards[0] > 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:float16 is computed as bfloat16")
def test_the_yaml_file_trains(model, tmp_path, box):
    (file, text), (command, [line]) = [pair for pair in located("004")[0] if pair[0].test == YAML]
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "my_experiment.yaml").write_text(prepared(file, text, model))
    _, *flags, subcommand, option, path = prepared(command, [line], model).split()
    assert call(["jmarl", subcommand, option, path, *flags]).code == 0
    config = Path("runs/code_generation_ppo/config.yaml").read_text()
    assert "clip_eps_low: 0.2" in config and "max_new_tokens: 4" in config and len(rewards("runs/code_generation_ppo")) == 1


if __name__ == "__main__":
    for row in TABLE:
        rules = ", ".join(name for name, value in row._asdict().items() if name not in Block._fields[:4] and value)
        print(f"{row.document}  {row.first[:64]:64}  {row.test:44}  {rules}".strip())
