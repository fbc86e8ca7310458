r"""Read numbers as people and language models write them: normalize the text, then parse it.

A number that consists of digits, in whatever form (1,234; 6/8; 1 1/2; 1.5e3; 5%), becomes an exact fraction here. A number with
roots, pi or operations is parsed and compared by `expressions.py`.
"""

import contextlib
import math
import re
from fractions import Fraction
from typing import NamedTuple

from jmarl.envs.math import expressions, relations
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
_OPERATION = re.compile(rf"(?<![A-Za-z'’])[knxyzKNXYZ](?![A-Za-z])| - |# ?[*(] ?#|{relations.COEFFICIENT}")
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
    text = exact if relations.HAS_VALUE.search(exact) and not relations.is_name(exact) else approximation or text
    if _INEQUALITY.search(text) or relations.has_several_names(text):
        raise Unreadable(f"an inequality, or values of several variables: {text}")
    text = re.sub(r"^ ?([-+]) ", r"\1", relations.value_side(text))
    if CHANGING_WORDS.search(NUMERAL.sub("#", text)):
        raise Unreadable(f"words that change a number: {text}")
    sentence = _VERB.fullmatch(text)
    if sentence and relations.HAS_VALUE.search(sentence["value"]) and not re.search(r"\bif\b", text):
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
    unread = re.search(relations.COEFFICIENT, text) or re.fullmatch("[0-9. ]*", expression)
    if unread or math.isnan(approximate_value(expression)):
        raise Unreadable(f"not a number: {text}")
    return Value(None, expression, False)


def equal_values(gold: Value, value: Value) -> bool:
    """Return whether two values are exactly equal. An expression never equals a plain number."""
    if gold.exact is not None or value.exact is not None:
        return gold.exact == value.exact
    return expressions.equal_expressions(gold.latex, value.latex)
