r"""Tell the value in a relation from names and unknowns: "n = 34" and "34 = n" give 34 a name, "2x + 4y = 0" is an equation.

All functions take a text after `numbers.normalize`. What an agent writes is read leniently, because the last number of
"m + n = 27 + 7 = 34" answers the question. The right answer of a task is read strictly (`is_equation`): a relation with
unknowns has no value, and a task with the number behind its equals sign would train agents on a wrong one.
"""

import re

HAS_VALUE = re.compile(r"[0-9]|\\pi(?![a-z])")
# Letters right after a number ("#" stands for one) that are variables and no unit: 2a, 3xy.
COEFFICIENT = r"[#0-9](?![eE][0-9])[abceiknpqrtuvwxyz]+(?![A-Za-z])"
CLAUSE_BORDER = re.compile(r",(?![0-9])|;|\bor\b|\band\b")

_DECORATION = r"\\(?:angle|measuredangle|triangle|overline|overrightarrow|vec|hat|widehat|bar)(?![a-z])"
_NAMED = rf"(?:{_DECORATION})?[ {{]*(?:[a-zA-Z]|[A-Z]{{2,4}}|\\[a-z]+)[ }}]*(?:_\{{?[0-9]\}}?)?"
_SUBJECT = re.compile(rf"(?:.*\b(?:is|are|let|then|so) )?[$( ]*{_NAMED} ?")

_LETTER = r"[^\W\d_]"
_FUNCTION = r"(?:sin|cos|tan|cot|sec|csc|log|ln|lg|exp|sqrt|lim|mod|gcd|lcm|det|frac|times|cdot|div|pi|binom)"
_GREEK = (
    r"\\(?:alpha|beta|gamma|delta|epsilon|varepsilon|zeta|eta|theta|lambda|mu|nu|xi|rho|sigma|tau|phi|varphi|chi|psi|omega|"
    "Gamma|Delta|Theta|Lambda|Sigma|Phi|Psi|Omega|ell)"
)
# Several variables side by side: xy, abc, pqr, kx.
PRODUCT = (
    r"(?:(?!(?:by|my|try|dry|fly|sky|why|cry|spy|shy)(?![a-z]))[bcdf-hj-np-tv-z]{1,3}[xyz]|[au-z][u-z]{1,3}|"
    "ab|ac|ad|bc|bd|cd|abc|abd|acd|bcd|abcd|mn|mnp|pq|pr|qr|pqr|pqrs|rs|rst)"
)
NAME_OF_RELATION = re.compile(rf"(?<![\\a-zA-Z])(?:[A-Z]{{2,4}}|{PRODUCT})(?= ?(?:[=<>]|\\in(?![a-z])))")  # of several letters
_SHORT_WORD = r"(?i:a|an|as|at|be|by|he|if|in|is|it|of|on|or|so|to|we)"
_WORD = re.compile(
    rf"(?!(?:{PRODUCT}|{_FUNCTION})(?!{_LETTER}))(?:{_LETTER}[^\W\d_A-Z]{{2,}}|[A-Z]{{5,}}|{_SHORT_WORD}|[^\x00-\x7f]{{2,}})"
)
_SYMBOL = re.compile(rf"{_LETTER}|[A-Z]{{2,4}}|{_GREEK}")
# What a name may have besides: subscripts, primes, and arguments that are numbers or events, as in f(2) and P(A).
_PARTS_OF_NAME = re.compile(
    rf"_ ?(?:\{{[^{{}}]*\}}|\\?{_LETTER}+|[0-9]+)|{_DECORATION}|(?<=[a-zA-Z])['′]+|(?<=[a-zA-Z'])\((?:[-0-9., /]+|[A-Z]+)\)"
)
# Single letters after a number that are units.
_UNIT = re.compile(r"(?<=[0-9}]) ?(?:[a-zA-Z]{2,}[/*. ])*[mshglACFJLTVW](?:[/*. ] ?(?:[mshg]|[a-z]{2,}))*(?![A-Za-z])")
_UNKNOWN = re.compile(rf"(?<![\\\w'’/])(?![aAI] [A-Za-z]{{2}}){_LETTER}(?!\w)|(?<![\\\w]){PRODUCT}(?!\w)|{_GREEK}")
_EQUALS = re.compile(r" (?:is|are|equals|is equal to|are equal to) (?=[^=]*[0-9])|\\approx")


def is_name(text: str) -> bool:
    """Return whether a text is words with at most one symbol, such as "the largest n", "x_1", "AB" or "f(2)"."""
    words = re.sub(r"[.,:;?$(){}\[\]*\"]", " ", _PARTS_OF_NAME.sub(" ", text)).split()
    articles = ("A", "I") if words[-1:] != ["A"] and words[-1:] != ["I"] else ()
    symbols = [word for i, word in enumerate(words, 1) if not (_WORD.fullmatch(word) and (word != "a" or i < len(words)))]
    symbols = [word for word in symbols if word not in articles]
    return bool(words) and len(symbols) <= 1 and all(map(_SYMBOL.fullmatch, symbols))


def value_side(text: str) -> str:
    """Return the side of the equals signs in a text that is the value: the last one with a number, if only names follow it."""
    left, equals, right = text.rpartition("=")
    if not equals or HAS_VALUE.search(right):
        return right
    return value_side(left) if HAS_VALUE.search(left) and is_name(right) else text


def has_several_names(text: str) -> bool:
    """Return whether a text ends with the value of a name and gives other values of names before: x = 3, y = 4."""
    clauses = [clause.rpartition("=") for clause in CLAUSE_BORDER.split(text) if "=" in clause]
    values = [right.strip(" .)$") for left, _, right in clauses if _SUBJECT.fullmatch(left)]
    return bool(values) and _SUBJECT.fullmatch(clauses[-1][0]) is not None and len(set(values)) > 1


def is_equation(text: str) -> bool:
    """Return whether a text has a relation other than that of one name and its value, or an unknown beside the value.

    So are 2x = 4 (an equation), AB = 4, CD = 5 (values of several names), x = y = 3, y = 3t and 3t (formulas)."""
    clauses = CLAUSE_BORDER.split(_EQUALS.sub(" = ", text))
    relations = [clause for clause in clauses if "=" in clause]
    sides = relations[0].split("=") if relations else []
    value = next((side for side in reversed(sides) if HAS_VALUE.search(side)), "")
    others = [side for side in sides if side is not value and re.search(_LETTER, re.sub(rf"\\{_FUNCTION}(?![a-z])", "", side))]
    symbols = [side for side in others if not all(_WORD.fullmatch(word.strip(".,:;?$()*")) for word in side.split())]
    rest = [value, *(clause for clause in clauses if "=" not in clause)]
    unknown = re.search(COEFFICIENT, text) or any(_UNKNOWN.search(_UNIT.sub("", part)) for part in rest)
    return bool(unknown) or len(relations) > 1 or len(symbols) > 1 or not all(map(is_name, others))
