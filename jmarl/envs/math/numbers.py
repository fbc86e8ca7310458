r"""Read numbers as people and language models write them: normalize the text, then parse it.

A number that consists of digits, in whatever form (1,234; 6/8; 1 1/2; 1.5e3; 5%), becomes an exact fraction here. A number with
roots, pi or operations is parsed and compared by `expressions.py`. A number with a name ("n = 34") is told from an equation.
"""

import contextlib
import math
import re
from fractions import Fraction
from typing import NamedTuple

from jmarl.envs.math import expressions
from jmarl.envs.math.expressions import MAX_DEPTH, approximate_value, nesting_depth

MAX_DIGITS = 40  # a number with more digits is not read


class Value(NamedTuple):
    """A number that was read."""

    exact: Fraction | None  # None: it has a root, pi or an operation
    latex: str
    reduced: bool  # a plain number; if it is a fraction, one in lowest terms


class Unreadable(ValueError):
    """Raised where a text is not an answer of the kind that is asked for."""


# ---- normalization

_CHARACTERS = str.maketrans(
    {"−": "-", "–": "-", "‐": "-", "‑": "-", "－": "-", "⁄": "/", "≈": r"\approx ",
     "≤": "<=", "⩽": "<=", "≥": ">=", "⩾": ">=", "∞": r"\infty ", "∪": r"\cup ", "∈": r"\in ", "±": r"\pm ",
     "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ", "√": r"\sqrt ", "π": r"\pi ", "\u00a0": " ", "\u202f": " ", "#": " "}
)  # fmt: skip
_NO_OPERATION_BEFORE = r"(?<![0-9A-Za-z.,^)}/])(?<![0-9)}] )"
_FONT = (
    r"(?:text(?:bf|it|md|normal|rm|sc|sf|sl|tt|up)?|math(?:bf|it|normal|rm|sf|tt)|boldsymbol|bm|emph|[hm]box|num|si|unit|"
    r"operatorname\*?|underline|ensuremath)"
)
# A word after a number, with or without an exponent: no unknown, and no word that goes on to another number.
_UNIT = r"(?![abceknpqruvwxyz](?![a-z])|(?:and|but|if|or|so|then|when|where|with)(?![a-z]))[a-z]{1,12}"
_EXPONENT = r"\^\{?-?[23]\}?(?![0-9])|[²³]"
_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻", "0123456789-")
_REPLACEMENTS = [
    (re.compile(pattern, re.I), replacement)
    for pattern, replacement in (
        (r"\\(?:begin|end)\{[a-z]+\*?\}|(?<!\\)&", " "),
        (r"(?<=[0-9]) ?(?=[½¼¾⅓⅔])", " "),
        (r"½", "1/2 "),
        (r"¼", "1/4 "),
        (r"¾", "3/4 "),
        (r"⅓", "1/3 "),
        (r"⅔", "2/3 "),
        (r"<\|[^|<>]{0,30}\|>|<(?:/s|eos|end_of_turn)>", " "),
        (r"[✅✓✔✨⭐\ufe0f\U0001f300-\U0001f3ff\U0001f44d\U0001f44f\U0001f600-\U0001f63f]", " "),
        (r"</?(?:b|i|u|em|strong|span|p|br|code|div|mark)(?: [^<>]{0,40})?/?>", ""),
        (r"\{,\}|,\\! ?(?=[0-9]{3}(?![0-9]))", ","),
        (r"\\(?:left|right|displaystyle|thinspace|medspace|thickspace)(?![a-z])|\\[!,;:]|\*\*|__|`", ""),
        (r"(?<!\\)\\[()\[\] ]|\\q?quad(?![a-z])|~", " "),
        (
            rf"\\{_FONT} ?\{{([^{{}}]*[a-z])\}}\s{{0,3}}(?:\^ ?(?:[23]|\{{ ?[23] ?\}})|[²³])?",
            r" \1 ",
        ),  # a unit with an exponent
        (rf"\\{_FONT} ?\{{([^{{}}]*)\}}", r" \1 "),
        (r"-\s?\\?[$€£¥₹]\s?", "-"),
        (r"\\?[$€£¥₹]", " "),
        (r"\\%|\bper ?cent\b", "%"),
        (r"\\[dtc]frac", r"\\frac"),
        (r"(?:^|\{) ?(-?[0-9]++) ?\\over(?![a-z]) ?([0-9]++) ?(?:\}|$)", r"\\frac{\1}{\2}"),
        (r"\\frac ?([0-9])", r"\\frac{\1}"),
        (r"(\\frac ?\{[^{}]*\}) ?([0-9])", r"\1{\2}"),
        (r"\\frac ?\{ ?-([0-9]++) ?\} ?\{ ?-", r"\\frac{\1}{"),
        (r"\\frac ?\{ ?([0-9]++) ?\} ?\{ ?-", r"\\frac{-\1}{"),
        (rf"{_NO_OPERATION_BEFORE}- ?([0-9]++) ?/ ?-([0-9])", r"\1/\2"),
        (rf"{_NO_OPERATION_BEFORE}([0-9]++) ?/ ?-([0-9])", r"-\1/\2"),
        (rf"{_NO_OPERATION_BEFORE}- ?\(([0-9]++(?: ?/ ?[0-9]++|\.[0-9]++)?)\)(?! ?[\^0-9(*/\\a-z])", r"-\1"),
        (r"(^|[=:,(<>]|\b(?:is|are|or|and) ) ?(?:minus|negative) (?=[0-9.\\])", r"\1 -"),
        (r"\\leq?(?:slant)?(?![a-z])", "<="),
        (r"\\geq?(?:slant)?(?![a-z])", ">="),
        (r"\\lt(?![a-z])", "<"),
        (r"\\gt(?![a-z])", ">"),
        (r"(?<![\\a-z])(?:infinity|infty|inf|oo)(?![a-z])", r"\\infty "),
        (r"(?<![\\a-z])pi(?![a-z])", r"\\pi "),
        (rf"(?<=[0-9}}])(?: ?{_UNIT}(?:{_EXPONENT})?[ /*.]?){{1,4}}", lambda match: re.sub(_EXPONENT, "", match[0])),
        (r"\^ ?\{? ?\\circ ?\}?|°", ""),  # degrees
        (r"\\?(?<![a-z])sqrt ?\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\sqrt ?([0-9](?![0-9])|(?<= )[0-9]++)", r"\\sqrt{\1}"),
        (r"\s+", " "),
    )
]


_POWER_OF_TEN = re.compile("(?<=[×* ])10([⁻]?[⁰¹²³⁴⁵⁶⁷⁸⁹]{1,2})")
# Blanks that are no line break, apostrophes and underscores between groups of three digits.
_DIGIT_GROUPS = re.compile(
    r"(?:(?<=[0-9])(?<![0-9]{4})(?<![.,][0-9])(?<![.,][0-9]{2})(?<![.,][0-9]{3}))"
    r"(?:\\ |\\[,;:!]|~|['’_\u00a0\u2009\u202f])(?=[0-9]{3}(?![0-9]))"
)


def normalize(text: str) -> str:
    """Replace what is written in several ways by one of them, and remove what only formats, such as bold type."""
    text = _POWER_OF_TEN.sub(lambda match: f"10^{{{match[1].translate(_SUPERSCRIPTS)}}}", text)
    text = _DIGIT_GROUPS.sub("", text).translate(_CHARACTERS)
    for pattern, replacement in _REPLACEMENTS:
        text = pattern.sub(replacement, text)
    text = text.strip()
    while text.startswith("{") and text.endswith("}") and nesting_depth(re.findall(r"[{}]", text[1:-1])) < math.inf:
        text = text[1:-1].strip()  # of TeX; a set has \\{
    return text


# ---- relations
#
# "n = 34", "n is 34" and "34 = n" give a number a name, "2x + 4y = 0" is an equation. What an agent writes is read leniently,
# because the last side of "m + n = 27 + 7 = 34" answers the question. The right answer of a task is read strictly: a relation
# with unknowns has no value, and a task with the number behind its equals sign would train agents on a wrong one.

HAS_VALUE = re.compile(r"[0-9]|\\pi(?![a-z])")
# Letters right after a number ("#" stands for one) that are variables and no unit: 2a, 3xy.
COEFFICIENT = r"[#0-9](?![eE][-+]?[0-9]|x ?10 ?\^)[abceiknpqrtuvwxyz]+(?![A-Za-z])"
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
_UNIT_LETTER = re.compile(r"(?<=[0-9}]) ?(?:[a-zA-Z]{2,}[/*. ])*[mshglACFJLTVW](?:[/*. ] ?(?:[mshg]|[a-z]{2,}))*(?![A-Za-z])")
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
    unknown = re.search(COEFFICIENT, text) or any(_UNKNOWN.search(_UNIT_LETTER.sub("", part)) for part in rest)
    return bool(unknown) or len(relations) > 1 or len(symbols) > 1 or not all(map(is_name, others))


# ---- parsing

_INT = r"(?:[0-9]{1,3}(?:,[0-9]{3})++(?![0-9])|[0-9]++)"
_DEC = rf"(?:{_INT}(?:\.[0-9]++)?|\.[0-9]++)"
# A fraction, mixed number, number in scientific notation, or decimal. Groups (digits at the end of a name count alternatives):
# whole part, n(umerator), d(enominator), m(antissa), e(xponent).
NUMERAL = re.compile(
    rf"""(?<![0-9A-Za-z.^_{{\\+-])(?<![0-9][.,])(?P<sign>[-+])?
    (?:(?:(?P<whole1>{_INT})\ ?)?\\frac\ ?
        \{{\ ?(?P<n1>-?[0-9]++)\ ?\}}\ ?\{{\ ?(?P<d1>[0-9]++)\ ?\}}
    |(?:(?P<whole2>{_INT})\ )?(?P<n2>{_INT})\ ?/\ ?(?P<d2>{_INT})
    |(?P<m1>{_DEC})
        (?:\ ?(?:\\times|\\cdot|[x*])\ ?10\ ?\^\ ?(?:\{{\ ?(?P<e1>[-+]?[0-9]{{1,2}})\ ?\}}|(?P<e2>[-+]?[0-9]{{1,2}}))
        |[eE](?P<e3>[-+]?[0-9]{{1,2}}))
    |(?P<m2>{_DEC}))
    (?![0-9]|[.,][0-9])(?:\ ?(?P<scale>hundred|thousand|million|billion)\b)?(?P<percent>\ ?%)?""",
    re.X,
)
_SCALES = {None: 1, "hundred": 100, "thousand": 1000, "million": 10**6, "billion": 10**9}

# Words that change the value of a number beside them. "#" stands for a number.
CHANGING_WORDS = re.compile(
    r"n['’]t\b|\b(?:at least|at most|up to|fewer than|greater than|smaller than|larger than|over|under|above|below) (?=#)|"
    r"(?<!\\)\b(?:not|cannot|never|minus|negative|twice|squared|cubed|trillion|dozen|lakh|crore|"
    r"(?:is|are|was) (?:false|wrong|incorrect|untrue)|(?:a|an|one|and) (?:half|third|quarter)|"
    r"(?:times|plus|but|except|other than|half of|double|less than|more than|root of|log)\b"
    r"(?=[^#0-9]*[#0-9]| (?:one|two|three|four|five|six|seven|eight|nine|ten)\b))\b",
    re.I,
)
# What stands beside a number, "#", so that a text has to be parsed as an expression: a variable, a minus, a product.
_OPERATION = re.compile(rf"(?<![A-Za-z'’])[knxyzKNXYZ](?![A-Za-z])| - |# ?[*(] ?#|{COEFFICIENT}")
_INEQUALITY = re.compile(r"[<>!]=|[<>≠]|\\neq?(?![a-z])")
_VERB = re.compile(r".* (?:is|are|be|equals|equal to) (?P<value>.*)")
_HARMLESS = re.compile(r"[A-Za-z\s.,;:!?'\"()\[\]*_~≈/’“”#-]*+")


def _parse_match(match: re.Match[str], unit: str) -> Value:
    """Return the value of a match of `NUMERAL`."""
    if sum(c.isdigit() for c in match.group()) > MAX_DIGITS:
        raise Unreadable(f"more than {MAX_DIGITS} digits")
    groups = {name.rstrip("123"): text.replace(",", "") for name, text in match.groupdict().items() if text is not None}
    reduced = True
    if "n" in groups:
        numerator, denominator, whole = int(groups["n"]), int(groups["d"]), int(groups.get("whole", 0))
        if not denominator or (whole and numerator < 0):
            raise Unreadable(f"not a fraction: {match.group()}")
        exact = whole + Fraction(numerator, denominator)
        reduced = math.gcd(numerator, denominator) == 1 and not (whole and numerator > denominator)
    else:
        exact = Fraction(groups["m"]) * Fraction(10) ** int(groups.get("e", 0))
    exact *= _SCALES[groups.get("scale")] * (-1 if groups.get("sign") == "-" else 1)
    return Value(exact / 100 if "percent" in groups and unit != "%" else exact, match.group(), reduced)


def parse_number(text: str, unit: str = "") -> Value:
    """Return the one number of a normalized phrase, with or without words around it.

    It is the value of a relation: the number after the last equals sign or verb ("n = 34", "n is 34"), or before it ("34 = n").
    A number repeated ("42 (that is, 42)") counts as one.

    Raises:
        Unreadable: there is no number, there are different ones, or words change its value.
    """
    exact, _, approximation = text.partition(r"\approx")
    text = exact if HAS_VALUE.search(exact) and not is_name(exact) else approximation or text
    if _INEQUALITY.search(text) or has_several_names(text):
        raise Unreadable(f"an inequality, or values of several variables: {text}")
    text = re.sub(r"^ ?([-+]) ", r"\1", value_side(text))
    if CHANGING_WORDS.search(NUMERAL.sub("#", text)):
        raise Unreadable(f"words that change a number: {text}")
    sentence = _VERB.fullmatch(text)
    if sentence and HAS_VALUE.search(sentence["value"]) and not re.search(r"\bif\b", text):
        return parse_number(sentence["value"], unit)
    matches, words = list(NUMERAL.finditer(text)), NUMERAL.sub("#", text)
    if not matches or not _HARMLESS.fullmatch(words) or _OPERATION.search(words):
        return _parse_expression(text)
    values = [_parse_match(match, unit) for match in matches]
    if len({value.exact for value in values}) > 1:
        raise Unreadable(f"several numbers: {text}")
    return values[-1]


def find_numbers(text: str) -> set[Fraction]:
    """Return all plain numbers in a text."""
    numbers = set()
    for match in NUMERAL.finditer(text):
        with contextlib.suppress(Unreadable):  # too many digits, or a denominator of 0
            numbers.add(_parse_match(match, "").exact)
    return numbers


def parse_bare_number(text: str, unit: str = "") -> Value:
    """Return a number with nothing around it; anything else is `Unreadable`."""
    if re.search("[A-Za-z]", re.sub(r"\\[a-z]+", "", text)) or nesting_depth(re.findall(r"[(){}\[\]]", text)) > MAX_DEPTH:
        raise Unreadable(f"not a number alone: {text}")
    return parse_number(text, unit)


def _parse_expression(text: str) -> Value:
    """Return an expression with roots, pi or operations. Words around it are dropped."""
    expression = re.sub(r"(?<![\\a-zA-Z])[a-zA-Z]{2,}(?![a-zA-Z])|(?<=[0-9})] )[mshgl]$", " ", text.strip(" .,;:!"))
    expression = expression.strip(" .,;:!")
    unread = re.search(COEFFICIENT, text) or re.fullmatch("[0-9. ]*", expression)
    if unread or math.isnan(approximate_value(expression)):
        raise Unreadable(f"not a number: {text}")
    return Value(None, expression, False)


def equal_values(gold: Value, value: Value) -> bool:
    """Return whether two values are exactly equal. An expression never equals a plain number."""
    if gold.exact is not None or value.exact is not None:
        return gold.exact == value.exact
    return expressions.equal_expressions(gold.latex, value.latex)
