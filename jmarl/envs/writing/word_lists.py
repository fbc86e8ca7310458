"""The default word lists of the gated reward: English stop words, and transition words by category.

No phrase is in two categories or contains a phrase of another category, so that a phrase counts once. Short words that mostly
have another function (so, as, then, had) are left out.
"""

from __future__ import annotations

_STOP_WORDS = """
    a an the this that these those
    i me my mine myself we us our ours ourselves you your yours yourself he him his himself she her hers herself
    it its itself they them their theirs themselves one who whom whose which what
    am is are was were be been being do does did doing done have has had having
    can could may might must shall should will would ought
    and or nor but if so as than then though although because while until unless whether
    of to in on at by for from with without into onto over under about above below between among through during before
    after against off out up down across along around near within upon per via
    not no yes too very just only even also again ever never always
    there here when where why how all any both each either neither every few many more most much other others another
    some such same own
    s t d m ll re ve don isn aren wasn weren doesn didn won wouldn couldn shouldn hasn haven hadn"""
STOP_WORDS = frozenset(_STOP_WORDS.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(" ".join(phrase.split()) for phrase in text.split(","))


TRANSITIONS: dict[str, tuple[str, ...]] = {
    "addition": _phrases(
        """furthermore, moreover, additionally, in addition, besides, on top of that, what is more, not only, as well as,
        along with, plus, also"""
    ),
    "example": _phrases(
        """for example, for instance, such as, to illustrate, by way of example, as an example, to name a few,
        an example of this, as shown by, take the case of, including, particularly, in particular"""
    ),
    "clarification": _phrases(
        """in other words, that is to say, that is, namely, to put it differently, to be precise, put simply, more exactly,
        this means, which means, to clarify, i mean"""
    ),
    "cause": _phrases(
        """therefore, thus, hence, consequently, as a result, as a consequence, because, for that reason, for this reason,
        accordingly, due to, owing to, thanks to, thereby, which is why"""
    ),
    "contrast": _phrases(
        """however, but, in contrast, by contrast, on the other hand, on the contrary, conversely, whereas, instead,
        rather than, unlike, by comparison with"""
    ),
    "order": _phrases(
        """first, firstly, first of all, to begin with, second, secondly, third, thirdly, next, after that, finally,
        last of all, lastly, to start with"""
    ),
    "emphasis": _phrases(
        """indeed, in fact, of course, certainly, above all, most importantly, without doubt, undoubtedly, clearly,
        obviously, especially, notably, as a matter of fact, importantly"""
    ),
    "summary": _phrases(
        """in summary, to summarise, to summarize, in short, in brief, to sum up, overall, all in all,
        in conclusion, to conclude, on the whole, in a nutshell, in the end"""
    ),
    "likeness": _phrases(
        """similarly, likewise, in the same way, just as, just like, equally, in the same manner, much like, by the same token,
        comparably, alike"""
    ),
    "concession": _phrases(
        """although, though, even though, nevertheless, nonetheless, despite, in spite of, even so, still, admittedly,
        granted that, all the same, regardless"""
    ),
    "condition": _phrases(
        """if, unless, provided that, providing that, as long as, in case, on condition that, assuming that, whether,
        otherwise, in that case, in the event of"""
    ),
    "time": _phrases(
        """meanwhile, afterwards, afterward, later, earlier, previously, eventually, recently, soon, at the same time,
        until, while, during, since then, in the meantime, by the time"""
    ),
}
