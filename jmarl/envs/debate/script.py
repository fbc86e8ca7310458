"""The scripted opponent of `DebateScripted`: it argues from the key points of its side, with fixed sentences around them.

Its speeches depend on the task and the number of the speech only, except for the last sentence: that is the first of its
endings that nobody has said yet. So an opponent who reads an ending out first does not make it count as copied. Left out: any
answer to what the other side says.
"""

from __future__ import annotations

from jmarl.envs.debate.sentences import is_copy, split_sentences
from jmarl.envs.debate.transcript import Transcript

# Sentences around a key point, by the number of the point. They have more words than a key point, so that the sentence does not
# count as a repetition of the notes.
FRAMES = (
    "First, {}, and anyone who has looked at this closely for a few years has seen it happen with their own eyes.",
    "Moreover, {}, and waiting would only make a familiar trouble larger, dearer and harder to mend for everyone who has to "
    "deal with it later on.",
    "Finally, {}, and the other speaker would rather look at rare exceptions and old habits than at the daily life of those "
    "who are waiting for an answer.",
)
ENDINGS = {  # sentences around the motion
    "pro": (
        "For example, neighbours of mine thought hard about the claim that {}, and each of them came to accept it in the end "
        "after long talks over the kitchen table.",
        "The other bench makes large promises with great warmth, however, whoever weighs them against the plain facts on this "
        "paper will accept the claim that {}.",
        "According to those who live with the results, the balance is clear, so careful listeners in this hall should all "
        "accept the claim that {}.",
    ),
    "con": (
        "For example, colleagues from an earlier job tried for a while to believe that {}, and gave it up one by one as soon "
        "as the first bills lay on their desks.",
        "Fine words were heard from the other bench today, however, a sober look at what has already gone wrong elsewhere "
        "leaves nobody sure that {}.",
        "According to people who would carry the burden, the price is too high, so thoughtful voters will hardly be won over "
        "by the bare claim that {}.",
    ),
}


def scripted_speech(state: Transcript, side: str, num_speeches: int) -> str:
    """Return the next speech of the script: its share of the key points, and an ending.

    Args:
        state: the debate so far.
        side: pro or con.
        num_speeches: of each side; the key points are divided among them.
    """
    number = len(state.speeches_of(side))
    effect = "help" if side == "pro" else "harm"
    points = state.points[side] or (f"this motion would {effect} most of those whom it concerns",)
    arguments = [
        FRAMES[k % len(FRAMES)].format(_as_clause(point)) for k, point in enumerate(points) if k % num_speeches == number
    ]
    spoken = [sentence for _, text in state.speeches for sentence in split_sentences(text)]
    endings = [ending.format(_as_clause(state.motion)) for ending in ENDINGS[side]]
    unused = [ending for ending in endings if not is_copy(split_sentences(ending)[0], spoken)]
    return " ".join([*arguments, (unused or endings)[0]])


def _as_clause(text: str) -> str:
    """Return a sentence in the form that it has inside another one."""
    return text[:1].lower() + text[1:].rstrip(".!?")
