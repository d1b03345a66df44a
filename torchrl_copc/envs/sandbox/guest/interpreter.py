"""Runs one piece of code as ``__main__``, with the ending a script would have."""

from __future__ import annotations

import ast
import atexit
import builtins
import contextlib
import linecache
import os
import sys
import threading
import traceback
import types
from typing import NoReturn, TextIO

FILENAME = "main.py"
OUT_OF_MEMORY = 118  # exit status; code that exits with it is reported as out of memory, to nobody's harm

_exit = os._exit  # before any code can replace it
_DISPLAY = ast.parse("__import__('sys').displayhook", mode="eval").body  # prints nothing for None


def run(code: str, *, print_last: bool) -> NoReturn:
    """Execute ``code`` and end the process.

    The exit status is a script's, except ``OUT_OF_MEMORY``. After an exception, threads are not waited for.

    Args:
        code: Python source.
        print_last: print the value of a last line that is an expression, as an interactive session does.
    """
    # Lines leave at once: what was printed before a kill is kept. Lone surrogates must not raise.
    sys.stdin = open(0, closefd=False)  # noqa: SIM115
    sys.stdout = _stream(1, "replace")
    sys.stderr = _stream(2, "backslashreplace")
    sys.argv = [FILENAME]
    main = types.ModuleType("__main__")
    main.__dict__["__builtins__"] = builtins
    sys.modules["__main__"] = main
    linecache.cache[FILENAME] = (len(code), None, code.splitlines(keepends=True), FILENAME)
    status = 1
    try:
        status = _execute(code, print_last, main.__dict__)
    finally:
        _exit(status)


def _stream(descriptor: int, errors: str) -> TextIO:
    return open(descriptor, "w", buffering=1, encoding="utf-8", errors=errors, closefd=False)


def _execute(code: str, print_last: bool, namespace: dict[str, object]) -> int:
    status = 0
    try:
        try:
            exec(_compile(code, print_last), namespace)
        except SystemExit as ending:
            status = _exit_status(ending.code)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        _flush()
    except BaseException as error:
        return _report(error, namespace)
    return status


def _compile(code: str, print_last: bool) -> types.CodeType:
    if not print_last:
        return _code_object(code)
    tree = compile(code, FILENAME, "exec", ast.PyCF_ONLY_AST, dont_inherit=True)
    assert isinstance(tree, ast.Module)
    if tree.body and isinstance(last := tree.body[-1], ast.Expr):
        last.value = ast.copy_location(ast.Call(_DISPLAY, [last.value], []), last.value)
        ast.fix_missing_locations(tree)
    return _code_object(tree)


def _code_object(source: str | ast.Module) -> types.CodeType:
    compiled: types.CodeType = compile(source, FILENAME, "exec", dont_inherit=True)
    return compiled


def _exit_status(code: object) -> int:
    if code is None:
        return 0
    if isinstance(code, int):
        return code & 0xFF
    with contextlib.suppress(BaseException):
        print(code, file=sys.stderr)
    return 1


def _report(error: BaseException, namespace: dict[str, object]) -> int:
    """Print the traceback as Python does, without this file's frames; without memory, after freeing some."""
    memory = isinstance(error, MemoryError)
    if memory:
        traceback.clear_frames(error.__traceback__)
        namespace.clear()
    try:
        frame = error.__traceback__
        while frame is not None and frame.tb_frame.f_code.co_filename == __file__:
            frame = frame.tb_next
        traceback.print_exception(type(error), error, frame)
    except BaseException:
        with contextlib.suppress(BaseException):
            os.write(2, type(error).__name__.encode() + b"\n")
    _flush()
    return OUT_OF_MEMORY if memory else 1


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(BaseException):
            stream.flush()
