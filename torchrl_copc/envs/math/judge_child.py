"""The program of a judge's process: answers one question at a time with math-verify, until its pipe closes.

Run by path, not imported: a child that imported the package would load torch. Nothing here times out by
itself. The parent kills a child that is late, and should the parent be gone, the alarm ends it.
"""

from __future__ import annotations

import json
import logging
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection
from typing import Any

MEMORY_LIMIT = 2**30  # bytes of address space; a tower of powers takes all there is

# A word that stands bare in a formula is read as a product of letters, and so is a function without backslash.
_MARKED_UP = re.compile(r"\\(?:text\w*|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+")
_BARE_WORD = re.compile(r"[A-Za-z]{4,}|\b(?:sin|cos|tan|log|exp)\b")
_SIDE_BY_SIDE = re.compile(r"\d\s+\d")  # "5 6" is read as 11


def parse(text: str) -> list[Any]:
    import math_verify

    return math_verify.parse(f"${text}$", parsing_timeout=None)


def equal(gold: str, answer: str) -> bool:
    import math_verify

    return bool(math_verify.verify(parse(gold), parse(answer), timeout_seconds=None))


def objection(gold: str) -> str:
    """Why nothing could be compared with this gold answer; empty if something can."""
    expressions = [found for found in parse(gold) if not isinstance(found, str)]
    if not expressions:
        return "it does not parse as LaTeX"
    if any(str(found) in ("nan", "zoo") for found in expressions):
        return "it is undefined"
    bare = _MARKED_UP.sub(" ", gold)
    if _SIDE_BY_SIDE.search(bare):
        return "numbers stand side by side; write 1000 or 1,000 for one number, commas between several"
    letters = {letter for found in expressions for s in found.free_symbols for letter in str(s).lower()}
    for word in _BARE_WORD.findall(bare):
        if set(word.lower()) - {"e", "i"} <= letters:  # e and i are read as constants
            return (
                f"{word!r} would be read as a product of letters; "
                "write words as \\text{...} and functions with a backslash"
            )
    return "" if equal(gold, gold) else "it does not equal itself"


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that does not parse
    try:
        equal("1", r"\frac{1}{2}")  # the first one takes much longer
    except ImportError as error:
        connection.send_bytes(json.dumps(str(error)).encode())
        return
    connection.send_bytes(json.dumps("").encode())
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        signal.alarm(request["alarm"])
        gold, answer = request["gold"], request["answer"]
        reply = objection(gold) if answer is None else equal(gold, answer)
        signal.alarm(0)
        connection.send_bytes(json.dumps(reply).encode())


if __name__ == "__main__":
    main()
