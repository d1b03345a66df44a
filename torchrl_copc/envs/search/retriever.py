"""Passages, the protocol every retriever follows, and the local engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Passage:
    """One retrievable piece of text.

    Args:
        id: unique within the corpus; breaks ties between equal scores.
        title: what the passage is about.
        text: the passage itself, without the title.
    """

    id: str
    title: str
    text: str
