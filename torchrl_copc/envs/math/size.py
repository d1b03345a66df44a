r"""Whether a formula stands for a number that is too large to compute, from its text alone and in linear time."""

from __future__ import annotations

import re
from dataclasses import dataclass

MAX_DEPTH = 40  # of nested groups; math-verify takes seconds for hundreds
MAX_EXPONENT_DIGITS = 4  # also of what a factorial, a binomial coefficient or an index is of
MAX_DIGITS = 100_000

_TOKEN = re.compile(
    r"(?P<number>\d+(?:\.\d*)?|\.\d+)|(?P<command>\\[A-Za-z]+)|(?P<open>\\?\{|[(\[])|(?P<close>\\?\}|[)\]])"
    r"|(?P<power>\*\*|\^|_)|(?P<factorial>!)|(?P<term>[-+=<>&])|(?P<constant>[eπ])|\\.|.",
    re.ASCII | re.DOTALL,
)
_CONSTANTS = {r"\pi", r"\e"}
_LIKE_POWERS = {r"\exp", r"\binom", r"\dbinom", r"\tbinom"}


class _TooLargeError(Exception):
    pass


@dataclass(frozen=True)
class _Size:
    """A bound on the decimal digits of a part's value (a letter has none), and the value of a small number."""

    digits: int = 0
    value: int | None = None
    symbolic: bool = False

    def limit(self) -> int:
        """A bound on the value of an exponent."""
        if self.digits > MAX_EXPONENT_DIGITS:
            raise _TooLargeError
        return 10**self.digits if self.value is None else self.value


class _Reader:
    """Bounds every group from the inside out; each token is read once."""

    def __init__(self, text: str) -> None:
        self.tokens = [
            (match.lastgroup, match.group()) for match in _TOKEN.finditer(text) if match.group().strip()
        ]
        self.at = 0

    def group(self, depth: int) -> _Size:
        """Everything up to the closing bracket: the longest of its terms, each a product of its factors."""
        if depth > MAX_DEPTH:
            raise _TooLargeError
        longest, term, factors = 0, 0, 0
        only, symbolic = _Size(), False
        while self.at < len(self.tokens):
            kind, _ = self.tokens[self.at]
            if kind == "close":
                if depth:
                    break
                self.at += 1
            elif kind == "term":
                self.at += 1
                longest, term = max(longest, term), 0
            else:
                only = self.factor(depth)
                factors += 1
                symbolic |= only.symbolic
                term += only.digits
        self.at += 1
        return only if factors == 1 else _Size(max(longest, term), symbolic=symbolic)

    def factor(self, depth: int) -> _Size:
        """An atom with its exponents and factorials."""
        if depth > MAX_DEPTH:
            raise _TooLargeError
        size = self.atom(depth)
        while self.at < len(self.tokens):
            kind, text = self.tokens[self.at]
            if kind == "factorial":
                self.at += 1
                if not size.symbolic:
                    size = _Size(size.limit() * size.digits)
            elif kind == "power":
                self.at += 1
                if self.at == len(self.tokens):
                    break
                if text == "_":  # also the lower bound of a sum or product
                    self.atom(depth + 1).limit()
                else:
                    exponent = self.factor(depth + 1)
                    size = self.power(size, exponent.limit(), exponent.value)
            else:
                break
            if size.digits > MAX_DIGITS:
                raise _TooLargeError
        return size

    def power(self, base: _Size, limit: int, exponent: int | None) -> _Size:
        digits = base.digits * limit
        if base.value is not None and exponent is not None and digits <= 2 * MAX_EXPONENT_DIGITS:
            value = base.value**exponent
            return _Size(len(str(value)), value)
        return _Size(digits, symbolic=base.symbolic)

    def atom(self, depth: int) -> _Size:
        kind, text = self.tokens[self.at]
        self.at += 1
        if kind == "open":
            return self.group(depth + 1)
        if kind == "number":
            digits = len(text.partition(".")[0].lstrip("0")) or 1
            return _Size(digits, int(text) if text.isdigit() and digits <= MAX_EXPONENT_DIGITS else None)
        if kind == "constant" or text in _CONSTANTS:
            return _Size(1)
        if text in _LIKE_POWERS and self.at < len(self.tokens):
            return _Size(self.factor(depth + 1).limit())
        return _Size(symbolic=len(text) == 1 and text.isalpha())


def is_too_large(formula: str) -> bool:
    r"""Whether computing ``formula`` would take powers or factorials of too many digits, or is nested too deeply.

    Refused are towers of powers and other exponents above 9999, factorials of such numbers, results
    of more than :data:`MAX_DIGITS` digits, and brackets deeper than :data:`MAX_DEPTH`. What takes long for another
    reason (expanding ``(x+y+z)^{999}``, an integral) is not noticed.

    Example:
        >>> [is_too_large(text) for text in (r"9^{9^{9}}", "(10!)!", "2^{2024}-1", r"e^{-x^2/2}", "2^{2^{3}}")]
        [True, True, False, False, False]
    """
    try:
        _Reader(formula).group(0)
    except _TooLargeError:
        return True
    return False
