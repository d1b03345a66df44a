"""The program of a judge's process: answers one question at a time with math-verify, until its pipe closes.

It has imported math-verify and forks a worker, which answers. A worker that takes too much processor time is
ended by its own timer and replaced by the next fork, in milliseconds. Run by path, not imported: a child that
imported the package would load torch.
"""

from __future__ import annotations

import json
import logging
import os
import re
import resource
import signal
import sys
from multiprocessing.connection import Connection, Pipe
from typing import Any

MEMORY_LIMIT = 2**30  # bytes of address space; a tower of powers takes all there is

# The first answer of a kind takes much longer, and a fork knows what its parent has seen.
WARM_UP = (
    ("1", r"\frac{1}{2}"),
    ("x^2+2x+1", "(x+1)^{2}"),
    (r"2\sqrt{2}", r"\sqrt[3]{8}\cdot 3!"),
    (r"\{1,\frac{\pi}{4}\}", r"\left\{1, 2.5\right\}"),
    ("(1,2]", r"x\le 3\text{ cm}"),
    (r"\binom{n}{2}", r"\sin x+\log_{2} n"),
)

# A word that stands bare in a formula is read as a product of letters (so that yes = sey) or passed over.
_MARKED_UP = re.compile(
    r"\\begin\s*\{array\}\s*\{[^{}]*\}|\\(?:text\w*|mbox|mathrm|operatorname|begin|end)\s*\{[^{}]*\}|\\[A-Za-z]+"
)
_BARE_WORD = re.compile(r"[A-Za-z]{3,}")
_BARE_WORDS = re.compile(r"[A-Za-z]{2,}\s+[A-Za-z]+|[A-Za-z]+\s+[A-Za-z]{2,}")
_READ_AS_MEANT = {"sqrt"}
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
    words = [word for word in _BARE_WORD.findall(bare) if word not in _READ_AS_MEANT] or _BARE_WORDS.findall(
        bare
    )
    if words:
        return (
            f"{words[0]!r} would be read as a product of letters or passed over; "
            "write words as \\text{...}, functions with a backslash, and products as x \\cdot y \\cdot z"
        )
    return "" if equal(gold, gold) else "it does not equal itself"


class _Worker:
    """A fork that answers questions. Without threads a fork is safe."""

    def __init__(self, parents: Connection) -> None:
        self.connection, theirs = Pipe()
        self.pid = os.fork()
        if self.pid == 0:
            parents.close()
            self.connection.close()
            _answer_questions(theirs)
            os._exit(0)
        theirs.close()

    def ask(self, request: bytes) -> bytes | None:
        try:
            self.connection.send_bytes(request)
            return self.connection.recv_bytes()
        except (EOFError, OSError):
            return None

    def reap(self) -> int:
        """The signal that ended it, or 0."""
        self.connection.close()
        _, status = os.waitpid(self.pid, 0)
        return os.WTERMSIG(status) if os.WIFSIGNALED(status) else 0


def _answer_questions(connection: Connection) -> None:
    while True:
        try:
            request = json.loads(connection.recv_bytes())
        except EOFError:
            return
        # Processor time, so that no right answer is late because the machine is busy.
        signal.setitimer(signal.ITIMER_PROF, request["deadline"])
        gold, answer = request["gold"], request["answer"]
        reply = objection(gold) if answer is None else equal(gold, answer)
        signal.setitimer(signal.ITIMER_PROF, 0)
        connection.send_bytes(json.dumps({"reply": reply}).encode())


def main() -> None:
    connection = Connection(int(sys.argv[1]))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = MEMORY_LIMIT if hard == resource.RLIM_INFINITY else min(hard, MEMORY_LIMIT)
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
    logging.disable(logging.CRITICAL)  # math-verify logs every answer that does not parse
    try:
        for gold, answer in WARM_UP:
            equal(gold, answer)
    except ImportError as error:
        connection.send_bytes(json.dumps(str(error)).encode())
        return
    connection.send_bytes(json.dumps("").encode())
    worker = _Worker(connection)
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        reply = worker.ask(request)
        if reply is None:
            failure = "late" if worker.reap() == signal.SIGPROF else "died"
            worker = _Worker(connection)
            reply = json.dumps({"failure": failure}).encode()
        try:
            connection.send_bytes(reply)
        except OSError:  # the parent is gone
            return


if __name__ == "__main__":
    main()
