"""Which options clients may set: none lets them read a file or directory of the server, or make it connect elsewhere."""

from __future__ import annotations

import inspect
import json
from typing import Literal

import grpc
import pytest

from jmarl import Step, TextEnvironment
from jmarl.envs import ENVIRONMENTS, OTHER_NAMES, constructor_options, import_object
from jmarl.envs.options import GENERAL
from jmarl.remote import environments_pb2 as pb
from jmarl.remote import values
from jmarl.remote.catalog import CatalogEntry, Offer
from jmarl.remote.options import FREE_TEXTS, is_of_files, problem_of
from tests.remote.served import SUM, Client, refused, running

Code = grpc.StatusCode
PLACES = ENVIRONMENTS | OTHER_NAMES
SECRET = "hunter2"


class Styled(TextEnvironment):
    """Names the texts of one option, and none of the others."""

    roles, reward_range, max_turns = ("agent",), (0.0, 1.0), 1

    def __init__(self, style: Literal["short", "long"] | None = "short", file: str = "", fd: int = 0):
        self.style, self.file = style, file

    def reset(self, task, rng):
        return {}, [self.style]

    def step(self, state, messages, rng):
        return Step(state, [], 0.0, True)


STYLED = f"{__name__}:Styled"


@pytest.fixture(scope="module")
def client():
    offer = Offer({name: CatalogEntry(name) for name in PLACES} | {SUM: CatalogEntry(SUM), STYLED: CatalogEntry(STYLED)}, {})
    offer.environments["listed"] = CatalogEntry(STYLED, client_options=["file"])
    with running(offer) as server, Client(server.address) as client:
        yield client


def describe(client, environment, options):
    request = pb.TasksRequest(environment=environment, options=values.to_map(options, "options"), split="train", count=2)
    return client.call("Tasks", request)


@pytest.fixture
def planted(tmp_path, monkeypatch):
    """A working directory with files and directories whose content and names no client may read."""
    rows = json.dumps({"question": SECRET, "answer": SECRET, "motion": SECRET, "prompt": SECRET})
    for name in ("secrets", "gsm8k"):
        (tmp_path / name).write_text(f"{rows}\n{SECRET}")
    (tmp_path / "rows").write_text(rows)
    (tmp_path / "secretdir").mkdir()
    (tmp_path / "secretdir" / SECRET).write_text("x")
    monkeypatch.chdir(tmp_path)


ALL = sorted({(name, option) for name, place in PLACES.items() for option in constructor_options(import_object(place))}
             | {(name, option) for name in PLACES for option in (*GENERAL, "servers", "timeout")})  # fmt: skip


@pytest.mark.parametrize("environment", PLACES)
def test_no_option_of_a_client_reads_a_file_or_directory_of_the_server(client, planted, environment):
    for option in [option for name, option in ALL if name == environment]:
        for value in ("secrets", "rows", "secretdir", "missing", ["secrets"], {"path": "secrets"}, {"address": "secrets"}):
            if option in FREE_TEXTS and not isinstance(value, str):
                continue  # words that are looked for in texts
            with refused(Code.INVALID_ARGUMENT, f"does not take the option '{option}'", exclude=(SECRET, "secretdir", "Errno")):
                describe(client, environment, {option: value})


@pytest.mark.parametrize(
    "options", [{"data": "gsm8k", "data_path": "secrets"}, {"data": "gsm8k", "data_path": 0}, {"problems": 0},
                {"problems": ["secrets"]}, {"servers": {"address": ["x"]}}, {"servers": None}]
)  # fmt: skip
def test_nor_do_several_together_or_values_of_other_types(client, planted, options):
    with refused(Code.INVALID_ARGUMENT, "does not take the option", exclude=(SECRET, "Errno")):
        describe(client, "math", options)


@pytest.mark.parametrize(
    ("environment", "options"),
    [(SUM, {"path": "secrets"}), (SUM, {"path": ["secrets"]}), (SUM, {"path": {"../x": 1}}), (STYLED, {"file": "secrets"}),
     (STYLED, {"style": "secrets"}), (STYLED, {"problems": "secrets"}), ("listed", {"file": "/etc/passwd"}),
     ("listed", {"style": "long"}), (STYLED, {"servers": "secrets"})],
)  # fmt: skip
def test_nor_do_options_of_classes_of_the_user(client, planted, environment, options):
    with refused(Code.INVALID_ARGUMENT, "does not take the option"):
        describe(client, environment, options)


@pytest.mark.parametrize(
    ("environment", "options"),
    [(STYLED, {"style": "long"}), ("listed", {"file": "name"}), ("code", {"feedback": "passed"}), ("code", {"timeout": 3.0}),
     ("function_calling", {"sharing": "self_select"}), ("math", {"difficulty_range": [1, 2], "max_turns": 3}),
     ("math", {"problems": [{"question": "1 + 1?", "answer": "2"}]}), ("arxiv", {"stop_words": ["the"]}),
     ("math", {"reward_scale": 5000}), ("math", {"data": None})],
)  # fmt: skip
def test_numbers_and_texts_that_are_named_are_taken(client, environment, options):
    client.call("Describe", pb.DescribeRequest(environment=environment, options=values.to_map(options, "options")))


@pytest.mark.parametrize(
    ("environment", "options", "text"),
    [("code", {"num_agents": 300_000}, "at most 1000"), ("debate", {"speeches": 10**7}, "at most 1000"),
     ("code", {"limits": {"wall_s": 1e6}}, "whoever serves sets the limits"), ("code", {"timeout": 1e5}, "at most 600"),
     ("code", {"timeout": True}, "give seconds"), ("math", {"problems": [{}] * 10_001}, "too many"),
     ("math", {"problems": [{"question": "x" * 5_000_000}]}, "bytes as JSON are too many")],
)  # fmt: skip
def test_counts_and_times_are_bounded(client, environment, options, text):
    with refused(Code.INVALID_ARGUMENT, text):
        client.call("Describe", pb.DescribeRequest(environment=environment, options=values.to_map(options, "options")))


def test_values_that_the_server_has_set_cannot_be_guessed_where_they_are_texts():
    offer = Offer({"math": CatalogEntry("math"), STYLED: CatalogEntry(STYLED, {"file": SECRET})}, {})
    with running(offer) as server, Client(server.address) as client:
        sentences = []
        for guess in (SECRET, "other"):
            with pytest.raises(grpc.RpcError) as error:
                describe(client, STYLED, {"file": guess})
            sentences.append(error.value.details().partition("(request")[0])
        assert sentences[0] == sentences[1]
        with refused(Code.INVALID_ARGUMENT, "give gsm8k, svamp (request"):
            describe(client, "math", {"data": "humaneval"})


def test_every_option_that_may_be_a_path_is_known_by_its_annotation():
    for name, place in PLACES.items():
        for base in import_object(place).__mro__:
            parameters = inspect.signature(base.__init__).parameters if "__init__" in vars(base) else {}
            for option in parameters:
                if "path" in option or option in ("file", "servers"):
                    assert problem_of(name, option, "secrets", True, 600.0) and problem_of(name, option, 0, True, 600.0)


def test_errors_of_reading_a_file_are_known_by_what_they_came_from():
    try:
        try:
            json.loads(SECRET)
        except ValueError as error:
            raise ValueError(f"line 1: {SECRET}") from error
    except ValueError as error:
        assert is_of_files(error) and not is_of_files(ValueError("dificulty_range"))
    assert is_of_files(FileNotFoundError(2, "x"))
