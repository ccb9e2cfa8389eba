"""Django's migrations of the outbox: one for each revision, each after those that it is built on."""

from __future__ import annotations

from outbox.database.migration import chain
from tests.kit import ROOT

FOLDER = ROOT / "outbox" / "django" / "migrations"
CONTENT = '''"""Made of the revision that the file is named after."""

from outbox.django.migration import MigrationType, migration_of

Migration: MigrationType = migration_of(__name__)
'''


def test_each_revision_has_a_django_migration() -> None:
    """All their files are the same; only the name says which revision it is, and after which one it comes."""
    files = sorted(FOLDER.glob("0*.py"))
    revisions = [path.stem.partition("_")[2] for path in files]
    number = len(files) + 1
    in_order = [revision for branch in chain.BRANCHES for revision in reversed(chain.history(branch))]
    missing = [revision for revision in in_order if revision not in revisions]
    mend = [f"cp {files[-1]} {FOLDER}/{number + more:04}_{each}.py" for more, each in enumerate(missing)]
    assert not missing, f"Django doesn't know revisions; run: {'; '.join(mend)}"
    assert sorted(revisions) == sorted(in_order)
    assert [path.stem[:4] for path in files] == [f"{number:04}" for number in range(1, number)]
    assert {path.read_text("utf-8") for path in files} == {CONTENT}
    for count, revision in enumerate(revisions):
        assert set(chain._built_on()[revision]) <= set(revisions[:count])
