"""The formats of rows of data: which one a row has, and the turns of texts in them (host code, no jax).

The formats are those of TRL (standard and conversational), ShareGPT, Alpaca and MRLM; the guide
`notebooks/05_preferences_and_imitation.ipynb` has a table. A row is read whole or refused with the name of its format. Columns
that no format knows are not read, and a warning names them.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from jmarl.envs.data import Messages, Prompt
from jmarl.models.hub.messages import MEDIA, is_chat, is_empty, read_messages, read_prompt

# Format -> the columns by which it is known. Of two formats whose columns a row has, the longer tuple counts.
FORMATS = {
    "trajectory": ("observations", "actions"),
    "stepwise supervision": ("completions", "labels"),
    "unpaired preference": ("completion", "label"),
    "preference": ("chosen", "rejected"),
    "prompt-completion": ("prompt", "completion"),
    "text": ("text",),
    "messages": ("messages",),
    "ShareGPT": ("conversations",),
    "Alpaca": ("instruction", "output"),
}
TEXTS = ("trajectory", "prompt-completion", "text", "messages", "ShareGPT", "Alpaca")  # what sft learns from
REFUSED = {
    "stepwise supervision": "rewards of single steps are not learned from; use prompt and completion for sft, or chosen and "
    "rejected for pairs",
    "unpaired preference": "labels of single completions (KTO) are not learned from; for sft leave the rows out whose label is "
    "false, and remove the column label",
    "preference": "it is for dpo, madpo or reward_model, see load_pairs; for sft keep prompt and chosen, as completion",
}
TEXT_ADVICE = "it is for algorithm sft, see load_trajectories; pairs need prompt, chosen and rejected"
ALSO_EMPTY = ("prompt", "completion", "output", "text", "chosen", "rejected", "observations", "actions")  # count if empty
OPTIONAL = {"Alpaca": ("input", "text"), "trajectory": ("rewards",), "preference": ("messages",)}  # messages equal to chosen
ALWAYS = ("prompt", "reward", "metadata", "tokens")  # read or compared in all formats, or written by jmarl
NOT_READ = {  # columns that change what a model reads or learns
    "tools": "write the tools into a message of role system",
    "functions": "write the functions into a message of role system",
    "chat_template_kwargs": "set chat_template_kwargs for the whole run and remove the column",
    "system": "make it the first message",
    "history": "write it as messages",
    "documents": "write the documents into a message",
    "weight": "leave rows out, or repeat them",
    **dict.fromkeys(MEDIA, "only text is supported"),
}


def format_of(row: Mapping, allowed: Sequence[str], number: int) -> str | None:
    """Return the one format of a row, None if it has none of `allowed`.

    Raises ValueError for columns of another format, or of several, and for columns that must not be left out (tools, images).
    """
    present = {name for name, value in row.items() if not is_empty(value)}
    present |= {name for name in ALSO_EMPTY if row.get(name) is not None}
    formats = [name for name, columns in FORMATS.items() if present.issuperset(columns)]
    if "unpaired preference" in formats:
        formats = [name for name in formats if name != "prompt-completion"]
    whole = row.get("text")  # beside the columns of Alpaca the same as one text, as in the first set of this format
    if "Alpaca" in formats and isinstance(whole, str) and all(str(row[name]) in whole for name in FORMATS["Alpaca"]):
        formats = [name for name in formats if name != "text"]
    for name in formats:
        same = name == "messages" and "preference" in allowed and row["messages"] == row.get("chosen")
        if name not in allowed and not same:
            others = "".join(f" and {x}" for x in formats if x != name)
            raise ValueError(f"row {number} is of the format {name}{others}: {REFUSED.get(name, TEXT_ADVICE)}")
    formats = [name for name in formats if name in allowed]
    if len(formats) > 1:
        columns = " or ".join(" + ".join(FORMATS[name]) for name in formats)
        raise ValueError(f"row {number} has columns of {len(formats)} formats ({', '.join(formats)}): keep {columns}")
    for name, advice in NOT_READ.items():
        if name in present:
            raise ValueError(f"row {number} has the column {name}, which is not read: {advice}")
    return formats[0] if formats else None


def warn_of_unread(rows: Sequence[Mapping], formats: Sequence[str], name: str) -> None:
    """Warn once about the columns that are not read. formats: of the rows. name: of the data."""
    unread: dict[Any, None] = {}
    for row, kind in zip(rows, formats, strict=True):
        read = (*FORMATS[kind], *OPTIONAL.get(kind, ()), *ALWAYS)
        unread |= {column: None for column, value in row.items() if column not in read and not is_empty(value)}
    if unread:
        warnings.warn(f"{name} has columns that are not read: {', '.join(map(str, unread))}", stacklevel=4)


def text_of_row(row: Mapping, number: int, name: str) -> str:
    """Return the text of a column. Raises ValueError if it is something else."""
    if not isinstance(row[name], str):
        raise ValueError(f"row {number}: {name} must be a text; got {row[name]!r:.80}")
    return row[name]


def turns_of_row(row: Mapping, kind: str, number: int) -> tuple[list[Prompt], list[str]]:
    """Return what the model reads before each text that it writes, and these texts, of a row without preferences."""
    column = FORMATS[kind][0]
    if kind in ("prompt-completion", "text") and row[column] == "":
        advice = "use the column text for a text without a prompt" if column == "prompt" else "leave the row out"
        raise ValueError(f"row {number}: {column} is empty; {advice}")
    if kind == "prompt-completion":
        return turns_of_completion(row["prompt"], row["completion"], number)
    if kind == "text":
        turns: tuple[list[Prompt], list[str]] = [""], [text_of_row(row, number, "text")]
        whole: Any = turns[1]
    elif kind == "Alpaca":
        whole = [text_of_row(row, number, name) for name in ("instruction", "input") if not is_empty(row.get(name))]
        turns = ["\n\n".join(whole)], [text_of_row(row, number, "output")]
    else:
        messages = read_messages(row[column], f"{column} of row {number}")
        turns = turns_of_messages(messages, f"{column} of row {number}")
        whole = [*messages, *(message["content"] for message in messages)]
    _check_prompt(row.get("prompt"), whole, column, number)
    return turns


def _check_prompt(prompt: Any, whole: Sequence[Any], column: str, number: int) -> None:
    """Raise a ValueError for a prompt beside a column that does not contain it. whole: messages and texts of the column."""
    if is_empty(prompt):
        return
    parts: Sequence[Any] = [prompt] if isinstance(prompt, str) else read_messages(prompt, f"prompt of row {number}")
    if column == "text":  # a part of the text
        parts, whole = [part if isinstance(part, str) else part["content"] for part in parts], whole[0]
    missing = [part for part in parts if part not in whole]
    if missing:
        raise ValueError(f"row {number}: {column} does not contain the prompt, {missing[0]!r:.80}: remove one of the columns")


def turns_of_completion(prompt: Any, completion: Any, number: int) -> tuple[list[Prompt], list[str]]:
    """Return the turns of a prompt and a completion, texts or messages. A text beside messages is one message."""
    place = f"prompt of row {number}"
    if isinstance(completion, str):
        return [prompt if isinstance(prompt, str) else read_prompt(prompt, place)], [completion]
    if not is_chat(completion) or not completion:
        raise ValueError(f"row {number}: completion is a text or a list of messages; got {completion!r:.80}")
    messages = read_messages(completion, f"completion of row {number}")
    before = as_messages(prompt, place)
    if messages[: len(before)] == before and len(messages) > len(before):  # the completion repeats the prompt
        messages = messages[len(before) :]
    return turns_of_messages((*before, *messages), f"completion of row {number}", len(before))


def as_messages(prompt: Any, place: str) -> Messages:
    """Return a prompt as messages; a text is a message of the user."""
    return ({"role": "user", "content": prompt},) if isinstance(prompt, str) else read_prompt(prompt, place)


def turns_of_messages(messages: Messages, place: str, start: int = 0) -> tuple[list[Prompt], list[str]]:
    """Return what the model reads before each message of the assistant, and these messages.

    start: how many messages are the prompt, whoever wrote them. Raises ValueError unless each message of the assistant answers
    others and the last message is one.
    """
    read: list[Prompt] = []
    written: list[str] = []
    before = list(messages[:start])
    for i, message in enumerate(messages[start:]):
        if message["role"] != "assistant":
            before.append(message)
        elif not before:
            problem = f"messages {i - 1} and {i} are both of the assistant: join them" if i else "it begins with the assistant"
            raise ValueError(f"{place} cannot be trained on: {problem}; a message of the assistant answers the user or system")
        else:
            read.append(tuple(before))
            written.append(message["content"])
            before = []
    if before:
        role = before[-1]["role"]
        raise ValueError(f"{place} ends with a message of role {role}, which nobody answers: remove it, or leave the row out")
    return read, written


def prompt_of(value: Any, number: int) -> Prompt:
    """Return a column of a row as a prompt. Raises ValueError if it is neither a text nor a list of messages."""
    return value if isinstance(value, str) else read_prompt(value, f"row {number}: a prompt")


def single_pair(prompt: Any, chosen: Any, rejected: Any, number: int) -> tuple[Prompt, tuple[str], tuple[str]]:
    """Return the prompt and the completions of a pair of one agent, which are texts or conversations."""
    for name, value in (("chosen", chosen), ("rejected", rejected)):
        if not isinstance(value, str) and not (is_chat(value) and value):
            more = "or for a team (load_pairs with num_agents) a list of texts"
            raise ValueError(f"row {number}: {name} is a text or a list of messages, {more}; got {value!r:.80}")
    if isinstance(chosen, str) != isinstance(rejected, str):
        raise ValueError(f"row {number}: chosen and rejected must both be texts, or both be lists of messages")
    if isinstance(chosen, str):
        if prompt is None:
            prompt, chosen, rejected = split_texts(chosen, rejected, number)
        return prompt_of(prompt, number), (chosen,), (rejected,)
    conversations = [read_messages(x, f"row {number}: {name}") for name, x in (("chosen", chosen), ("rejected", rejected))]
    before, answers = conversations[0][:-1], [conversation[-1] for conversation in conversations]
    if before != conversations[1][:-1]:
        raise ValueError(
            f"row {number}: chosen and rejected differ before their last messages; pairs are of one message each: leave the "
            "row out, or put what they share into the prompt"
        )
    if any(answer["role"] != "assistant" for answer in answers):
        raise ValueError(f"row {number}: chosen and rejected must end with a message of the assistant")
    given = () if prompt is None else as_messages(prompt, f"row {number}: a prompt")
    if before[: len(given)] == given:  # the conversations repeat the prompt
        given = ()
    elif before:
        raise ValueError(
            f"row {number}: chosen and rejected have {len(before) + 1} messages, which do not begin with the prompt; a "
            "completion of several messages is not supported: put all but the last into the prompt"
        )
    if not given and not before:
        raise ValueError(f"row {number} has no prompt, and nothing in chosen and rejected comes before the last message")
    return read_prompt((*given, *before), f"row {number}: a prompt"), (answers[0]["content"],), (answers[1]["content"],)


def split_texts(chosen: str, rejected: str, number: int) -> tuple[str, str, str]:
    """Return the words with which two texts begin, and the rest of each, which begins with the blank before a word.

    A word is never split, so that the tokens of the prompt are those of the whole text.
    """
    shared = os.path.commonprefix([chosen, rejected])
    blanks = [i for i, letter in enumerate(shared) if letter.isspace()]
    end = blanks[-1] if blanks else 0
    while end and shared[end - 1].isspace():
        end -= 1
    if not end:
        raise ValueError(f"row {number} has no prompt, and chosen and rejected do not begin with the same words")
    return shared[:end], chosen[end:], rejected[end:]
