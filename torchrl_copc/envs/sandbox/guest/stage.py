"""Runs bubblewrap as nobody when root starts the sandbox. Runs outside the sandbox, before it.

Limits on the number of processes do not hold for root, so root must not enter. But nobody may be unable to reach
the interpreter (in root's home, say): root first binds what bubblewrap needs to one place that everybody can
read, in a mount namespace of its own, which ends with the sandbox and leaves nothing on the host.

Arguments: a JSON list of paths, then the command, in which ``{stage}`` stands before each of them.
"""

from __future__ import annotations

import json
import os
import sys

from .libc import CLONE_NEWNS, MS_BIND, MS_NODEV, MS_NOSUID, MS_PRIVATE, MS_REC, as_nobody, call, mount

STAGE = "/tmp"  # exists everywhere; covered in our mount namespace only


def main() -> None:
    paths, command = json.loads(sys.argv[1]), sys.argv[2:]
    stage = STAGE
    try:
        call("unshare", CLONE_NEWNS)
    except (
        PermissionError
    ):  # root of a container without CAP_SYS_ADMIN: nobody must be able to read the paths
        stage = ""
    else:
        _bind(paths)
    as_nobody()
    command = [argument.replace("{stage}", stage) for argument in command]
    os.execv(command[0], command)


def _bind(paths: list[str]) -> None:
    sources = {
        path: os.open(path, os.O_PATH | os.O_CLOEXEC) for path in paths
    }  # before the stage covers them
    mount("", "/", "", MS_REC | MS_PRIVATE)
    mount("tmpfs", STAGE, "tmpfs", MS_NOSUID | MS_NODEV, "mode=0755")
    for path, descriptor in sources.items():
        target = STAGE + path
        if os.path.isdir(path_of := f"/proc/self/fd/{descriptor}"):
            os.makedirs(target, exist_ok=True)
        else:
            os.makedirs(os.path.dirname(target), exist_ok=True)
            os.close(os.open(target, os.O_CREAT | os.O_WRONLY | os.O_CLOEXEC, 0o644))
        mount(path_of, target, "", MS_BIND | MS_REC)


if __name__ == "__main__":
    main()
