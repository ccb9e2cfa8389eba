"""Saved filters: each user's own, the newest of a name, and nothing in the audit that bodies hide."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from sqlalchemy import Engine

from outbox import Settings
from outbox.errors import ActRefused, InvalidRequest, NotFound
from outbox.operator.filters import MOST_FILTERS
from outbox.operator.model import AuditFilter, PageRequest
from outbox.operator.operator import Operator
from tests.operator.health import sql


@pytest.fixture
def operator(engine: Engine) -> Operator:
    """An operator over one database."""
    return Operator.open({"bank": engine}, Settings())


def saved(operator: Operator, of: str = "messages", by: str = "ada") -> dict[str, str]:
    """The queries of the saved filters by name."""
    return {each.name: each.query for each in operator.saved_filters(of, by)}


def test_a_user_has_filters_of_each_list(operator: Operator) -> None:
    """They are told by name, with all their conditions; another user, and another list, has others."""
    operator.save_filter("refused", "messages", "topic=orders&status=parked&status=failed&body=order.id%3D42", by="ada")
    operator.save_filter("all of ann", "messages", "key=ann%26co", by="ada")
    operator.save_filter("refused", "messages", "topic=payments", by="bob")
    operator.save_filter("old", "bulk-jobs", "state=done", by="ada")
    found = saved(operator)
    assert list(found) == ["all of ann", "refused"]
    assert found["all of ann"] == "key=ann%26co"
    assert sorted(found["refused"].split("&")) == [
        "body=order.id%3D42", "status=failed", "status=parked", "topic=orders"
    ]  # fmt: skip
    assert saved(operator, by="bob") == {"refused": "topic=payments"}
    assert saved(operator, "bulk-jobs") == {"old": "state=done"}
    assert saved(operator, by="eve") == {}


def test_the_last_of_a_name_tells(operator: Operator) -> None:
    """One is replaced by the next of its name, is gone when it is deleted, and can be saved again."""
    for query in ("topic=a", "topic=b"):
        operator.save_filter("mine", "inbox", query, by="ada")
    assert saved(operator, "inbox") == {"mine": "topic=b"}
    assert "deleted" in operator.delete_filter("mine", "inbox", by="ada")
    assert saved(operator, "inbox") == {}
    for name in ("mine", "other"):
        with pytest.raises(NotFound, match=name):
            operator.delete_filter(name, "inbox", by="ada")
    operator.save_filter("mine", "inbox", "topic=c", by="ada")
    assert saved(operator, "inbox") == {"mine": "topic=c"}


def test_what_is_no_filter_is_refused(operator: Operator, engine: Engine) -> None:
    """Without a condition, of no list, with too many fields; and one more than a user may have."""
    for of, query, field in (
        ("messages", "", "query"),
        ("messages", "&".join(f"status={n}" for n in range(60)), "query"),
        ("audits", "topic=a", "of"),
    ):
        with pytest.raises(InvalidRequest) as refused:
            operator.save_filter("mine", of, query, by="ada")
        assert refused.value.field == field
    for number in range(MOST_FILTERS):
        operator.save_filter(f"n{number}", "messages", "topic=a", by="ada")
    with pytest.raises(ActRefused, match="delete one first"):
        operator.save_filter("one more", "messages", "topic=a", by="ada")
    operator.save_filter("n7", "messages", "topic=b", by="ada")
    assert saved(operator)["n7"] == "topic=b"


def test_the_audit_masks_what_is_searched_for_in_bodies(operator: Operator) -> None:
    """A value under a telling name is masked there, as in bodies; the user's own filter has it."""
    operator.save_filter("card", "messages", "body=card_number%3D4111111111111111&header=x-api-key%3Ds3cret", by="ada")
    (row,) = operator.audit(AuditFilter(action="save_filter"), PageRequest()).items
    assert "4111111111111111" not in str(row.result) and "s3cret" not in str(row.result)
    assert "4111111111111111" in saved(operator)["card"]


def test_two_databases_keep_them(new_engine: Callable[..., Engine], engine: Engine) -> None:
    """Where they differ, since one was away, the newer record of a name tells."""
    other = new_engine()
    both = Operator.open({"a": engine, "b": other}, Settings())
    both.save_filter("mine", "messages", "topic=a", by="ada")
    Operator.open({"b": other}, Settings()).save_filter("mine", "messages", "topic=b", by="ada")
    assert saved(both) == {"mine": "topic=b"}
    sql(other, "DELETE FROM outbox.audit")
    assert saved(both) == {"mine": "topic=a"}
