"""The sample project from end to end: a request, its message, and a worker that is killed at the worst moments."""

from __future__ import annotations

import os
import signal

import pytest
from sqlalchemy import NullPool, create_engine, text

from outbox.django.databases import read
from outbox.embedded import ServerLike
from outbox.errors import InvalidSettings
from tests.django.conftest import Project
from tests.kit import wait_until

POINTS = "SELECT points FROM shop_customerpoints WHERE customer = 'alice'"
CONSUMED = "SELECT count(*) FROM outbox.consumer_message WHERE status = 'consumed'"
OFFSET = "SELECT coalesce(max(position), 0) FROM outbox.consumer_offset"
WAITING = "SELECT count(*) FROM pg_locks WHERE NOT granted AND locktype <> 'advisory'"
END_WAITING = "SELECT bool_and(pg_terminate_backend(pid)) FROM pg_locks WHERE NOT granted AND locktype <> 'advisory'"


def test_orders_bring_points(project: Project) -> None:
    """The quick way: orders by the view, points by a worker, which ends in good order."""
    project.order("alice", 5, 7)
    with project.worker() as worker:
        wait_until(lambda: project.scalar(CONSUMED) == 2, "both orders are handled")
        worker.send_signal(signal.SIGTERM)
        assert worker.wait() == 0
    assert project.scalar(POINTS) == 12


@pytest.mark.parametrize(
    ("moment", "lock"),
    [
        ("in the handler", "UPDATE shop_customerpoints SET points = points"),
        ("before the COMMIT", "LOCK TABLE outbox.consumer_message IN SHARE MODE"),
    ],
)
def test_a_killed_worker_leaves_nothing_half_done(project: Project, moment: str, lock: str) -> None:
    """Effect, inbox row and offset are one transaction: killed in the midst of it, none is there; later all are."""
    project.order("alice", 1)
    with project.worker():
        wait_until(lambda: project.scalar(CONSUMED) == 1, "the first order is handled")
    project.order("alice", 10)
    offset = project.scalar(OFFSET)
    with project.engine.connect() as blocking:
        blocking.execute(text(lock))
        for _ in range(2):
            with project.worker() as worker:
                wait_until(lambda: project.scalar(WAITING), f"the worker waits {moment}")
                worker.send_signal(signal.SIGKILL)
                worker.wait()
            # By itself the server notices within ten seconds, since its session waits for a lock.
            project.scalar(END_WAITING)
            wait_until(lambda: not project.scalar(WAITING), "the server has ended its session")
            # A worker notes its start beside the queue's offset, which stays where it was.
            assert (project.scalar(POINTS), project.scalar(CONSUMED)) == (1, 1)
            assert project.scalar(OFFSET) == offset
        blocking.rollback()
    with project.worker():
        wait_until(lambda: project.scalar(CONSUMED) == 2, "the second order is handled")
    assert project.scalar(POINTS) == 11


def test_a_group_has_another_database(project: Project, server: ServerLike) -> None:
    """Its tables and its inbox are in one of Django's databases, the messages in another; one worker serves both."""
    name = f"django_other_{os.getpid()}"
    server.create_database(name)
    other = Project(create_engine(server.url(name), poolclass=NullPool))
    environment = {"DJANGO_SETTINGS_MODULE": "tests.django.inside.two", "OTHER_DATABASE": name}
    project.manage("migrate", "--database", "other", **environment)
    project.order("alice", 5)
    with project.worker(**environment):
        wait_until(lambda: other.scalar(CONSUMED) == 1, "the order is handled")
    assert (other.scalar(POINTS), project.scalar(CONSUMED)) == (5, 0)
    assert "points" in project.manage("outbox", "--using", "other", "inbox", "list", "-o", "json", **environment)
    server.drop_database(name)


def test_the_command_line_knows_the_databases(project: Project) -> None:
    """Without a URL, an application or a schema."""
    project.order("alice", 5)
    assert "order-created" in project.manage("outbox", "messages", "list", "-o", "json")
    assert project.manage("outbox_run", "--help").startswith("Usage: manage.py outbox run ")


def test_the_settings_are_checked(project: Project) -> None:
    """`manage.py check` names what is wrong, and the mend."""
    code = (
        "import django; django.setup()\n"
        "from outbox.django.apps import check_settings\n"
        "print(*(each.msg for each in check_settings()), sep='; ')"
    )
    assert project.run("-c", code, DJANGO_SETTINGS_MODULE="shop.settings").strip() == ""
    written = project.run("-c", code, DJANGO_SETTINGS_MODULE="tests.django.inside.misnamed")
    assert written.strip() == "OUTBOX.DATABASES names 'defualt'; database 'lite' isn't PostgreSQL"


def test_a_misspelt_key_is_named() -> None:
    """With the nearest that there is."""
    with pytest.raises(InvalidSettings, match=r"OUTBOX\.RETENTOIN is unknown; did you mean RETENTION"):
        read({"RETENTOIN": "72h"})
    with pytest.raises(InvalidSettings, match=r"OUTBOX\.schema must be in capitals: SCHEMA"):
        read({"schema": "x"})
    with pytest.raises(InvalidSettings, match=r"OUTBOX\.GROUP = 5 must be"):
        read({"GROUP": 5})
    found = read({"GROUP": "shop", "RETENTION": "48h", "DATABASES": ["a", "b"]})
    assert (found.own.group, found.own.databases, found.outbox.retention) == ("shop", ("a", "b"), 172800)


def test_superusers_find_the_console_in_the_admin(project: Project) -> None:
    """The index has a link to the console."""
    code = (
        "import django; django.setup()\n"
        "from django.contrib.auth.models import User; from django.test import Client\n"
        "for name, superuser in (('ada', True), ('bob', False)):\n"
        "    user = User.objects.create_user(name, is_staff=True, is_superuser=superuser)\n"
        "    client = Client(); client.force_login(user)\n"
        "    print('http://localhost:8900/' in client.get('/admin/').content.decode())"
    )
    assert project.run("-c", code, DJANGO_SETTINGS_MODULE="shop.settings").split() == ["True", "False"]
