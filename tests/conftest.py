"""What several test files share: a compile cache, a tiny tokenizer, tiny configs and tiny Hugging Face directories.

torch is imported only by the fixtures and tests that compare with transformers.
"""

from __future__ import annotations

import contextlib
import gc
import importlib.metadata
import importlib.util
import os
import re
import resource
import shutil
import signal
import socket
import threading
import warnings
from pathlib import Path

import pytest
from jaxtyping import install_import_hook

# Check the types and shapes in annotations of the rooms of pure functions, here and in no user's run. Before they are imported.
# Not of `models.hub`, which has no arrays: a check takes longer than most of its functions.
MODELS = [f"jmarl.models.{path.stem}" for path in (Path(__file__).parents[1] / "jmarl" / "models").glob("*.py")]
MODELS += ["jmarl.models.layers"]
ROOMS_WITH_SHAPES = ["jmarl.types", "jmarl.rl", *MODELS, "jmarl.sampling", "jmarl.objectives", "jmarl.learning"]
install_import_hook(ROOMS_WITH_SHAPES, "beartype.beartype")

from jmarl.sandbox import Sandbox, SandboxUnavailable  # noqa: E402

# Most of the time of tests goes to compiling programs that run for milliseconds. They are compiled up to ten times as fast, to
# slower code: LLVM does not optimise, a program is not cut into parts, and fusions are not made by way of MLIR (which newer
# versions always do: they end the process at a flag that they do not know). `XLA_FLAGS= python -m pytest` tests what users run.
_QUICK = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true --xla_cpu_parallel_codegen_split_count=1"
if tuple(map(int, importlib.metadata.version("jaxlib").split(".")[:2])) < (0, 11):
    _QUICK += " --xla_cpu_use_fusion_emitters=false"
os.environ.setdefault("XLA_FLAGS", _QUICK)
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

from jmarl.algorithms import ALGORITHMS  # noqa: E402  (the flags come before jax)
from tests import compiled  # noqa: E402

signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started the tests in the background
gc.set_threshold(100_000, 50, 50)  # what is traced lives on: to look for garbage seldom takes a tenth off the time of tests

VOCAB = 320
SPECIAL_TOKENS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]  # ids 0, 1, 2, as in SmolLM2
CHATML = (
    "{% for m in messages %}{{'<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
TEXT = """The farmer walked to the market and the children walked with the farmer. What is the answer to the question?
There are seven apples and three pears in the basket, so there are ten pieces of fruit in the basket altogether.
def add(first, second):
    return first + second
The answer is 42. The two agents talk to each other and then the other agent answers the question of the first."""


FAST = {"rl", "config", "envs"}  # folders whose tests are marked fast, without those that train, run programs or read data
SLOWER_FIXTURES = {"box", "sandbox", "smollm2", "tiny_dir", "copy_dir", "random_agent", "data_dir"}


# mark -> words of which a file with such tests has one
WORDS_OF_MARKS = {"long": ("long",), "slow": ("slow",), "nightly": ("nightly", "product("), "soak": ("soak",)}


def pytest_ignore_collect(collection_path, config):
    """Import no files without tests of the mark that is required first, as in `-m "long and not slow"`."""
    required = config.getoption("markexpr")
    mark = "" if " or " in required else required.split(" ")[0]
    if collection_path.suffix != ".py":
        return None
    if mark == "fast":
        return collection_path.parent.name not in FAST or None
    words = WORDS_OF_MARKS.get(mark)
    return words is not None and not any(word in collection_path.read_text() for word in words) or None


def pytest_collection_modifyitems(items):
    """Mark the inner loop of a developer, `-m fast`, and spread the files of the sandbox, which wait more than they compute."""
    for item in items:
        slower = {mark.name for mark in item.iter_markers()} & {"long", "slow", "soak", "nightly"}
        slower |= SLOWER_FIXTURES & {*getattr(item, "fixturenames", ())}
        if item.path.parent.name in FAST and not re.search("train|code|workspace", item.nodeid) and not slower:
            item.add_marker("fast")
    files = dict.fromkeys(item.path for item in items)
    groups = [[file for file in files if (file.parent.name == "sandbox") == waits] for waits in (True, False)]
    place = {file: (i + 0.5) / len(group) for group in groups for i, file in enumerate(group)}
    items.sort(key=lambda item: place[item.path])


@pytest.fixture(autouse=True, scope="session")
def own_account(tmp_path_factory):
    """Records of trusted directories are those of these tests, also in the processes that they start."""
    os.environ["XDG_STATE_HOME"] = str(tmp_path_factory.mktemp("state"))


@pytest.fixture(autouse=True, scope="module")
def few_programs():
    """Forget compiled programs behind a module after which there are many. Until then modules share them."""
    yield
    maps = compiled.num_maps()
    assert maps < 0.9 * compiled.MAX_MAPS, f"{maps} memory maps: cut this module, or use programs of others"
    if maps > compiled.MANY_MAPS:
        compiled.forget()


@pytest.fixture(autouse=True, scope="module")
def known_algorithms():
    """Algorithms of a module, which settings may name too, are unknown to the others."""
    before = dict(ALGORITHMS)
    yield
    ALGORITHMS.clear()
    ALGORITHMS.update(before)


@pytest.fixture
def full_disk():
    """`with full_disk(limit):` no file may grow beyond `limit` bytes: a write fails half way, as on a full disk."""
    # Where one write of a checkpoint fails, those beside it end after the event loop that waited for them is closed: each is
    # told to standard error by the thread that wrote, in no order that a test could wait for.
    # (Until the test ends: pytest brings the filters back then.)
    warnings.filterwarnings("ignore", "Exception ignored in: None", pytest.PytestUnraisableExceptionWarning)

    @contextlib.contextmanager
    def limited(limit: int):
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return limited


def train_tokenizer():
    """A byte-level BPE tokenizer of `VOCAB` tokens that splits digits, as SmolLM2's does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB, special_tokens=SPECIAL_TOKENS, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(TEXT.splitlines(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|endoftext|>",
        chat_template=CHATML,
        clean_up_tokenization_spaces=False,
    )


@pytest.fixture(scope="session")
def make_tokenizer():
    """A function that makes a fresh tiny tokenizer, for tests that change it."""
    return train_tokenizer


@pytest.fixture(scope="session")
def tiny_tokenizer():
    """A tiny tokenizer (320 tokens, ChatML template) shared by all tests; do not change it."""
    return train_tokenizer()


@pytest.fixture(scope="session")
def random_agent():
    """`random_agent(cfg, tokenizer, seed) -> Agent`: weights larger than at initialisation, so agents and contexts differ."""
    import jax

    from jmarl.models import decoder
    from jmarl.models.hub.agents import Agent

    init_params = jax.jit(decoder.init_params, static_argnums=0)  # one program, not one per operation

    def make(cfg, tokenizer, seed):
        params = jax.device_get(init_params(cfg, jax.random.key(seed)))
        params = jax.tree_util.tree_map_with_path(lambda path, x: x if "norm" in str(path[-1]) else 8 * x, params)
        return Agent(f"random-{seed}", cfg, params, tokenizer)

    return make


@pytest.fixture(scope="session")
def tiny_config():
    """`tiny_config(family, **overrides) -> ModelConfig`; overrides are fields of `ModelConfig`."""
    from jmarl.models.config import ModelConfig

    def make(family: str = "llama", **overrides) -> ModelConfig:
        fields = dict(
            family=family, vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_layers=2, num_heads=4,
            num_kv_heads=2, head_dim=16, max_positions=128, qkv_bias=family == "qwen2", qk_norm=family == "qwen3",
        )  # fmt: skip
        return ModelConfig(**fields | overrides)

    return make


@pytest.fixture(scope="session")
def tiny_dir(tmp_path_factory, tiny_tokenizer):
    """`tiny_dir(family, dtype, max_shard_size, seed, **overrides) -> Path` of a directory written by transformers.

    Weights are random and large enough to matter, biases and norms too; overrides are fields of Hugging Face's config.
    """
    made = {}

    def make(family="llama", dtype="float32", max_shard_size="5GB", seed=0, **overrides) -> Path:
        key = repr((family, dtype, max_shard_size, seed, sorted(overrides.items())))
        if key not in made:
            made[key] = tmp_path_factory.mktemp(family)
            _write_with_transformers(made[key], family, dtype, max_shard_size, seed, overrides)
            tiny_tokenizer.save_pretrained(made[key])
        return made[key]

    return make


# Larger weights amplify rounding in recurrent layers: transformers then differs from itself by 8e-4 in logits, of 9, if
# embeddings change by 2e-7.
SCALES = {"qwen3_5_text": 0.08}


def _write_with_transformers(directory, family, dtype, max_shard_size, seed, overrides):
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    fields = dict(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=128, tie_word_embeddings=True, rms_norm_eps=1e-6,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **fields | overrides))
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(SCALES.get(family, 0.2) * torch.randn(p.shape, generator=generator) + ("norm" in name))
    model.to(getattr(torch, dtype)).save_pretrained(directory, max_shard_size=max_shard_size)


@pytest.fixture
def copy_dir(tiny_dir, tmp_path):
    """A directory of a tiny Llama that the test may spoil."""
    return Path(shutil.copytree(tiny_dir("llama"), tmp_path / "model"))


@pytest.fixture(scope="session")
def data_dir():
    """The data sets: ``JMARL_DATA``, else ``../shared/data`` beside the repository."""
    default = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("JMARL_DATA") or default)
    if not path.is_dir():
        pytest.skip(f"no data sets at {path}; set JMARL_DATA to the directory that holds them")
    return path


@pytest.fixture(scope="session")
def smollm2():
    """The real SmolLM2-135M-Instruct, for tests marked slow."""
    from jmarl.models.hub import agents as weights

    if importlib.util.find_spec(weights.SMOLLM2_PACKAGE) is None:
        pytest.skip(f"SmolLM2 is not installed: {weights.SMOLLM2_INSTALL}")
    return weights.load_agent()


@pytest.fixture(scope="module")
def box():
    """The best sandbox that this machine has; on CI it has to be S3 at least."""
    with Sandbox() as found:
        if needed := os.environ.get("JMARL_SANDBOX_AT_LEAST"):
            assert found.level >= needed, found.reasons
        yield found


@pytest.fixture(scope="module", params=["S4", "S3", "S2"])
def sandbox(request):
    """A sandbox at each level that this machine has."""
    os.environ["JMARL_TEST_SECRET"] = "1"
    try:
        with Sandbox(request.param, workers=2) as found:
            yield found
    except SandboxUnavailable as error:
        needed = os.environ.get("JMARL_SANDBOX_AT_LEAST", "S9")  # on CI S3: S2 may then be missing, S3 may not
        assert request.param != needed, error
        pytest.skip(f"level {request.param}: {error}")
    finally:
        del os.environ["JMARL_TEST_SECRET"]


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """What an attack must not reach: texts that stand for it in programs, and a list of who connected."""
    directory, reached = tmp_path_factory.mktemp("host"), []
    secret = directory / "secret.txt"
    secret.write_text("secret")
    listeners = [socket.create_server(("127.0.0.1", 0)), socket.socket(socket.AF_UNIX), socket.socket(socket.AF_UNIX)]
    listeners[1].bind(str(directory / "socket"))
    port = str(listeners[0].getsockname()[1])
    listeners[2].bind(f"\0jmarl-{port}")
    for listener in listeners:
        listener.listen()
        threading.Thread(target=_accept, args=(listener, reached), daemon=True).start()
    names = {"PORT": port, "SECRET": str(secret), "SOCKET": str(directory / "socket")}
    yield names | {"HOST": str(Path(__file__).parent)}, reached, directory
    for listener in listeners:
        listener.close()


def _accept(listener, reached):
    while True:
        try:
            reached.append(listener.accept())
        except OSError:
            return
