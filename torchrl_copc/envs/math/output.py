"""What the policy reads of a run: standard output and the error's last line, the middle cut out if it is long."""

from __future__ import annotations

from torchrl_copc.envs.sandbox import SandboxConfig, SandboxResult


def output_text(result: SandboxResult, config: SandboxConfig) -> str:
    """Standard output, then the last line of standard error, then why the code was ended, if it was.

    Args:
        result: of the sandbox.
        config: the limits it ran under.

    Example:
        >>> trace = "Traceback (most recent call last):\\n  ...\\nZeroDivisionError: division by zero\\n"
        >>> print(output_text(SandboxResult("error", "7\\n", trace, 0.01), SandboxConfig()))
        7
        ZeroDivisionError: division by zero
    """
    ended = {
        "timeout": f"The code was stopped after {config.timeout:g} seconds.",
        "memory": f"The code needed more than {config.memory_mb} MiB of memory.",
        "output_limit": f"The code was stopped because it printed more than {config.max_output_bytes} bytes.",
        "killed": "The interpreter crashed.",
    }
    error = result.stderr.rstrip().rpartition("\n")[2]
    if result.status == "error" and not error:
        error = "The code ended with a non-zero exit status."
    parts = (result.stdout.rstrip(), error, ended.get(result.status, ""))
    return "\n".join(part for part in parts if part)


def cut_middle(text: str, limit: int) -> str:
    """``text``, or the first and last characters of it, ``limit`` together, around a note of how many are missing.

    Example:
        >>> cut_middle("abcdefghij", 4)
        'ab\\n[... 6 characters ...]\\nij'
    """
    missing = len(text) - limit
    if missing <= 0:
        return text
    head = (limit + 1) // 2
    return f"{text[:head]}\n[... {missing} characters ...]\n{text[head + missing :]}"
