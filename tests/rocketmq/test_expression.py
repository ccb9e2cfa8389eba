"""Filters in SQL92: what they mean, what is refused, and the same as PostgreSQL says where both say the same."""

from __future__ import annotations

import json
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sqlalchemy import Engine

from outbox.errors import BadExpression
from outbox.rocketmq.expression import MOST_CHARACTERS, MOST_DEPTH, compile_expression
from tests.kit import tries


def matches(text: str, **properties: str) -> bool:
    """Tell whether a filter matches."""
    return compile_expression(text)(properties)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a > 1", True),
        ("a>=2 AND a<=2.0", True),
        ("a <> 2 OR a != 2", False),
        ("a = 2", True),
        ("a = '2'", True),
        ("a = '2.0'", False),
        ("2 = a", True),
        ("a = 2L and A is null", True),
        ("a > -1e2 AND a < +.5E1", True),
        ("a BETWEEN 1 AND 3", True),
        ("a NOT BETWEEN 1 AND 3", False),
        ("a BETWEEN low AND 3", True),
        ("b IN ('x', 'y')", True),
        ("b not in ('x')", False),
        ("q = 'it''s'", True),
        ("q = 'AND /* '", False),
        ("c = TRUE AND c <> FALSE AND b = false", True),
        ("TRUE = c", True),
        ("(a = 2) = (b = 'x')", True),
        ("NOT (a = 3)", True),
        ("NOT (a = 3) = TRUE", True),
        ("NOT (a = 2 AND b = 'x') OR FALSE", False),
        ("NOT NOT TRUE", True),
        ("q CONTAINS '''s'", True),
        ("q NOT CONTAINS 'it'", False),
        ("q STARTSWITH 'it'", True),
        ("q NOT STARTSWITH 'it'", False),
        ("q ENDSWITH 's' AND q NOT ENDSWITH 't'", True),
        ("a = 1 OR a = 2 AND b = 'x'", True),
        ("(a = 1 OR a = 2) AND b = 'y'", False),
        ("a > 1 -- and a line of words\n AND /* more */ b = 'x'", True),
        ("TAGS = 'red'", True),
        ("half > 2", True),  # RocketMQ gives up, for 2 is an integer
    ],
)
def test_what_a_filter_means(text: str, *, expected: bool) -> None:
    """Each operator, each kind of constant, precedence and comments."""
    properties = {"a": "2", "b": "x", "c": "true", "q": "it's", "low": "1", "TAGS": "red", "half": "2.5"}
    assert matches(text, **properties) is expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a = 1", False),
        ("a <> 1", False),
        ("NOT (a = 1)", False),
        ("a > 1 OR b = 'x'", True),
        ("a > 1 AND b = 'x'", False),
        ("NOT (a > 1 AND b = 'y')", True),
        ("a IS NULL AND b IS NOT NULL", True),
        ("(a = 1) IS NULL", True),
        ("a NOT IN ('x')", False),
        ("a NOT BETWEEN 1 AND 2", False),
        ("NULL IS NULL", True),
        ("a = TRUE OR a = FALSE", False),
        # As RocketMQ: a search in what isn't there finds nothing, which isn't unknown.
        ("a CONTAINS 'x' OR a NOT CONTAINS 'x'", False),
        ("NOT (a CONTAINS 'x')", True),
        ("NOT (a STARTSWITH 'x')", True),
        ("NOT (a ENDSWITH 'x')", True),
        # As RocketMQ: two properties, of which one or both aren't there.
        ("a = missing", True),
        ("b <> a", True),
        ("a <> b", False),
        ("b > a", False),
    ],
)
def test_what_a_message_does_not_have_is_null(text: str, *, expected: bool) -> None:
    """A comparison with it is unknown, but for the two kinds that RocketMQ decides."""
    assert matches(text, b="x") is expected


def test_a_property_that_is_no_number_makes_its_comparison_unknown() -> None:
    """RocketMQ gives up on the whole filter: what one sender writes wrong would be passed over for ever."""
    assert matches("a > 1 OR b = 'x'", a="many", b="x")
    assert not matches("a > 1", a="many")
    assert not matches("NOT (a > 1)", a="many")
    assert not matches("a > 1", a="")
    assert not matches("a = 1", a="１")  # noqa: RUF001 - a digit, but no number of SQL
    assert not matches("a > 1", a="1e99999999999999999999")


@pytest.mark.parametrize(
    ("text", "position", "mend"),
    [
        ("", 1, "a property's name"),
        ("   ", 4, "a property's name"),
        ("a", 1, "write a condition"),
        ("a AND b = 1", 1, "write a condition"),
        ("b = 1 AND a", 11, "write a condition"),
        ("NOT a", 5, "such as NOT (…)"),
        ("NOT a IS NULL", 5, "such as NOT (…)"),
        ("1", 1, "write a condition"),
        ("a >", 4, "a property's name"),
        ("a > > 1", 5, "a property's name"),
        ("a > 'x'", 5, "compares numbers"),
        ("a < TRUE", 5, "compares numbers"),
        ("a BETWEEN 'x' AND 'y'", 11, "compares numbers"),
        ("a BETWEEN 3 AND 1", 11, "lower number first"),
        ("a BETWEEN 1 OR 3", 13, "write AND here"),
        ("a = NULL", 1, "IS NULL"),
        ("NULL <> a", 1, "IS NULL"),
        ("1 = TRUE", 1, "TRUE or FALSE"),
        ("'a' = (b = 1)", 1, "TRUE or FALSE"),
        ("a IS 1", 6, "write NULL here"),
        ("a IN (1)", 7, "text in quotes"),
        ("a IN ()", 7, "text in quotes"),
        ("a IN ('x' 'y')", 11, "write ) here"),
        ("'a' IN ('a')", 1, "name on the left"),
        ("1 CONTAINS 'x'", 1, "name on the left"),
        ("a CONTAINS b", 12, "text in quotes"),
        ("a CONTAINS ''", 14, "one character"),
        ("a NOT = 1", 7, "after NOT comes"),
        ("a = 1 = 2", 7, "AND or OR"),
        ("a = 1 b = 2", 7, "AND or OR"),
        ("(a = 1", 7, "write ) here"),
        ("a = 1)", 6, "AND or OR"),
        ("a = - b", 7, "after - comes a number"),
        ("a = 1; DROP TABLE t", 6, "begins so"),
        ("a = 'x", 5, "begins so"),
        ("a = 1 /* x", 7, "begins so"),
        ("1x = 2", 1, "begins so"),
        ("ü = 1", 1, "begins so"),
        ('"a" = 1', 1, "begins so"),
    ],
)
def test_what_is_refused(text: str, position: int, mend: str) -> None:
    """The error tells the position, the text there and the mend."""
    with pytest.raises(BadExpression) as caught:
        compile_expression(text)
    assert caught.value.position == position
    assert mend in str(caught.value)
    assert f"at character {position}, {text[position - 1 :]!r}" in str(caught.value)


def test_length_and_depth_have_an_end() -> None:
    """No consumer makes the server work for long, or overflows its stack."""
    long = "a = '" + "x" * (MOST_CHARACTERS - 6) + "'"
    assert not matches(long, a="x")
    with pytest.raises(BadExpression, match="16,384 characters"):
        compile_expression(long + " ")
    assert matches("(" * MOST_DEPTH + "a = 1" + ")" * MOST_DEPTH, a="1")
    for deep in ("(" * (MOST_DEPTH + 1) + "a = 1" + ")" * (MOST_DEPTH + 1), "NOT " * (MOST_DEPTH + 1) + "TRUE"):
        with pytest.raises(BadExpression, match="64 deep"):
            compile_expression(deep)
    # A long chain isn't deep.
    assert matches(" OR ".join(["a = 1"] * 1000) + " OR a = 2", a="2")


# --- compared with PostgreSQL: a filter is written twice, as a consumer writes it and as SQL over jsonb ---------------

_NAMES = ("a", "b", "c")
_TEXTS = (
    "",
    "x",
    "xy",
    "it's",
    "true",
    "TRUE",
    "False",
    "0",
    "1",
    "2",
    "2.0",
    "-3",
    "+4",
    "1e2",
    ".5",
    "7.",
    "1 ",
    "1,0",
)
_NUMBER = "'^ *[+-]?([0-9]+\\.?[0-9]*|\\.[0-9]+)([eE][+-]?[0-9]{1,6})? *$'"
_SEARCHED = {
    "CONTAINS": "strpos({0}, {1}) > 0",
    "STARTSWITH": "left({0}, length({1})) = {1}",
    "ENDSWITH": "right({0}, length({1})) = {1}",
}
#: A condition as a consumer writes it, and as PostgreSQL evaluates it.
Pair = tuple[str, str]


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _number(name: str) -> str:
    return f"CASE WHEN p->>'{name}' ~ {_NUMBER} THEN (p->>'{name}')::numeric END"


@st.composite
def comparisons(draw: st.DrawFn) -> Pair:
    """Draw a comparison of a property that both know."""
    name, other, text = (draw(st.sampled_from(each)) for each in (_NAMES, _NAMES, _TEXTS))
    low, high = sorted(draw(st.tuples(*[st.sampled_from((-3, 0, 0.5, 1, 2, 100))] * 2)))
    sign, same = draw(st.sampled_from(("=", "<>", "<", "<=", ">", ">="))), draw(st.sampled_from(("=", "<>")))
    word, search = draw(st.sampled_from(sorted(_SEARCHED.items())))
    truth, denied = draw(st.sampled_from(("TRUE", "FALSE"))), draw(st.sampled_from(("", "NOT ")))
    value, sought = f"(p->>'{name}')", _quoted(text or "x")
    pairs = [
        (f"{name} {sign} {low}", f"({_number(name)}) {sign} {low}"),
        (f"{name} {same} {_quoted(text)}", f"{value} {same} {_quoted(text)}"),
        (f"{name} = {truth}", f"(lower({value}) = 'true') = {truth}"),
        (f"{name} IS {denied}NULL", f"{value} IS {denied}NULL"),
        (f"{name} {denied}BETWEEN {low} AND {high}", f"({_number(name)}) {denied}BETWEEN {low} AND {high}"),
        (f"{name} {denied}IN ({sought}, 'x')", f"{value} {denied}IN ({sought}, 'x')"),
        (f"{name} {denied}{word} {sought}", f"coalesce({denied}({search.format(value, sought)}), false)"),
        (f"{name} < {other}", f"({_number(name)}) < ({_number(other)})"),
    ]
    return draw(st.sampled_from(pairs))


def _grow(inner: st.SearchStrategy[Pair]) -> st.SearchStrategy[Pair]:
    denied = inner.map(lambda each: (f"NOT ({each[0]})", f"NOT ({each[1]})"))
    joined = st.tuples(st.lists(inner, min_size=2, max_size=3), st.sampled_from((" AND ", " OR "))).map(
        lambda drawn: tuple(drawn[1].join(f"({each[side]})" for each in drawn[0]) for side in (0, 1))
    )
    flat = st.tuples(comparisons(), comparisons(), comparisons()).map(
        lambda three: tuple("{} OR {} AND {}".format(*(each[side] for each in three)) for side in (0, 1))
    )
    return st.one_of(denied, joined, flat)


_PIECES = (
    *("a", "b", "=", "<>", "<", ">=", "(", ")", "1", "-", "'x'", "''", ",", "--", "a = 1", "b = 'x'", "1.5e3"),
    *("NOT", "AND", "OR", "IS", "NULL", "TRUE", "IN", "BETWEEN", "CONTAINS"),
)
FILTERS = st.recursive(comparisons(), _grow, max_leaves=8)
MESSAGES = st.lists(st.dictionaries(st.sampled_from(_NAMES), st.sampled_from(_TEXTS)), min_size=1, max_size=8)


@given(filter_=FILTERS, messages=MESSAGES)
@settings(max_examples=tries(150), suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
def test_the_same_as_postgresql_says(filter_: Pair, messages: list[dict[str, str]], engine: Engine) -> None:
    """The same filter over the same properties as jsonb matches the same messages."""
    ours, theirs = filter_
    statement = f"SELECT ({theirs}) IS TRUE FROM jsonb_array_elements(%s) WITH ORDINALITY AS e(p, n) ORDER BY n"
    with engine.connect() as connection:
        expected = connection.exec_driver_sql(statement, (json.dumps(messages),)).scalars().all()
    assert [compile_expression(ours)(each) for each in messages] == list(expected)


@given(
    text=st.text(max_size=60) | st.lists(st.sampled_from(_PIECES), max_size=14).map(" ".join),
    properties=st.dictionaries(st.sampled_from(_NAMES), st.text(max_size=8)),
)
@settings(max_examples=tries(300))
def test_any_text_is_a_filter_or_is_refused(text: str, properties: dict[str, str]) -> None:
    """No text raises anything else, and no property does when a filter is evaluated."""
    try:
        matches = compile_expression(text)
    except BadExpression as error:
        assert 1 <= error.position <= len(text) + 1
    else:
        assert matches(properties) in {True, False}


def test_long_digits_take_no_time() -> None:
    """Neither as a filter nor as a property: the loop that serves all clients would stand still."""
    digits = "1" * 16_000 + "x"
    began = time.process_time()
    with pytest.raises(BadExpression):
        compile_expression(digits)
    for value in (digits, "." + digits, " " * 16_000 + "x"):
        assert not compile_expression("a > 1")({"a": value})
    assert time.process_time() - began < 1
