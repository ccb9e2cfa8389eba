"""Archives: what comes out is what went in, whatever happens on the way; anything else is refused."""

from __future__ import annotations

import datetime as dt
import fcntl
import json
import pickle
import random
import subprocess
import sys
import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from uuid import UUID

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st

from outbox.errors import InvalidSettings, SourceError
from outbox.reconcile.archive import ParquetSide, UnionSide, archives_in, files
from outbox.reconcile.archive.files import read_manifest
from outbox.reconcile.job import FIRST_ID, InboxState, Pair, ProducerState, Range
from outbox.reconcile.rows import CONSUMER, PRODUCER, to_uuids
from tests.reconcile.archiving import (
    EFFECT,
    EVERYTHING,
    NOON,
    PAIR,
    archive,
    archived,
    at,
    consumer,
    empty,
    forget,
    hours,
    ids_of,
    producer,
)
from tests.reconcile.town import IN_SYNC, Fate, Place, Town, fate


@pytest.fixture
def town(emptied_town: Town) -> Town:
    """A producer and a consumer with empty tables, for many tests."""
    return emptied_town


# --- what comes out --------------------------------------------------------------------------------------

_fates = st.builds(
    Fate,
    state=st.none() | st.sampled_from(ProducerState),
    status=st.sampled_from(InboxState),
    sends=st.integers(1, 3),
    place=st.sampled_from(Place),
    compensated=st.booleans(),
    skipped=st.booleans(),
    same_body=st.sampled_from([True, False, None]),
    effects=st.integers(0, 2),
    age=st.floats(0, 1e6),
    key=st.none() | st.text("ab", max_size=2),
    tag=st.none() | st.sampled_from("xy"),
)
_pairs = st.sampled_from([PAIR, Pair("t", "g", {"x"}, {"a*"}), Pair("t", "g", effect=EFFECT)])


@hypothesis_settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(fates=st.lists(_fates, max_size=40), pair=_pairs, seed=st.integers(0, 2**32))
def test_an_archive_reads_as_the_database_does(emptied_town: Town, fates: list[Fate], pair: Pair, seed: int) -> None:
    """Random rows of either side, archived in random ranges and read in others, are those of the database."""
    dice = random.Random(seed)  # noqa: S311
    empty(emptied_town)
    emptied_town.plant(fates, ids=sorted(UUID(int=dice.randrange(at(0).int, at(1).int)) for _ in fates))
    with tempfile.TemporaryDirectory() as folder:
        for kind, live in (("producer", producer(emptied_town, pair)), ("consumer", consumer(emptied_town, pair))):
            own = Path(folder, kind)
            rows, own = live.read([EVERYTHING]), Path(folder, kind)
            manifest = archive(live, _ranges(dice), own, kind=kind, pair=pair)
            side = ParquetSide((own,), kind, pair)  # type: ignore[arg-type]
            assert manifest.rows == rows.num_rows
            assert pickle.loads(pickle.dumps(side)).read([EVERYTHING]).equals(rows)  # noqa: S301
            some = _ranges(dice)[::2]
            assert side.read(some).equals(live.read(some))


def _ranges(dice: random.Random) -> list[Range]:
    """Cut the hour after noon, in which the ids lie close together, into some ranges."""
    cuts = sorted({dice.randrange(at(0).int, at(1).int) for _ in range(dice.randrange(4))})
    bounds = [at(0), *(UUID(int=cut) for cut in cuts), at(2)]
    return [Range(first, end) for first, end in pairwise(bounds)]


def test_a_range_of_ids_reads_little_of_a_file(town: Town, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The statistics of the row groups tell which of them needn't be read."""
    monkeypatch.setattr(files, "_ROWS_OF_GROUP", 10)
    ids = town.plant([IN_SYNC] * 200, ids=ids_of(0, 200))
    manifest = archive(producer(town), hours(0, 1), tmp_path)
    (fragment,) = ds.dataset(tmp_path / manifest.parts[0].file).get_fragments()
    assert len(fragment.row_groups) == 20
    wanted = [Range(ids[45], ids[48]), Range(ids[171], ids[172])]
    assert [group.id for group in fragment.subset(files._within(wanted)).row_groups] == [4, 17]
    assert to_uuids(archived(tmp_path).read(wanted)) == [*ids[45:48], ids[171]]


def test_hundreds_of_ranges_are_read_at_once(town: Town, tmp_path: Path) -> None:
    """A task may have many scattered ranges."""
    ids = town.plant([IN_SYNC] * 1000, ids=ids_of(0, 1000))
    archive(producer(town), hours(0, 1), tmp_path)
    ranges = [Range(first, end) for first, end in zip(ids[::2], ids[1::2], strict=True)]
    assert to_uuids(archived(tmp_path).read(ranges)) == ids[::2]


def test_an_empty_window_is_archived_too(town: Town, tmp_path: Path) -> None:
    """That there was nothing is worth knowing, and has the columns of something."""
    manifest = archive(producer(town), hours(0, 1, 2), tmp_path)
    assert [part.rows for part in manifest.parts] == [0, 0]
    assert archived(tmp_path).read([EVERYTHING]).schema == PRODUCER
    assert archived(tmp_path).read([]).num_rows == 0
    assert ParquetSide((), "consumer", PAIR).read([EVERYTHING]).schema == CONSUMER


def test_of_several_archives_the_newest_row_counts(town: Town, tmp_path: Path) -> None:
    """Folders whose windows overlap are one side."""
    ids = town.plant([IN_SYNC] * 3, ids=[ids_of(hour)[0] for hour in (0.5, 1.5, 2.5)])
    later = NOON + dt.timedelta(hours=1)
    archive(producer(town), hours(0, 1, 2), tmp_path / "old")
    forget(town, ids[1])
    town.plant([fate(sends=3, status=InboxState.NONE)], ids=[ids[1]])
    archive(producer(town), hours(1, 3), tmp_path / "new", taken_at=later)
    for folders in (("old", "new"), ("new", "old")):
        rows = archived(*(tmp_path / name for name in folders)).read([EVERYTHING])
        assert to_uuids(rows) == ids
        assert rows["sends"].to_pylist() == [1, 3, 1]


# --- taking it again -------------------------------------------------------------------------------------


def times(folder: Path) -> dict[str, int]:
    """Return when each part was written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.glob("*.parquet")}


def test_what_is_archived_isnt_read_again(town: Town, tmp_path: Path) -> None:
    """The same window is done at once, however it is cut; a larger one is completed."""
    town.plant([IN_SYNC] * 4, ids=[ids_of(hour)[0] for hour in (0.5, 1.5, 2.5, 3.5)])
    side = producer(town)
    archive(side, hours(1, 2, 3), tmp_path)
    before = times(tmp_path)
    done: list[int] = []
    archive(side, hours(1, 1.4, 2.9, 3), tmp_path, done=done.append)
    assert times(tmp_path) == before
    assert not done
    manifest = archive(side, hours(0, 2.5, 4), tmp_path, done=done.append)
    assert before.items() < times(tmp_path).items()
    assert done == [1, 2]
    assert [part.range for part in manifest.parts] == hours(0, 1, 2, 3, 4)
    assert manifest == read_manifest(tmp_path)
    assert archived(tmp_path).read([EVERYTHING]).equals(side.read([EVERYTHING]))


def test_what_wasnt_settled_is_archived_again(town: Town, tmp_path: Path) -> None:
    """A part with undecided or undispatched messages follows them, and keeps what was pruned since."""
    open_, settled, other = [ids_of(hour)[0] for hour in (0.5, 0.6, 1.5)]
    town.plant(
        [fate(state=ProducerState.COMMITTED, status=InboxState.NONE), IN_SYNC, IN_SYNC], ids=[open_, settled, other]
    )
    manifest = archive(producer(town), hours(0, 1, 2), tmp_path, horizon=FIRST_ID)
    assert [part.unsettled for part in manifest.parts] == [1, 0]
    forget(town, settled, open_)
    town.plant([fate(sends=2, status=InboxState.NONE)], ids=[open_])
    later = NOON + dt.timedelta(days=1)
    manifest = archive(producer(town), hours(0, 2), tmp_path, taken_at=later, horizon=at(5))
    assert [(part.unsettled, part.taken_at, part.complete) for part in manifest.parts] == [
        (0, later, True),
        (0, NOON, True),
    ]
    rows = archived(tmp_path).read([EVERYTHING])
    assert to_uuids(rows) == [open_, settled, other]
    assert rows["state"].to_pylist() == [ProducerState.DISPATCHED] * 3


@pytest.mark.parametrize("status", [InboxState.FAILED, InboxState.PARKED])
def test_the_consumers_open_messages_are_archived_again(town: Town, tmp_path: Path, status: InboxState) -> None:
    """A message that the consumer failed at or parked may still be consumed."""
    (id_,) = town.plant([fate(status=status)], ids=ids_of(0.5))
    archive(consumer(town), hours(0, 1), tmp_path, kind="consumer")
    town.set_inbox(InboxState.CONSUMED, id_)
    manifest = archive(consumer(town), hours(0, 1), tmp_path, kind="consumer")
    assert manifest.parts[0].unsettled == 0
    assert ParquetSide((tmp_path,), "consumer", PAIR).read([EVERYTHING])["status"].to_pylist() == [InboxState.CONSUMED]


def test_a_killed_writer_leaves_nothing_half_written(town: Town, tmp_path: Path) -> None:
    """Wherever a writer is killed, what was listed can be read, no part is broken, and the next one goes on."""
    town.plant([IN_SYNC] * 6, ids=[ids_of(hour + 0.5)[0] for hour in range(6)])
    side = producer(town)
    archive(side, hours(0, 1), tmp_path)
    url = town.accesses[0].url
    for deadly in (1, 2, 3):
        before = times(tmp_path)
        command = ["-m", "tests.reconcile.archiving", url, str(tmp_path), str(deadly), *map(str, range(7))]
        killed = subprocess.run([sys.executable, *command], capture_output=True, text=True, check=False, timeout=120)
        assert killed.returncode == -9, killed.stderr
        assert before.items() <= times(tmp_path).items()
        assert len(times(tmp_path)) == len(before) + deadly - 1
        assert [path.name for path in tmp_path.glob(".*.tmp")]
        for path in tmp_path.glob("*.parquet"):
            content, part = files.describe_part(path)
            assert files.read_part(path, content, [part.range]).equals(side.read([part.range]))
        assert [part.range for part in read_manifest(tmp_path).parts] == hours(0, 1)
        assert to_uuids(archived(tmp_path).read([EVERYTHING])) == ids_of(0.5)
    before = times(tmp_path)
    manifest = archive(side, hours(0, 6), tmp_path)
    assert before.items() <= times(tmp_path).items()
    assert manifest.rows == 6
    assert not list(tmp_path.glob(".*.tmp"))
    assert archived(tmp_path).read([EVERYTHING]).equals(side.read([EVERYTHING]))


def test_a_writer_that_cant_read_leaves_what_it_had(town: Town, tmp_path: Path) -> None:
    """An error in the middle is the caller's, and no reason to begin anew."""
    town.plant([IN_SYNC] * 2, ids=[ids_of(hour)[0] for hour in (0.5, 1.5)])
    nowhere = replace(producer(town), access=replace(town.accesses[0], url="postgresql+psycopg://localhost:1/gone"))
    side = UnionSide(nowhere, producer(town), at(1))
    with pytest.raises(SourceError):
        archive(side, hours(0, 1, 2), tmp_path)
    with pytest.raises(SourceError, match="is no archive"):
        read_manifest(tmp_path)
    assert archive(producer(town), hours(0, 1, 2), tmp_path).rows == 2


def test_two_writers_dont_meet(town: Town, tmp_path: Path) -> None:
    """The second is told to wait; when the first is gone, however it went, the folder is free."""
    with (tmp_path / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(SourceError, match="is being written to by another process; wait until it is done"):
            archive(producer(town), hours(0, 1), tmp_path)
    assert archive(producer(town), hours(0, 1), tmp_path).rows == 0


def test_a_window_without_an_end_is_refused(town: Town, tmp_path: Path) -> None:
    """There will be more ids in it."""
    with pytest.raises(InvalidSettings, match="give until, a time that is past"):
        archive(producer(town), [Range(at(0), None)], tmp_path / "new")
    assert not (tmp_path / "new").exists()


# --- what is refused -------------------------------------------------------------------------------------


@pytest.fixture
def folder(town: Town, tmp_path: Path) -> Path:
    """A folder with an archive of two hours."""
    town.plant([IN_SYNC] * 400, ids=ids_of(0.5, 400))
    archive(producer(town), hours(0, 1, 2), tmp_path / "a")
    return tmp_path / "a"


@pytest.mark.parametrize(
    ("pair", "said"),
    [
        (Pair("u", "g"), "the producer of u → g"),
        (Pair("t", "h"), "the producer of t → h"),
        (Pair("t", "g", {"x"}), r"the producer of t → g \(tags \['x'\]\)"),
        (Pair("t", "g", None, {"k*"}), r"the producer of t → g \(keys \['k\*'\]\)"),
    ],
)
def test_an_archive_of_something_else_is_refused(town: Town, folder: Path, pair: Pair, said: str) -> None:
    """Neither read nor written to is what has the rows of another pair, or of another filter."""
    with pytest.raises(SourceError, match=f"{folder} is an archive of the producer of t → g, not of {said}"):
        archived(folder, pair=pair).read([EVERYTHING])
    with pytest.raises(SourceError, match=f"{folder} has an archive of the producer of t → g; archive {said}"):
        archive(producer(town, pair), hours(0, 1), folder, pair=pair)


def test_the_sides_arent_mixed_up(town: Town, folder: Path) -> None:
    """The consumer's rows go into a folder of their own; the business table is a matter of theirs alone."""
    with pytest.raises(SourceError, match="is an archive of the producer of t → g, not of the consumer of t → g"):
        ParquetSide((folder,), "consumer", PAIR).read([EVERYTHING])
    effects = Pair("t", "g", effect=EFFECT)
    assert archived(folder, pair=effects).read([EVERYTHING]).num_rows == 400
    archive(consumer(town), hours(0, 1), folder.with_name("c"), kind="consumer")
    with pytest.raises(SourceError, match=r"not of the consumer of t → g \(effect \{'table': 'ledger'"):
        ParquetSide((folder.with_name("c"),), "consumer", effects).read([EVERYTHING])


def test_what_is_no_archive_is_refused(tmp_path: Path) -> None:
    """An empty folder, none at all, a list that isn't one, files that are something else."""
    for name in ("empty", "gone"):
        (tmp_path / "empty").mkdir(exist_ok=True)
        with pytest.raises(SourceError, match=f"{name} is no archive: manifest.json can't be read: No such file"):
            read_manifest(tmp_path / name)
        with pytest.raises(SourceError, match=f"{name} is no archive: there is no manifest.json in it"):
            archives_in(tmp_path / name)
    for content in ("", "[]", "{}", '{"format": "outbox archive", "version": 2, "kind": "other"}'):
        (tmp_path / "manifest.json").write_text(content)
        with pytest.raises(SourceError, match=r"is no archive: manifest\.json isn't as it was written"):
            read_manifest(tmp_path)


def test_another_version_is_refused(town: Town, folder: Path) -> None:
    """What a later version wrote isn't guessed at; neither in the list nor in a part."""
    told = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps(told | {"version": 3}))
    with pytest.raises(
        SourceError, match="is of version 3 of archives, and this code reads 2; read it with the version"
    ):
        archived(folder).read([EVERYTHING])
    path = next(folder.glob("*.parquet"))
    table = pq.read_table(path)
    metadata = json.loads(table.schema.metadata[b"outbox"]) | {"version": 3}
    pq.write_table(table.replace_schema_metadata({"outbox": json.dumps(metadata)}), path)
    with pytest.raises(SourceError, match="is of version 3 of archives"):
        archive(producer(town), hours(0, 1), folder)


def test_a_strangers_file_is_refused(town: Town, folder: Path) -> None:
    """A Parquet file that isn't ours isn't taken for a part."""
    pq.write_table(pa.table({"id": [1]}), folder / "x.parquet")
    with pytest.raises(SourceError, match=r"x\.parquet is no part of an archive"):
        archive(producer(town), hours(0, 1), folder)
    assert archived(folder).read([EVERYTHING]).num_rows == 400


def test_a_part_with_other_columns_is_refused(folder: Path) -> None:
    """The rows of another version of the tables aren't compared with those of this one."""
    path = folder / read_manifest(folder).parts[0].file
    table = pq.read_table(path)
    pq.write_table(table.drop_columns(["digest"]), path)
    with pytest.raises(SourceError, match=r"parquet has other columns than this code reads \(id, state, .*\)"):
        archived(folder).read([EVERYTHING])


def test_a_part_that_is_gone_is_named(folder: Path) -> None:
    """Half an archive isn't taken for all of it."""
    part = read_manifest(folder).parts[0]
    (folder / part.file).unlink()
    with pytest.raises(SourceError, match=f"{part.file} is gone; restore it from a backup, or archive"):
        archived(folder).read([EVERYTHING])
    assert archived(folder).read(hours(1, 2)).num_rows == 0


def test_a_damaged_part_is_named(folder: Path) -> None:
    """A file that was cut off, and any single byte of a row that changed, are noticed."""
    part = read_manifest(folder).parts[0]
    path = folder / part.file
    whole = path.read_bytes()
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(SourceError, match=f"{part.file} can't be read, and may be damaged"):
        archived(folder).read([EVERYTHING])
    column = pq.ParquetFile(pa.BufferReader(whole)).metadata.row_group(0).column(0)
    middle = column.data_page_offset + column.total_compressed_size // 2
    path.write_bytes(whole[:middle] + bytes([whole[middle] ^ 1]) + whole[middle + 1 :])
    with pytest.raises(SourceError, match=f"{part.file} can't be read, and may be damaged"):
        archived(folder).read([EVERYTHING])
