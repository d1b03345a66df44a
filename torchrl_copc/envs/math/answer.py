r"""What a response answers, as text: the last ``\boxed{}``, and its integer where it is one."""

from __future__ import annotations

import re

# A box's opening, an escaped character (which is no brace), or a brace.
# Every quantifier that others could follow is possessive: this runs on whatever a policy wrote, without a deadline.
_BRACES = re.compile(r"(?<!\\)\\++boxed\s*+\{|\\.|[{}]", re.DOTALL)

_IGNORED = re.compile(r"\$|\\!|\\,|\^\\circ")
_UNIT = re.compile(r"\\text\{[^{}]*\}")
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+", re.ASCII)
_INTEGER = re.compile(r"([+-]?)(\d+)", re.ASCII)


def last_boxed(text: str) -> str | None:
    r"""Content of the last ``\boxed{}`` in ``text`` whose braces are balanced, or None.

    Of nested boxes the inner one counts. A box that never closes (the response was cut) is none.

    Example:
        >>> last_boxed(r"so \boxed{1}, no: \boxed{\frac{1}{2}}. Or \boxed{3")
        '\\frac{1}{2}'
    """
    last = None
    open_braces: list[tuple[bool, int]] = []
    for match in _BRACES.finditer(text):
        found = match.group()
        if found == "}":
            if open_braces:
                is_box, start = open_braces.pop()
                if is_box and (last is None or start > last[0]):
                    last = (start, match.start())
        elif found == "{":
            open_braces.append((False, match.end()))
        elif "boxed" in found:
            open_braces.append((True, match.end()))
    return text[last[0] : last[1]].strip() if last is not None else None


def as_integer(text: str) -> str | None:
    r"""The integer that ``text`` is, in its shortest decimal form, or None if it is something else.

    Removes ``$``, ``\!``, ``\,``, ``^\circ`` and ``\text{...}``, and commas that separate thousands; nothing
    else, so that "1,2", "1 2" and "5x" are no integers. Compare the texts: numbers of any length are fine.

    Example:
        >>> as_integer(r"-12,\!345\text{ cm}"), as_integer("1,2"), as_integer("1 2")
        ('-12345', None, None)
    """
    # A unit leaves a space behind: the 5 and the 6 of "5\text{ or }6" are not 56.
    text = _UNIT.sub(" ", _IGNORED.sub("", text)).strip()
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    match = _INTEGER.fullmatch(text)
    if match is None:
        return None
    sign, digits = match[1], match[2].lstrip("0") or "0"
    return "-" + digits if sign == "-" and digits != "0" else digits
