"""Compare twelve short runs of the working tree with the same runs of an earlier commit, on this machine.

    python tests/golden.py --before COMMIT [--only NAME …] [--strict]

A change that only moves or renames code must not change a number. This script checks that. It checks the commit out into a
temporary git worktree, runs everything in `RUNS` once with each tree, in a process of its own, and compares the results. No
expected values are stored, so another compiler or machine cannot make it fail.

Each run trains teams of tiny random models for three updates. Between them the runs use every family of algorithms, critics,
LoRA, several turns, several seeds, shared and frozen weights, two architectures, fixed data, preference rounds and a learned
reward. The script compares

- texts: everything that the reward functions and environments of this file receive, in order;
- metrics: each `metrics.jsonl` below the output directory, without the columns that measure time (`IGNORED_COLUMNS`);
- parameters: those of each stack and critic at the end, and each `.safetensors` file below the output directory.

It prints one line per run, and below the table the largest differences. The exit status is 1 if a run raises an error, texts
differ, a metric differs by more than 1e-5 (relative to max(1, |x|)), a parameter differs by more than 1e-4, or a row or array
is missing. A column that only one tree writes is listed but is no failure: check it by hand, or enter a renamed column into
`NEW_COLUMNS`, so that its values are compared. With `--strict` every difference is a failure.

Only the next part knows the interface of the library; where that of an earlier commit differs, let it try both. The two
processes share the files of the tiny models and a cache of compiled programs, which are found by their content. Programs are
compiled quickly, as in the tests; `XLA_FLAGS= python tests/golden.py …` compares what users run.
Left out: resuming a run, several devices, the command line, and the columns that count compiled programs.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

import jmarl

ROOT = Path(__file__).resolve().parent.parent
METRIC_TOLERANCE, PARAMETER_TOLERANCE = 1e-5, 1e-4
IGNORED_COLUMNS = ("time/", "tokens_per_s", "compiles")  # prefixes
# column of a metrics.jsonl at the earlier commit -> its name in the working tree
NEW_COLUMNS = {f"agent_{i}/held": f"agent_{i}/frozen" for i in range(9)}


# --- the interface of the library ---------------------------------------------------------------------------------------


def make_environment(texts: list[Any]) -> Any:
    """Return an environment of two agents that act in turn, for up to three turns, with a reward of each agent's own.

    texts: receives what is written in each step."""

    class Talk(jmarl.TextEnvironment):
        roles, reward_range, max_turns = ("first", "second"), (-2.0, 2.0), 3

        def reset(self, task: dict, rng: np.random.Generator) -> tuple[Any, list[str | None]]:
            return (0, task["prompt"]), [task["prompt"], None]

        def step(self, state: Any, messages: Sequence[str], rng: np.random.Generator) -> jmarl.Step:
            texts.append(["step", *state, *messages])
            turn, prompt = state
            text = messages[turn % 2]
            value = score(text)
            observations: list[str | None] = [None, None]
            observations[(turn + 1) % 2] = f"{prompt} {text[:8]}"
            done = turn == 2 or len(text) % 5 == 0
            return jmarl.Step((turn + 1, prompt), observations, [value, -value], done, {"length": float(len(text))})

    return Talk()


def train(training: Training, team: Any, settings: Mapping[str, Any], texts: list[Any]) -> list[Any]:
    """Return the results of one training. texts: receives what its reward and environment are given."""
    cfg, num_agents = jmarl.TrainConfig.of(**settings), len(training.models)
    if training.data:
        rows = DATA[training.data]
        data = jmarl.load_pairs(rows, num_agents) if "chosen" in rows[0] else jmarl.load_trajectories(rows)
        return [jmarl.fit(team, data, cfg, eval_data=data[:2] if training.evaluate else ())]
    reward = make_environment(texts) if training.environment else make_reward(texts)
    options: dict[str, Any] = {"eval_items": EVAL_ITEMS if training.evaluate else ()}
    if settings.get("num_turns", 1) > 1 and not training.environment:
        reward = jmarl.RewardEnvironment(reward, [jmarl.default_formatter] * num_agents, make_transition(texts))
    if training.seeds:
        return jmarl.train_seeds(team, reward, ITEMS, cfg, seeds=training.seeds, **options)
    return [jmarl.train(team, reward, ITEMS, cfg, **options)]


def final_parameters(result: Any) -> dict[str, np.ndarray]:
    """Return the trained parameters of each stack and critic by their path."""
    parts = {"stacks": result.state.stacks, "critics": result.state.critics}
    tree = {name: [stack.params for stack in stacks] for name, stacks in parts.items()}
    leaves = jax.tree_util.tree_flatten_with_path(jax.device_get(tree))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): np.asarray(leaf) for path, leaf in leaves}


# --- runs ----------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Training:
    """One call of `train`, `train_seeds` or `fit`."""

    settings: dict[str, Any]
    models: tuple[str, ...] = ("llama_0", "llama_1")  # of `MODELS`
    shared_weights: bool = False
    environment: bool = False  # train in the environment, not with a reward function
    seeds: tuple[int, ...] = ()  # train with `train_seeds`
    data: str = ""  # fit on this part of `DATA`
    evaluate: bool = False


# adam_eps, max_grad_norm: with their defaults the size of a gradient would hardly matter.
UPDATES = dict(num_updates=3, learning_rate=1e-2, adam_eps=1e-2, max_grad_norm=100.0, progress=False, save_every=0)
ROLLOUTS = UPDATES | dict(num_prompts=2, num_generations=2, max_new_tokens=6)
FIT = UPDATES | dict(batch_size=2)
TURNS = dict(num_turns=2, gamma=0.9)
LORA = dict(lora_rank=2, lora_targets="q_proj,down_proj")

RUNS: dict[str, list[Training]] = {
    "magrpo_tree": [
        Training(
            ROLLOUTS
            | TURNS
            | dict(algorithm="magrpo", branching="tree", history="append", joint_mode="cross", kl_coef=0.1, kl_target=0.01)
            | dict(entropy_coef=0.01, learning_rate=(1e-2, 2e-2), lr_schedule="cosine", warmup_updates=1, eval_generations=2),
            evaluate=True,
        )
    ],
    "dapo_dynamic": [
        Training(
            ROLLOUTS
            | dict(algorithm="dapo", ratio_level="sequence", dynamic_sampling=2, num_generations=6, max_new_tokens=16)
            | dict(num_epochs=2, num_minibatches=2, update_order="alternating", importance_cap=2.0, weight_decay=0.1, top_k=50),
            models=("llama_0", "qwen3_0"),
        )
    ],
    "rae_shared": [
        Training(
            ROLLOUTS
            | dict(algorithm="rae", num_turns=3, branching="chain", history="none", ema_decay=0.5)
            | dict(optimizer="sgd", momentum=0.9, adam_eps=1e-8),
            models=("llama_0", "llama_0"),
            shared_weights=True,
            environment=True,
        )
    ],
    "dr_mas_seeds": [
        Training(
            ROLLOUTS
            | TURNS
            | dict(algorithm="dr_mas", branching="chain", history="append", num_minibatches=2, old_logprobs="rescored"),
            seeds=(3, 0),
        )
    ],
    "remax_frozen": [  # lion's signs and bfloat16: rounding alone can change this one
        Training(
            ROLLOUTS
            | TURNS
            | dict(algorithm="remax", branching="tree", history="none", frozen_agents=(0,), micro_batches=2, chat=True)
            | dict(advantage_scale="running_std", compute_dtype="bfloat16", learning_rate=1e-3)
            | dict(optimizer="lion", adam_eps=1e-8),
            models=("llama_0", "llama_1", "qwen3_0"),
        )
    ],
    "c3": [
        Training(
            ROLLOUTS
            | TURNS
            | LORA
            | dict(algorithm="c3", history="append", num_generations=3, per_agent="vmap", kl_coef=0.1, kl_in="reward"),
            models=("llama_0", "llama_0"),
        )
    ],
    "ippo_critics": [
        Training(
            ROLLOUTS
            | TURNS
            | dict(algorithm="ippo", branching="chain", history="none", num_generations=4, num_epochs=2, num_minibatches=2)
            | dict(
                value_clip=0.2,
                target_kl=0.5,
                max_grad_norm=(1.0, 2.0),
                critic_learning_rate=2e-2,
                loss_aggregation="sequence_mean",
            ),
        )
    ],
    "ppo_head_lora": [
        Training(
            ROLLOUTS
            | LORA
            | dict(algorithm="ppo", separate_critic=False, value_coef=0.3, lora_dropout=0.2, kl_coef=0.1, kl_in="reward")
            | dict(num_generations=4, num_epochs=2, dual_clip=3.0),
            models=("llama_0",),
        )
    ],
    "mappo_lora_seeds": [
        Training(
            ROLLOUTS | TURNS | LORA | dict(algorithm="mappo", branching="chain", history="append", per_agent="vmap"),
            models=("llama_0", "llama_0"),
            seeds=(0, 5),
            evaluate=True,
        )
    ],
    "sft_and_dpo": [
        Training(FIT | dict(algorithm="sft", world_model_weight=0.5), models=("llama_0",), data="texts", evaluate=True),
        Training(FIT | dict(algorithm="dpo", label_smoothing=0.1), models=("llama_0",), data="pairs", evaluate=True),
    ],
    "madpo_and_rounds": [
        Training(FIT | dict(algorithm="madpo", preference_loss="ipo"), models=("llama_0", "qwen3_0"), data="joint_pairs"),
        Training(
            ROLLOUTS
            | dict(algorithm="madpo_iter", batch_size=4, num_generations=4, round_updates=1, comparator="history")
            | dict(replay="lambda_decay")
        ),
    ],
    "learned_reward": [
        Training(FIT | dict(algorithm="reward_model"), models=("llama_0",), data="pairs", evaluate=True),
        Training(
            ROLLOUTS
            | dict(algorithm="marlhf", rl_algorithm="maac", critic_type="q", num_generations=4, batch_size=4, reward_updates=3)
            | dict(reward_learning_rate=1e-2)
        ),
    ],
}

ITEMS = [{"prompt": text} for text in ("The answer", "seven apples and three pears", "is", "of fruit", "flat", "two agents")]
EVAL_ITEMS = [{"prompt": text} for text in ("The market", "ten pieces")]
PAIRS = [
    {"prompt": "The answer", "chosen": " is 42.", "rejected": " is a pear."},
    {"prompt": "seven apples", "chosen": " and three pears", "rejected": " altogether"},
    {"prompt": "The farmer", "chosen": " walked.", "rejected": " answers."},
    {"prompt": "def add", "chosen": "(first, second):", "rejected": "two agents"},
]
DATA: dict[str, list[dict]] = {
    "pairs": PAIRS,
    "joint_pairs": [
        {"prompt": p["prompt"], "chosen": [p["chosen"], " agents"], "rejected": [" so", p["rejected"]]} for p in PAIRS
    ],
    "texts": [
        {"observations": ["The question", "and then", "it is"], "actions": ["what is", " seven"], "rewards": [0, 1]},
        {"prompt": "The basket", "completion": " has ten pears"},
        {"prompt": "The children", "completion": " walked to the market"},
    ],
}


def score(*texts: str) -> float:
    """Return a number in [-1, 1) that hardly two joint actions share."""
    return sum(place * ord(letter) for text in texts for place, letter in enumerate(text, 1)) % 97 / 48.5 - 1


def make_reward(texts: list[Any]) -> Callable[..., list[float]]:
    """Return a reward function; texts receives what it is called with."""

    def reward(*completions: Sequence[str], prompts: Sequence[str]) -> list[float]:
        texts.append(["reward", list(prompts), *map(list, completions)])
        joint = zip(*completions, strict=True)
        return [0.5 if prompt.startswith("flat") else score(*action) for prompt, action in zip(prompts, joint, strict=True)]

    return reward


def make_transition(texts: list[Any]) -> Callable[..., list[str]]:
    """Return a function that writes the prompts of a next turn; texts receives what it is called with."""

    def transition(prompt: str, agent_completions: Sequence[str], prompt_history_per_agent: Any, **_: Any) -> list[str]:
        texts.append(["transition", prompt, *agent_completions, prompt_history_per_agent])
        return [f"{prompt[:5]} {text[:8]} {n}" for n, text in enumerate(reversed(agent_completions))]

    return transition


def run_training(training: Training, models: Path, directory: Path) -> tuple[list[Any], dict[str, np.ndarray]]:
    """Run one training, which writes to directory. Return its texts and final parameters."""
    texts: list[Any] = []
    team = jmarl.Team.load([str(models / name) for name in training.models], shared_weights=training.shared_weights)
    results = train(training, team, training.settings | {"output_dir": str(directory)}, texts)
    parameters = {
        f"{number}/{path}": array for number, result in enumerate(results) for path, array in final_parameters(result).items()
    }
    return texts, parameters


# --- the process of one tree ---------------------------------------------------------------------------------------------


def record(tree: Path, models: Path, directory: Path, names: Sequence[str]) -> None:
    """Run the named runs with the tree that PYTHONPATH names; write what is compared to `NAME.json` and `NAME.npz`."""
    if not Path(jmarl.__file__).is_relative_to(tree):
        raise ImportError(f"jmarl was imported from {jmarl.__file__} in place of {tree}")
    for name in names:
        start, texts, parameters, error = time.monotonic(), [], {}, ""
        try:
            for number, training in enumerate(RUNS[name]):
                outputs = directory / name / str(number)
                new_texts, arrays = run_training(training, models, outputs)
                texts += new_texts
                parameters |= {f"{number}/state/{path}": array for path, array in arrays.items()}
                jax.clear_caches()
        except Exception:  # reported with the other runs
            error = traceback.format_exc()
        outputs = directory / name
        rows = {str(path.parent.relative_to(outputs)): read_rows(path) for path in sorted(outputs.rglob("metrics.jsonl"))}
        parameters |= read_tensors(outputs)
        result = {"texts": texts, "rows": rows, "error": error, "seconds": time.monotonic() - start}
        (directory / f"{name}.json").write_text(json.dumps(result))
        np.savez(directory / f"{name}.npz", **parameters)
        print(f"  {name}: {result['seconds']:.0f} s{', failed' if error else ''}", file=sys.stderr, flush=True)


def read_rows(path: Path) -> list[dict[str, float]]:
    """Return the rows of a metrics.jsonl without the columns that measure time."""
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: float(x) for k, x in row.items() if not k.startswith(IGNORED_COLUMNS)} for row in rows]


def read_tensors(directory: Path) -> dict[str, np.ndarray]:
    """Return the arrays of all safetensors files below a directory."""
    from safetensors.numpy import load_file

    files = sorted(directory.rglob("*.safetensors"))
    return {f"{path.relative_to(directory)}/{k}": x for path in files for k, x in load_file(path).items()}


# --- tiny models ---------------------------------------------------------------------------------------------------------

MODELS = {"llama_0": ("llama", 0), "llama_1": ("llama", 1), "qwen3_0": ("qwen3", 2)}  # name -> architecture, seed
VOCABULARY = 320
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CORPUS = """The farmer walked to the market and the children walked with the farmer. What is the answer to the question?
There are seven apples and three pears in the basket, so there are ten pieces of fruit in the basket altogether."""


def write_models(directory: Path) -> None:
    """Write the tiny models as Hugging Face directories, so that each tree loads them by its own means."""
    from safetensors.numpy import save_file

    tokenizer = train_tokenizer()
    for name, (family, seed) in MODELS.items():
        width, layers = (32, 2) if family == "llama" else (24, 1)
        config = dict(
            model_type=family, vocab_size=VOCABULARY, hidden_size=width, intermediate_size=2 * width, num_hidden_layers=layers,
            num_attention_heads=4, num_key_value_heads=2, head_dim=8, max_position_embeddings=256, tie_word_embeddings=True,
            rms_norm_eps=1e-6, bos_token_id=1, eos_token_id=2, pad_token_id=0,
        )  # fmt: skip
        tokenizer.save_pretrained(directory / name)
        (directory / name / "config.json").write_text(json.dumps(config))
        rng = np.random.default_rng(seed)
        weights = {
            weight: (0.2 * rng.standard_normal(shape) + ("norm" in weight)).astype(np.float32)
            for weight, shape in weight_shapes(family, width, layers).items()
        }
        weights["model.embed_tokens.weight"][2] *= 3  # so that some completions end early
        save_file(weights, directory / name / "model.safetensors", metadata={"format": "pt"})


def weight_shapes(family: str, width: int, layers: int) -> dict[str, tuple[int, ...]]:
    """Return the shape of each weight by its name in Hugging Face's format."""
    shapes = {
        "self_attn.q_proj.weight": (32, width),
        "self_attn.k_proj.weight": (16, width),
        "self_attn.v_proj.weight": (16, width),
        "self_attn.o_proj.weight": (width, 32),
        "mlp.gate_proj.weight": (2 * width, width),
        "mlp.up_proj.weight": (2 * width, width),
        "mlp.down_proj.weight": (width, 2 * width),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    if family == "qwen3":
        shapes |= {"self_attn.q_norm.weight": (8,), "self_attn.k_norm.weight": (8,)}
    in_layers = {f"model.layers.{layer}.{name}": shape for layer in range(layers) for name, shape in shapes.items()}
    return in_layers | {"model.embed_tokens.weight": (VOCABULARY, width), "model.norm.weight": (width,)}


def train_tokenizer() -> Any:
    """Return a byte-level BPE tokenizer of `VOCABULARY` tokens with a chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(CORPUS.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=special[1], eos_token=special[2], pad_token=special[0], chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )  # fmt: skip


# --- comparison ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Comparison:
    """The differences of one run between the two trees."""

    texts_equal: bool
    only_before: list[str]  # columns
    only_after: list[str]
    metric_relative: float = 0.0
    metric_absolute: float = 0.0
    parameters: float = 0.0
    equal: bool = True  # bit for bit
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def failed(self) -> bool:
        """Whether a difference is beyond the tolerances; NaN is."""
        within = self.metric_relative <= METRIC_TOLERANCE and self.parameters <= PARAMETER_TOLERANCE
        return not (self.texts_equal and within)


def compare(name: str, before: Path, after: Path) -> Comparison:
    """Compare what the two trees recorded of one run."""
    old, new = (json.loads((directory / f"{name}.json").read_text()) for directory in (before, after))
    result = Comparison(old["texts"] == new["texts"], [], [])
    for side, recorded in (("before", old), ("after", new)):
        if recorded["error"]:
            result.notes.append(f"{side}: {recorded['error'].strip()}")
    if not result.texts_equal:
        result.notes.append(first_difference(old["texts"], new["texts"]))
    compare_rows(old["rows"], new["rows"], result)
    with np.load(before / f"{name}.npz") as old_arrays, np.load(after / f"{name}.npz") as new_arrays:
        compare_parameters(old_arrays, new_arrays, result)
    failed = bool(old["error"] or new["error"])
    result.equal = result.equal and result.texts_equal and not (result.only_before or result.only_after or failed)
    result.metric_relative = np.inf if failed else result.metric_relative
    return result


def first_difference(before: Sequence[Any], after: Sequence[Any]) -> str:
    """Return a line about the first text that differs."""
    for number, (x, y) in enumerate(zip(before, after, strict=False)):
        if x != y:
            return f"text {number} of {len(before)} is the first to differ: {x!r:.300} -> {y!r:.300}"
    return f"{len(before)} texts before, {len(after)} after; the first are equal"


def compare_rows(before: Mapping[str, list], after: Mapping[str, list], result: Comparison) -> None:
    """Compare the metrics of all directories, row by row."""
    columns: tuple[set[str], set[str]] = set(), set()
    worst = ""
    for directory in sorted({*before, *after}):
        old, new = (by_updates(rows.get(directory, [])) for rows in (before, after))
        if len(old) != len(new):
            result.metric_relative, result.equal = np.inf, False
            result.notes.append(f"{directory}/metrics.jsonl has {len(old)} rows before, {len(new)} after")
        for number, (x, y) in enumerate(zip(old, new, strict=False)):
            x = {NEW_COLUMNS.get(column, column): value for column, value in x.items()}
            columns[0].update(x.keys() - y.keys())
            columns[1].update(y.keys() - x.keys())
            for column in x.keys() & y.keys():
                absolute = difference(x[column], y[column])
                relative = absolute / max(1.0, abs(x[column])) if np.isfinite(absolute) else absolute
                result.metric_absolute = max(result.metric_absolute, absolute)
                if relative > result.metric_relative:
                    result.metric_relative = relative
                    worst = f"metric {column} of row {number} in {directory}: {x[column]!r} -> {y[column]!r}"
    result.only_before, result.only_after = sorted(columns[0]), sorted(columns[1])
    result.equal = result.equal and result.metric_absolute == 0
    result.notes += [worst] if worst else []


def by_updates(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return rows whose step is the number of updates, also those of trees that count steps from 0."""
    first = next((row["step"] for row in rows if "eval/updates" not in row), 1)
    return rows if first else [row | {"step": row.get("eval/updates", row["step"] + 1)} for row in rows]


def compare_parameters(before: Mapping[str, np.ndarray], after: Mapping[str, np.ndarray], result: Comparison) -> None:
    """Compare all arrays; one that is missing, or has another shape or type, is infinitely far away."""
    worst = ""
    for name in sorted({*before, *after}):
        x, y = before.get(name), after.get(name)
        if x is None or y is None or x.shape != y.shape or x.dtype != y.dtype:
            distance, change = np.inf, " -> ".join("missing" if z is None else f"{z.dtype}{list(z.shape)}" for z in (x, y))
        else:
            equal = (x == y) | ((x != x) & (y != y))
            distance = 0.0 if equal.all() else max(map(difference, x[~equal].ravel().tolist(), y[~equal].ravel().tolist()))
            change = f"{distance:.3g}"
        if distance > result.parameters:
            result.parameters, worst = distance, f"parameters {name}: {change}"
    result.equal = result.equal and result.parameters == 0
    result.notes += [worst] if worst else []


def difference(x: float, y: float) -> float:
    """Return |x - y|: 0 for two equal infinities or two NaN, infinite where one of them is not finite."""
    if x == y or (x != x and y != y):
        return 0.0
    return abs(x - y) if np.isfinite(x) and np.isfinite(y) else np.inf


def table(results: Mapping[str, Comparison], strict: bool) -> str:
    """Return one line per run, and below it notes on those that differ."""
    rows = [("run", "texts", "columns before/after", "metrics rel", "metrics abs", "parameters", "bit-equal", "")]
    for name, r in results.items():
        columns = f"{len(r.only_before)}/{len(r.only_after)}"
        numbers = (f"{x:.1e}" if x else "0" for x in (r.metric_relative, r.metric_absolute, r.parameters))
        failed = r.failed or (strict and not r.equal)
        texts = "equal" if r.texts_equal else "DIFFER"
        rows.append((name, texts, columns, *numbers, "yes" if r.equal else "no", "FAILED" if failed else "ok"))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]
    for name, r in results.items():
        lines += [f"{name}: columns only before: {', '.join(r.only_before)}"] if r.only_before else []
        lines += [f"{name}: columns only after: {', '.join(r.only_after)}"] if r.only_after else []
        lines += [f"{name}: {note}" for note in r.notes]
    return "\n".join(lines)


# --- both trees ----------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def worktree(commit: str, directory: Path) -> Iterator[Path]:
    """Check a commit out into a directory as long as the context lasts."""
    git = ["git", "-C", str(ROOT), "worktree"]
    subprocess.run([*git, "add", "--quiet", "--detach", str(directory), commit], check=True)
    try:
        yield directory
    finally:
        subprocess.run([*git, "remove", "--force", str(directory)], check=True)


def environment_of(tree: Path) -> dict[str, str]:
    """Return the environment variables of a tree's process."""
    name = hashlib.sha256(str(ROOT).encode()).hexdigest()[:8]  # a clone has its own: jax writes into it without a lock
    cache = Path(tempfile.gettempdir()) / f"jmarl-golden-compile-cache-{os.getuid()}-{name}"
    flags = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    flags += " --xla_cpu_parallel_codegen_split_count=1"
    if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):  # newer versions do not know this flag
        flags += " --xla_cpu_use_fusion_emitters=false"
    defaults = {
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": "-1",
        "TOKENIZERS_PARALLELISM": "false",
        "XLA_FLAGS": flags,
    }
    return {**defaults, **os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(tree)}


def play(label: str, tree: Path, models: Path, directory: Path, names: Sequence[str]) -> None:
    """Run the named runs in a new process that imports a tree."""
    start = time.monotonic()
    print(f"{label}: {tree}", file=sys.stderr, flush=True)
    directory.mkdir()
    script = [sys.executable, "-P", str(Path(__file__).resolve()), "--record", str(tree), str(models), str(directory)]
    subprocess.run([*script, "--only", *names], check=True, cwd=directory, env=environment_of(tree))
    print(f"{label}: {time.monotonic() - start:.0f} s", file=sys.stderr, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    action = parser.add_mutually_exclusive_group(required=True)
    action.add_argument("--before", metavar="COMMIT", help="commit that the working tree is compared with")
    action.add_argument("--record", nargs=3, type=Path, help=argparse.SUPPRESS)  # tree, models, directory
    parser.add_argument("--only", nargs="+", metavar="NAME", choices=RUNS, default=list(RUNS), help=f"of {', '.join(RUNS)}")
    parser.add_argument("--strict", action="store_true", help="fail unless all is equal bit for bit")
    arguments = parser.parse_args()
    if arguments.record:
        record(*arguments.record, arguments.only)
        return 0
    with tempfile.TemporaryDirectory(prefix="jmarl-golden-") as name:
        directory = Path(name).resolve()
        models, before, after = directory / "models", directory / "before", directory / "after"
        write_models(models)
        with worktree(arguments.before, directory / "tree") as tree:
            play("before", tree, models, before, arguments.only)
        play("after", ROOT, models, after, arguments.only)
        results = {run: compare(run, before, after) for run in arguments.only}
    print(table(results, arguments.strict))
    return int(any(r.failed or (arguments.strict and not r.equal) for r in results.values()))


if __name__ == "__main__":
    sys.exit(main())
