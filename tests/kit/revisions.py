"""Revisions of a release to come: one more of each part, made in a test, for what an upgrade does with older tables."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from outbox.database.migration import chain
from tests.kit.processes import ROOT

#: What they make: an index of each partition, columns of a table and an index of them, a function made anew.
NEXT = {
    "producer": '''
BEFORE = (("ix_half_message_tag", "half_message (tag, id) WHERE tag IS NOT NULL"),)
UPGRADE = (
    "CREATE INDEX IF NOT EXISTS ix_half_message_tag ON {s}.half_message (tag, id) WHERE tag IS NOT NULL",
    "ALTER TABLE {s}.message ADD COLUMN note {name}",
    "CREATE OR REPLACE FUNCTION {s}.commit(id uuid) RETURNS boolean LANGUAGE sql {pinned} SELECT NULL::boolean $$",
)
DOWNGRADE = (
    """CREATE OR REPLACE FUNCTION {s}.commit(id uuid) RETURNS boolean LANGUAGE plpgsql {pinned}
    BEGIN RETURN {s}.decide(id, 'commit'); END $$""",
    "ALTER TABLE {s}.message DROP COLUMN note",
    "DROP INDEX {s}.ix_half_message_tag",
)
''',
    "consumer": """
COLUMNS_BEFORE = (("consumer_message", "note TEXT"),)
BEFORE = (("ix_consumer_message_note", "consumer_message (note, message_id) WHERE note IS NOT NULL"),)
UPGRADE = (
    "ALTER TABLE {s}.consumer_message ADD COLUMN IF NOT EXISTS note TEXT",
    "CREATE INDEX IF NOT EXISTS ix_consumer_message_note ON {s}.consumer_message (note, message_id)"
    " WHERE note IS NOT NULL",
    "ALTER TABLE {s}.consumer_offset ADD COLUMN note TEXT",
)
DOWNGRADE = (
    "ALTER TABLE {s}.consumer_offset DROP COLUMN note",
    "DROP INDEX {s}.ix_consumer_message_note",
    "ALTER TABLE {s}.consumer_message DROP COLUMN note",
)
""",
}
_FILE = """
from outbox.database.migration.script import run
revision = "{revision}"
down_revision = "{before}"
branch_labels = None
depends_on = None
{content}
def upgrade(): run(UPGRADE)
def downgrade(): run(DOWNGRADE)
"""


def following(branch: str) -> str:
    """Return the revision after the newest one of a branch."""
    head = chain.head(branch)
    return f"{branch}_{int(head.rpartition('_')[2]) + 1:04}"


def write_next(folder: Path, contents: Mapping[str, str] = NEXT) -> list[str]:
    """Write the revisions of this code and those of the next release into a folder; return the new ones."""
    shutil.copytree(ROOT / "migrations", folder)
    made = []
    for branch, content in contents.items():
        made.append(revision := following(branch))
        text = _FILE.format(revision=revision, before=chain.head(branch), content=content)
        (folder / "versions" / f"{revision}.py").write_text(text)
    return made


@contextmanager
def next_release(folder: Path, contents: Mapping[str, str] = NEXT) -> Iterator[Callable[[], list[str]]]:
    """Yield what makes this code the next release, for as long as the context lasts; it returns the new revisions."""
    new = write_next(folder, contents)
    with pytest.MonkeyPatch.context() as patch:

        def install() -> list[str]:
            patch.setattr(chain, "folder", lambda: folder)
            chain._built_on.cache_clear()
            return new

        yield install
    chain._built_on.cache_clear()
