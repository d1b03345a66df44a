"""Maths problems: generated ones split without overlap and right, files read whole or refused with their row."""

from __future__ import annotations

import ast
import doctest
import importlib
import json
import math
import operator
import os
import re
import subprocess
import sys
from datetime import datetime, timedelta
from hashlib import sha256

import pytest

pytest.importorskip("math_verify")
pytest.importorskip("reasoning_gym")
pytest.importorskip("champ_dataset")

from torchrl_copc.envs.math import load_math, load_reasoning_gym, verify_answer
from torchrl_copc.envs.math.data import HUB_SETS
from torchrl_copc.envs.math.generated import MIXTURE
from torchrl_copc.envs.records import DataError

SIZES = {"train": 1800, "dev": 270, "test": 540}


def write(path, *records):
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records), encoding="utf-8")
    return str(path)


# Generated problems.


@pytest.fixture(scope="module")
def generated():
    return {split: load_reasoning_gym(split, size) for split, size in SIZES.items()}


def test_splits_share_no_question_and_no_seed(generated):
    for first, second in (("train", "dev"), ("train", "test"), ("dev", "test")):
        for of in (lambda p: " ".join(p.question.lower().split()), lambda p: p.id):
            assert not {of(p) for p in generated[first]} & {of(p) for p in generated[second]}
    for prompts in generated.values():
        assert len({p.question for p in prompts}) == len({p.id for p in prompts}) == len(prompts)


def test_generators_take_turns_and_all_answers_are_integers(generated):
    for prompts in generated.values():
        assert [p.metadata["task"] for p in prompts] == [*MIXTURE] * (len(prompts) // len(MIXTURE))
        assert all(re.fullmatch(r"-?\d+", p.answers[0]) for p in prompts)
        assert all(p.metadata["data_source"] == "reasoning_gym" for p in prompts)


def value(text):
    """An arithmetic expression, read by Python's own parser."""
    operators = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}

    def of(node):
        if isinstance(node, ast.BinOp):
            return operators[type(node.op)](of(node.left), of(node.right))
        return -of(node.operand) if isinstance(node, ast.UnaryOp) else node.value

    return of(ast.parse(text.strip(), mode="eval").body)


def numbers(text):
    return [int(number) for number in re.findall(r"\d+", text)]


def is_prime(n):
    return n > 1 and all(n % d for d in range(2, math.isqrt(n) + 1))


def letters(question):
    letter, text = re.fullmatch(r'.* letter "(.)" .* text: "(.*)"\?', question, re.DOTALL).groups()
    return sum(character == letter for character in text.lower())


def days(question):
    year = int(re.search(r", (\d{4})", question).group(1))
    dates = re.findall(r"\w+, ([A-Z][a-z]+ \d+)", question)
    start, end = (datetime.strptime(f"{date} {year}", "%B %d %Y") for date in dates)
    without_dates = re.sub(r"\w+, [A-Z][a-z]+ \d+", "", question)
    (name,) = re.findall(r"(?:Mon|Tues|Wednes|Thurs|Fri|Satur|Sun)day", without_dates)
    return sum((start + timedelta(n)).strftime("%A") == name for n in range((end - start).days + 1))


SOLVE = {
    "chain_sum": lambda q: value(q.partition(":")[2].strip(" =")),
    "basic_arithmetic": lambda q: value(re.sub(r"^[^-(\d]*|[^\d)]*$", "", q)),
    "gcd": lambda q: math.gcd(*numbers(q.partition(":")[2])),
    "lcm": lambda q: math.lcm(*numbers(q.partition(":")[2])),
    "count_primes": lambda q: sum(map(is_prime, range(numbers(q)[0], numbers(q)[1] + 1))),
    "calendar_arithmetic": days,
    "letter_counting": letters,
    "count_bits": lambda q: bin(numbers(q)[-1]).count("1"),
}


@pytest.mark.parametrize("task", SOLVE)
def test_gold_answers_are_right(generated, task):
    prompts = [p for p in generated["test"] if p.metadata["task"] == task]
    assert len(prompts) == 60
    assert [(p.question, SOLVE[task](p.question)) for p in prompts] == [
        (p.question, int(p.answers[0])) for p in prompts
    ]


def test_our_verdict_agrees_with_the_generators_own_scorer(generated):
    import reasoning_gym

    for prompt in generated["dev"]:
        gold = prompt.answers[0]
        task = prompt.metadata["task"]
        score = reasoning_gym.get_score_answer_fn(task)
        entry = {"answer": gold, "metadata": {"task": MIXTURE[task].get("tasks", [None])[0]}}
        for answer in (gold, str(int(gold) + 1)):
            ours = verify_answer(gold, rf"\boxed{{{answer}}}")
            assert ours == (score(answer, entry) == 1.0)


def test_a_smaller_size_is_the_beginning_of_a_larger_one(generated):
    assert load_reasoning_gym("train", 50) == generated["train"][:50]


@pytest.mark.slow  # imports torch anew
def test_problems_are_the_same_in_every_process(generated):
    program = (
        "from hashlib import sha256; from torchrl_copc.envs.math import load_reasoning_gym; "
        "print(sha256(repr(load_reasoning_gym('test', 90)).encode()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "1"}
    result = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, timeout=120
    )
    assert result.stdout.strip() == sha256(repr(generated["test"][:90]).encode()).hexdigest(), result.stderr


def test_few_different_questions_are_still_divided_among_the_splits():
    tasks = {"gcd": {"min_value": 1, "max_value": 12}}  # 144 questions
    train, test = load_reasoning_gym("train", 80, tasks), load_reasoning_gym("test", 15, tasks)
    assert not {p.question for p in train} & {p.question for p in test}
    with pytest.raises(DataError, match=r"gcd .* has only \d+ different questions for split 'test'"):
        load_reasoning_gym("test", 144, tasks)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("valid", 3), ValueError, "split='valid': choose one of train, dev, test"),
        (("train", 0), ValueError, "size=0"),
        (("train", 3, {}), ValueError, "tasks is empty"),
        (("train", 3, {"nothing": {}}), ValueError, "nothing"),
        (("train", 3, {"gcd": {"max_val": 3}}), ValueError, "max_val"),
        (("train", 3, {"chain_sum": {"min_terms": 9}}), ValueError, "max_terms must be >= min_terms"),
        (("train", 3, {"sudoku": {}}), DataError, "sudoku, seed .* side by side.* leave this generator out"),
    ],
)
def test_bad_arguments_are_named(arguments, error, message):
    with pytest.raises(error, match=message):
        load_reasoning_gym(*arguments)


# CHAMP.


def test_champ_holds_the_problems_with_verifiable_answers():
    problems = {p.id: p for p in load_math("champ")}
    assert len(problems) == 184
    assert len({p.question for p in problems.values()}) == 184
    assert {p.metadata["category"] for p in problems.values()} == {
        "Combinatorics",
        "Inequality",
        "Number-Theory",
        "Polynomial",
        "Sequence",
    }
    answers = {name: problems[f"champ-{name}"].answers for name in ("Combinatorics_29", "Sequence_7")}
    assert answers == {
        "Combinatorics_29": (r"\binom{n}{4}", "n(n-1)(n-2)(n-3)/4!"),
        "Sequence_7": ("3",),  # "The limit exists and is equal to 3"
    }


@pytest.mark.parametrize(
    ("name", "response", "right"),
    [
        ("Combinatorics_2", r"\boxed{252}", True),
        ("Combinatorics_16", r"\boxed{\binom{n+1}{2m+1}}", True),
        ("Combinatorics_35", r"\boxed{\frac{(2n)!}{2^n\,n!}}", True),
        ("Combinatorics_35", r"\boxed{\frac{(2n)!}{n!}}", False),
        ("Combinatorics_37", r"\boxed{\frac{n(n+1)(2n+1)}{6}}", True),
        ("Inequality_1", r"\boxed{[-1,1]}", True),
        ("Inequality_1", r"\boxed{(-1,1)}", False),
        ("Inequality_17", r"\boxed{1-2^{-1/n}}", True),
        ("Inequality_18", r"\boxed{\frac{\sqrt3}{3}}", True),
        ("Number-Theory_3", r"\boxed{625, 376}", True),
        ("Number-Theory_3", r"\boxed{\{376,625\}}", True),
        ("Number-Theory_3", r"\boxed{376,625}", False),  # one number
        ("Number-Theory_3", r"\boxed{376\text{ and }625}", False),  # to math-verify as well
        ("Number-Theory_53", r"\boxed{1, 4\text{ and }9}", True),
        ("Number-Theory_3", r"\boxed{376}", False),
        ("Polynomial_7", r"\boxed{2-2x}", True),
        ("Sequence_41", r"\boxed{\frac{1+\sqrt{1+4a}}{2}}", True),
    ],
)
def test_champ_answers_as_a_policy_would_write_them(name, response, right):
    (problem,) = (p for p in load_math("champ") if p.id == f"champ-{name}")
    assert any(verify_answer(gold, response) for gold in problem.answers) is right


def test_every_champ_answer_is_right_in_its_own_words():
    for problem in load_math("champ"):
        for gold in problem.answers:
            assert verify_answer(gold, rf"\boxed{{{gold}}}"), problem


# Files and the hub.


def test_a_file_keeps_its_order_and_may_be_cut(tmp_path):
    records = [{"input": f" What is ${n}+{n}$?\n", "output": str(2 * n)} for n in range(5)]  # ReTool's shape
    path = write(tmp_path / "aime24.jsonl", *records)
    prompts = load_math(path)
    assert [(p.id, p.question) for p in prompts] == [(f"aime24-{n}", f"What is ${n}+{n}$?") for n in range(5)]
    assert [p.answers for p in prompts] == [("0",), ("2",), ("4",), ("6",), ("8",)]
    assert load_math(path, limit=2) == prompts[:2]


SHAPES = [
    ({"ID": "2024-I-1", "Problem": "p", "Solution": "long", "Answer": 25}, "2024-I-1", "25"),
    ({"problem_idx": 7, "problem": "p", "answer": r"\frac{1}{2}"}, "7", r"\frac{1}{2}"),
    ({"problem": "p", "answer": "12"}, "0", "12"),
    ({"prompt": "p", "solution": "34", "data_source": "math_dapo"}, "0", "34"),
    ({"input": "p", "output": "56"}, "0", "56"),
    ({"question": "p", "answer": 4.0}, "0", "4"),
    ({"question": "p", "answer": 0.25}, "0", "0.25"),
    ({"problem": "p", "solution": r"As 1 = 1, the value is \boxed{\frac{3}{4}}.", "level": 5}, "0", None),
]


@pytest.mark.parametrize(("record", "name", "answer"), SHAPES)
def test_shapes_of_records(tmp_path, record, name, answer):
    (prompt,) = load_math(write(tmp_path / "set.jsonl", record))
    assert (prompt.id, prompt.question) == (f"set-{name}", "p")
    assert prompt.metadata == {"data_source": "set"}
    assert verify_answer(prompt.answers[0], rf"\boxed{{{answer or '3/4'}}}")
    assert answer is None or prompt.answers == (answer,)


GOOD = {"id": "same", "problem": "p", "answer": "1"}


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"answer": "1"}, r"row 1: no column `problem` or .*; rename one of \['answer'\]"),
        ({"problem": "p"}, "row 1: no column `answer` or"),
        ({"problem": 3, "answer": "1"}, "row 1: `problem` is a int"),
        ({"problem": " ", "answer": "1"}, "row 1: `problem` is empty"),
        ({"problem": "p", "answer": ""}, "row 1: `answer`: .* it is empty"),
        ({"problem": "p", "answer": None}, r"row 1: `answer` is None \(NoneType\)"),
        ({"problem": "p", "answer": True}, "row 1: `answer` is True"),
        ({"problem": "p", "answer": ["1", "2"]}, "row 1: `answer` is .*one answer"),
        ('{"problem": "p", "answer": NaN}', "row 1: `answer` is nan"),
        ({"problem": "p", "answer": r"\frac{1}{"}, "row 1: `answer`: .*does not parse.*correct the answer"),
        ({"problem": "p", "answer": "see the solution"}, "row 1: `answer`: .*product of letters"),
        ({"id": None, "problem": "p", "answer": "1"}, "row 1: `id` is None"),
        (GOOD, "row 1: id 'set-same' occurred before"),
        ("{not json", "row 1: not JSON"),
        ("[1, 2]", "row 1: a list; write one object a line"),
        (
            '{"problem": "p", "answer": ' + "1" * 5_000 + "}",
            "row 1: a number of more than 4300 digits; write it as text",
        ),
        ('{"problem": ' + "[" * 100_000, "row 1: nested too deeply"),
        ({"problem": "p", "answer": "yes"}, r"row 1: `answer`: .*'yes' .*\\text"),
        ({"problem": "p", "solution": "We get 3."}, "row 1: `solution`: .*'get'"),
        ({"problem": "p", "answer": "9^{9^{9^{9}}}"}, "row 1: `answer`: .*too large"),
    ],
)
def test_bad_records_are_refused_with_their_row(tmp_path, record, message):
    path = write(tmp_path / "set.jsonl", GOOD, record)
    with pytest.raises(DataError, match=re.escape(path) + ", " + message):
        load_math(path)


def test_a_long_number_as_text_is_a_gold_answer(tmp_path):
    (prompt,) = load_math(write(tmp_path / "set.jsonl", {"problem": "p", "answer": "1" * 5_000}))
    assert verify_answer(prompt.answers[0], r"\boxed{" + "1" * 5_000 + "}")
    assert not verify_answer(prompt.answers[0], r"\boxed{" + "1" * 4_999 + "2}")


def test_blank_lines_are_skipped_and_counted(tmp_path):
    path = write(tmp_path / "set.jsonl", "", GOOD, "", {"problem": "p"})
    with pytest.raises(DataError, match="row 3: no column"):
        load_math(path)


def test_bytes_that_are_no_text_are_refused_with_their_row(tmp_path):
    path = tmp_path / "set.jsonl"
    path.write_bytes(b'{"problem": "p", "answer": 1}\n{"problem": "caf\xe9", "answer": 1}\n')
    with pytest.raises(DataError, match="row 1: not UTF-8"):
        load_math(str(path))


def test_empty_and_missing_files_are_named(tmp_path):
    with pytest.raises(DataError, match=r"set\.jsonl: no records"):
        load_math(write(tmp_path / "set.jsonl"))
    for name in ("none.jsonl", "none.parquet"):
        with pytest.raises(FileNotFoundError, match=name):
            load_math(str(tmp_path / name))
    with pytest.raises(DataError, match=r"source='aime42' is no known set \(champ, aime24, "):
        load_math("aime42")


def test_a_parquet_file_replaces_a_set(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    path = tmp_path / "brumo25.parquet"
    rows = {"problem_idx": [1, 2], "problem": ["p", "q"], "answer": ["5", r"\frac{\pi}{2}"]}
    datasets.Dataset.from_dict(rows).to_parquet(str(path))
    assert [(p.id, p.answers[0]) for p in load_math(str(path))] == [
        ("brumo25-1", "5"),
        ("brumo25-2", r"\frac{\pi}{2}"),
    ]
    broken = tmp_path / "broken.parquet"
    broken.write_bytes(b"PAR1 but no more")
    with pytest.raises(DataError, match=r"broken\.parquet .*cannot be read"):
        load_math(str(broken))


def test_named_sets_come_from_the_hub(monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = []

    def load_dataset(repository, config, split):
        asked.append((repository, config, split))
        return datasets.Dataset.from_list([{"problem": "p", "answer": 1}])

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    assert [load_math(name)[0].id for name in HUB_SETS] == [f"{name}-0" for name in HUB_SETS]
    assert load_math("owner/other", split="dev")[0].id == "other-0"
    assert asked == [
        ("Maxwell-Jia/AIME_2024", None, "train"),
        ("MathArena/aime_2025", None, "train"),
        ("MathArena/aime_2026", None, "train"),
        ("MathArena/brumo_2025", None, "train"),
        ("ByteDance-Seed/BeyondAIME", None, "test"),
        ("open-r1/DAPO-Math-17k-Processed", "en", "train"),
        ("owner/other", None, "dev"),
    ]


def test_an_unreachable_hub_says_what_else_to_give(monkeypatch):
    datasets = pytest.importorskip("datasets")

    def load_dataset(*_, **__):
        raise ConnectionError("no network")

    monkeypatch.setattr(datasets, "load_dataset", load_dataset)
    with pytest.raises(
        DataError, match=r"MathArena/aime_2025 .*no network.*give a \.jsonl or \.parquet file"
    ):
        load_math("aime25")


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "set.parquet").touch()
    for package, load in (
        ("datasets", lambda: load_math("aime24")),
        ("datasets", lambda: load_math(str(tmp_path / "set.parquet"))),
        ("reasoning_gym", lambda: load_reasoning_gym("train", 1)),
    ):
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match="pip install"):
            load()


@pytest.mark.parametrize("name", ["math.data", "math.champ", "math.generated", "records"])
def test_examples_in_docstrings(name):
    outcome = doctest.testmod(importlib.import_module(f"torchrl_copc.envs.{name}"))
    assert outcome.failed == 0 and outcome.attempted > 0
