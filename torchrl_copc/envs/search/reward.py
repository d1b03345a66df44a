"""The search task's reward: normalised exact match, worth more when a search helped."""

from __future__ import annotations

import re
import string
from collections.abc import Iterable

REWARD_WITH_SEARCH = 2.0
REWARD_WITHOUT_SEARCH = 1.1

_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(a|an|the)\b")


def normalize_answer(text: str) -> str:
    """SQuAD's normalisation: lower case, no ASCII punctuation, no articles, single spaces.

    Source: https://arxiv.org/abs/1606.05250 (the official evaluation script).

    Example:
        >>> normalize_answer("The  Vitamin A!"), normalize_answer("1,000")
        ('vitamin', '1000')
    """
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(prediction: str, answers: Iterable[str]) -> bool:
    """Whether ``prediction`` equals any gold answer after normalisation; an empty one matches nothing.

    Example:
        >>> exact_match("the Nile.", ["Nile"]), exact_match("the", ["a"])
        (True, False)
    """
    normalized = normalize_answer(prediction)
    return bool(normalized) and any(normalized == normalize_answer(answer) for answer in answers)


def extract_answer(text: str, opening: str = "<answer>", closing: str = "</answer>") -> str | None:
    """Content of the last complete answer in ``text``, the policy's own words of its final turn.

    Example:
        >>> extract_answer("<answer> x </answer> so <answer> y </answer> <answer> z")
        'y'
    """
    end = text.rfind(closing)
    start = text.rfind(opening, 0, max(end, 0))
    return text[start + len(opening) : end].strip() if start >= 0 else None


def search_reward(correct: bool, searched: bool) -> float:
    """2.0 for a right answer after a successful search, 1.1 for a right answer without one, else 0."""
    if not correct:
        return 0.0
    return REWARD_WITH_SEARCH if searched else REWARD_WITHOUT_SEARCH
