"""The reward of the team, graded: an answer that is a little better earns a little more. 0 or 1 alone teaches nothing where all
completions of a task earn the same."""

LONGEST_TITLE = 6  # words


def score(titles: list[str], texts: list[str], words: list[list[str]]) -> list[float]:
    """Return one number from 0 to 1 for each joint action: what both agents wrote for one task.

    titles: completions of agent 0. texts: completions of agent 1. words: the column "words" of prompts.jsonl.
    """
    return [(brevity(title) + coverage(text, used)) / 2 for title, text, used in zip(titles, texts, words, strict=True)]


def brevity(title: str) -> float:
    """Return 1 for a title of one to six words, less for longer ones, and 0 for none."""
    count = len(title.split())
    return min(1.0, LONGEST_TITLE / count) if count else 0.0


def coverage(text: str, words: list[str]) -> float:
    """Return the share of the words that are in a text."""
    return sum(word in text.lower() for word in words) / len(words)


# One agent after another: see the comment in run.yaml. The reward is called in both turns, and gets "" for the agent that did
# not act; what it returns for the two turns adds up.
#
# def first_turn(item):
#     return item["prompt"]  # agent 0 reads it, after its role
#
#
# def no_turn(item):
#     return None  # agent 1 does not act in the first turn
#
#
# def second_turn(prompt, agent_completions, **history):
#     return [None, f"{prompt}\nTitle: {agent_completions[0]}"]  # agent 0 does not act; agent 1 reads the title
