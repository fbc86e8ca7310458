from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Value(_message.Message):
    __slots__ = ("null", "boolean", "integer", "big_integer", "number", "text", "list", "map", "tuple")
    NULL_FIELD_NUMBER: _ClassVar[int]
    BOOLEAN_FIELD_NUMBER: _ClassVar[int]
    INTEGER_FIELD_NUMBER: _ClassVar[int]
    BIG_INTEGER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    LIST_FIELD_NUMBER: _ClassVar[int]
    MAP_FIELD_NUMBER: _ClassVar[int]
    TUPLE_FIELD_NUMBER: _ClassVar[int]
    null: bool
    boolean: bool
    integer: int
    big_integer: str
    number: float
    text: str
    list: List
    map: Map
    tuple: List
    def __init__(self, null: _Optional[bool] = ..., boolean: _Optional[bool] = ..., integer: _Optional[int] = ..., big_integer: _Optional[str] = ..., number: _Optional[float] = ..., text: _Optional[str] = ..., list: _Optional[_Union[List, _Mapping]] = ..., map: _Optional[_Union[Map, _Mapping]] = ..., tuple: _Optional[_Union[List, _Mapping]] = ...) -> None: ...

class List(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedCompositeFieldContainer[Value]
    def __init__(self, values: _Optional[_Iterable[_Union[Value, _Mapping]]] = ...) -> None: ...

class Map(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[Entry]
    def __init__(self, entries: _Optional[_Iterable[_Union[Entry, _Mapping]]] = ...) -> None: ...

class Entry(_message.Message):
    __slots__ = ("key", "value")
    KEY_FIELD_NUMBER: _ClassVar[int]
    VALUE_FIELD_NUMBER: _ClassVar[int]
    key: str
    value: Value
    def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Value, _Mapping]] = ...) -> None: ...

class Observation(_message.Message):
    __slots__ = ("absent", "text", "messages")
    ABSENT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    absent: bool
    text: str
    messages: Chat
    def __init__(self, absent: _Optional[bool] = ..., text: _Optional[str] = ..., messages: _Optional[_Union[Chat, _Mapping]] = ...) -> None: ...

class Chat(_message.Message):
    __slots__ = ("messages",)
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class Fault(_message.Message):
    __slots__ = ("reason",)
    REASON_FIELD_NUMBER: _ClassVar[int]
    reason: str
    def __init__(self, reason: _Optional[str] = ...) -> None: ...

class ListRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListReply(_message.Message):
    __slots__ = ("names", "rewards", "version")
    NAMES_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    rewards: _containers.RepeatedCompositeFieldContainer[ServedReward]
    version: str
    def __init__(self, names: _Optional[_Iterable[str]] = ..., rewards: _Optional[_Iterable[_Union[ServedReward, _Mapping]]] = ..., version: _Optional[str] = ...) -> None: ...

class ServedReward(_message.Message):
    __slots__ = ("name", "is_async", "fingerprint")
    NAME_FIELD_NUMBER: _ClassVar[int]
    IS_ASYNC_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    name: str
    is_async: bool
    fingerprint: str
    def __init__(self, name: _Optional[str] = ..., is_async: _Optional[bool] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class DescribeRequest(_message.Message):
    __slots__ = ("environment", "options", "num_turns")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    environment: str
    options: Map
    num_turns: int
    def __init__(self, environment: _Optional[str] = ..., options: _Optional[_Union[Map, _Mapping]] = ..., num_turns: _Optional[int] = ...) -> None: ...

class DescribeReply(_message.Message):
    __slots__ = ("roles", "lowest_reward", "highest_reward", "max_turns", "data_sets", "special_tokens", "class_name", "description", "fingerprint", "sandbox", "limits")
    ROLES_FIELD_NUMBER: _ClassVar[int]
    LOWEST_REWARD_FIELD_NUMBER: _ClassVar[int]
    HIGHEST_REWARD_FIELD_NUMBER: _ClassVar[int]
    MAX_TURNS_FIELD_NUMBER: _ClassVar[int]
    DATA_SETS_FIELD_NUMBER: _ClassVar[int]
    SPECIAL_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CLASS_NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    SANDBOX_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    roles: _containers.RepeatedScalarFieldContainer[str]
    lowest_reward: float
    highest_reward: float
    max_turns: int
    data_sets: _containers.RepeatedScalarFieldContainer[str]
    special_tokens: _containers.RepeatedScalarFieldContainer[str]
    class_name: str
    description: Map
    fingerprint: str
    sandbox: str
    limits: Limits
    def __init__(self, roles: _Optional[_Iterable[str]] = ..., lowest_reward: _Optional[float] = ..., highest_reward: _Optional[float] = ..., max_turns: _Optional[int] = ..., data_sets: _Optional[_Iterable[str]] = ..., special_tokens: _Optional[_Iterable[str]] = ..., class_name: _Optional[str] = ..., description: _Optional[_Union[Map, _Mapping]] = ..., fingerprint: _Optional[str] = ..., sandbox: _Optional[str] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("sessions", "message_bytes", "batch", "idle_seconds")
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    IDLE_SECONDS_FIELD_NUMBER: _ClassVar[int]
    sessions: int
    message_bytes: int
    batch: int
    idle_seconds: float
    def __init__(self, sessions: _Optional[int] = ..., message_bytes: _Optional[int] = ..., batch: _Optional[int] = ..., idle_seconds: _Optional[float] = ...) -> None: ...

class TasksRequest(_message.Message):
    __slots__ = ("environment", "options", "split", "count", "seed", "first")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    SPLIT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    FIRST_FIELD_NUMBER: _ClassVar[int]
    environment: str
    options: Map
    split: str
    count: int
    seed: int
    first: int
    def __init__(self, environment: _Optional[str] = ..., options: _Optional[_Union[Map, _Mapping]] = ..., split: _Optional[str] = ..., count: _Optional[int] = ..., seed: _Optional[int] = ..., first: _Optional[int] = ...) -> None: ...

class TasksReply(_message.Message):
    __slots__ = ("tasks", "total")
    TASKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    tasks: _containers.RepeatedCompositeFieldContainer[Map]
    total: int
    def __init__(self, tasks: _Optional[_Iterable[_Union[Map, _Mapping]]] = ..., total: _Optional[int] = ...) -> None: ...

class ResetRequest(_message.Message):
    __slots__ = ("environment", "options", "task", "seed", "request_id", "num_turns", "fingerprint")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    NUM_TURNS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    environment: str
    options: Map
    task: Map
    seed: int
    request_id: str
    num_turns: int
    fingerprint: str
    def __init__(self, environment: _Optional[str] = ..., options: _Optional[_Union[Map, _Mapping]] = ..., task: _Optional[_Union[Map, _Mapping]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ..., num_turns: _Optional[int] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class ResetReply(_message.Message):
    __slots__ = ("start", "fault")
    START_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    start: Start
    fault: Fault
    def __init__(self, start: _Optional[_Union[Start, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class Start(_message.Message):
    __slots__ = ("session", "observations")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    session: str
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    def __init__(self, session: _Optional[str] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ...) -> None: ...

class ObserveRequest(_message.Message):
    __slots__ = ("session",)
    SESSION_FIELD_NUMBER: _ClassVar[int]
    session: str
    def __init__(self, session: _Optional[str] = ...) -> None: ...

class ObserveReply(_message.Message):
    __slots__ = ("step", "done", "observations")
    STEP_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    step: int
    done: bool
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    def __init__(self, step: _Optional[int] = ..., done: _Optional[bool] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("session", "step", "messages", "seed", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    step: int
    messages: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    request_id: str
    def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ..., messages: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class StepReply(_message.Message):
    __slots__ = ("step", "fault")
    STEP_FIELD_NUMBER: _ClassVar[int]
    FAULT_FIELD_NUMBER: _ClassVar[int]
    step: Result
    fault: Fault
    def __init__(self, step: _Optional[_Union[Result, _Mapping]] = ..., fault: _Optional[_Union[Fault, _Mapping]] = ...) -> None: ...

class Result(_message.Message):
    __slots__ = ("step", "observations", "reward", "done", "truncated", "info", "parts")
    STEP_FIELD_NUMBER: _ClassVar[int]
    OBSERVATIONS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    INFO_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    step: int
    observations: _containers.RepeatedCompositeFieldContainer[Observation]
    reward: Value
    done: bool
    truncated: bool
    info: Map
    parts: Map
    def __init__(self, step: _Optional[int] = ..., observations: _Optional[_Iterable[_Union[Observation, _Mapping]]] = ..., reward: _Optional[_Union[Value, _Mapping]] = ..., done: _Optional[bool] = ..., truncated: _Optional[bool] = ..., info: _Optional[_Union[Map, _Mapping]] = ..., parts: _Optional[_Union[Map, _Mapping]] = ...) -> None: ...

class Error(_message.Message):
    __slots__ = ("code", "message")
    CODE_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    code: int
    message: str
    def __init__(self, code: _Optional[int] = ..., message: _Optional[str] = ...) -> None: ...

class BatchResetRequest(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[ResetRequest]
    def __init__(self, calls: _Optional[_Iterable[_Union[ResetRequest, _Mapping]]] = ...) -> None: ...

class BatchResetReply(_message.Message):
    __slots__ = ("answers",)
    class Answer(_message.Message):
        __slots__ = ("reply", "error")
        REPLY_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        reply: ResetReply
        error: Error
        def __init__(self, reply: _Optional[_Union[ResetReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[BatchResetReply.Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[BatchResetReply.Answer, _Mapping]]] = ...) -> None: ...

class BatchStepRequest(_message.Message):
    __slots__ = ("calls",)
    CALLS_FIELD_NUMBER: _ClassVar[int]
    calls: _containers.RepeatedCompositeFieldContainer[StepRequest]
    def __init__(self, calls: _Optional[_Iterable[_Union[StepRequest, _Mapping]]] = ...) -> None: ...

class BatchStepReply(_message.Message):
    __slots__ = ("answers",)
    class Answer(_message.Message):
        __slots__ = ("reply", "error")
        REPLY_FIELD_NUMBER: _ClassVar[int]
        ERROR_FIELD_NUMBER: _ClassVar[int]
        reply: StepReply
        error: Error
        def __init__(self, reply: _Optional[_Union[StepReply, _Mapping]] = ..., error: _Optional[_Union[Error, _Mapping]] = ...) -> None: ...
    ANSWERS_FIELD_NUMBER: _ClassVar[int]
    answers: _containers.RepeatedCompositeFieldContainer[BatchStepReply.Answer]
    def __init__(self, answers: _Optional[_Iterable[_Union[BatchStepReply.Answer, _Mapping]]] = ...) -> None: ...

class ForkRequest(_message.Message):
    __slots__ = ("session", "step", "count", "request_id")
    SESSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    session: str
    step: int
    count: int
    request_id: str
    def __init__(self, session: _Optional[str] = ..., step: _Optional[int] = ..., count: _Optional[int] = ..., request_id: _Optional[str] = ...) -> None: ...

class ForkReply(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseRequest(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sessions: _Optional[_Iterable[str]] = ...) -> None: ...

class CloseReply(_message.Message):
    __slots__ = ("closed",)
    CLOSED_FIELD_NUMBER: _ClassVar[int]
    closed: int
    def __init__(self, closed: _Optional[int] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("reward", "completions", "items", "random", "request_id", "fingerprint")
    REWARD_FIELD_NUMBER: _ClassVar[int]
    COMPLETIONS_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    reward: str
    completions: _containers.RepeatedCompositeFieldContainer[Texts]
    items: _containers.RepeatedCompositeFieldContainer[Map]
    random: Map
    request_id: str
    fingerprint: str
    def __init__(self, reward: _Optional[str] = ..., completions: _Optional[_Iterable[_Union[Texts, _Mapping]]] = ..., items: _Optional[_Iterable[_Union[Map, _Mapping]]] = ..., random: _Optional[_Union[Map, _Mapping]] = ..., request_id: _Optional[str] = ..., fingerprint: _Optional[str] = ...) -> None: ...

class Texts(_message.Message):
    __slots__ = ("texts",)
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, texts: _Optional[_Iterable[str]] = ...) -> None: ...

class ScoreReply(_message.Message):
    __slots__ = ("rewards", "random")
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    RANDOM_FIELD_NUMBER: _ClassVar[int]
    rewards: Value
    random: Map
    def __init__(self, rewards: _Optional[_Union[Value, _Mapping]] = ..., random: _Optional[_Union[Map, _Mapping]] = ...) -> None: ...
