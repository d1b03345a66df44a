"""``python -m torchrl_copc.envs.sandbox < code.py`` prints one JSON line: status, stdout, stderr, seconds."""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import sys
from dataclasses import asdict

from torchrl_copc.envs.sandbox.client import Sandbox
from torchrl_copc.envs.sandbox.config import AUTO, ISOLATIONS, SandboxConfig, SandboxError


async def _run(config: SandboxConfig, code: str) -> str:
    async with Sandbox(config) as sandbox:
        return json.dumps(asdict(await sandbox.run(code)))


def main() -> None:
    """Exit status 0 whatever the code does; 1 if the sandbox itself fails."""
    parser = argparse.ArgumentParser(prog="python -m torchrl_copc.envs.sandbox", description=__doc__)
    parser.add_argument("--timeout", type=float, default=5.0, help="seconds")
    parser.add_argument("--memory-mb", type=int, default=512)
    parser.add_argument("--isolation", choices=(AUTO, *ISOLATIONS), default=AUTO)
    parser.add_argument("--unsafe", action="store_true", help="run without isolation where none works")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    if sys.stdin is None:
        sys.exit("sandbox: standard input is closed; the code is read from it")
    code = sys.stdin.buffer.read().decode("utf-8", "surrogateescape")
    try:
        config = SandboxConfig(workers=1, **vars(arguments))
        print(asyncio.run(_run(config, code)))
    except (SandboxError, ValueError) as error:
        sys.exit(f"sandbox: {error}")


if __name__ == "__main__":
    main()
