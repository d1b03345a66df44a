from __future__ import annotations

import pytest

from torchrl_copc.envs.search.reward import exact_match, extract_answer, normalize_answer, search_reward


@pytest.mark.parametrize(
    ("prediction", "gold", "equal"),
    [
        ("1,000", "1000", True),
        ("Vitamin A", "vitamin", True),
        ("5", "five", False),
        ("The  Nile.", "nile", True),
        ("An apple a day", "apple day", True),
        ("theatre", "atre", False),
        ("O’Brien", "OBrien", False),  # a curly apostrophe is not ASCII punctuation
        ("O'Brien", "OBrien", True),
        ("1914–1918", "19141918", False),  # nor is an en dash
        ("1914-1918", "19141918", True),
        ("São Tomé", "Sao Tome", False),
        ("", "", False),
        ("the", "a", False),  # both empty after normalising
        ("!?", "...", False),
    ],
)
def test_exact_match(prediction, gold, equal):
    assert exact_match(prediction, [gold]) is equal
    assert exact_match(prediction, ["something else", gold]) is equal


def test_normalisation_keeps_what_is_not_ascii_punctuation():
    assert normalize_answer("O’Brien’s – the “Best”") == "o’brien’s – “best”"


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer> Bamako </answer>", "Bamako"),
        ("<answer>a</answer> no, <answer>b</answer>", "b"),
        ("<answer>a</answer> then <answer>b", "a"),
        ("<answer>a <answer>b</answer>", "b"),
        ("</answer> <answer>", None),
        ("Bamako", None),
        ("<answer></answer>", ""),
    ],
)
def test_the_last_complete_answer_is_extracted(text, answer):
    assert extract_answer(text) == answer


def test_reward_is_shaped_by_search():
    assert [search_reward(c, s) for c, s in [(True, True), (True, False), (False, True), (False, False)]] == [
        2.0,
        1.1,
        0.0,
        0.0,
    ]
