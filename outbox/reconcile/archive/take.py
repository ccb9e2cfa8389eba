"""Take an archive of a pair: both sides of a window, each as of one snapshot."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import quote
from uuid import UUID

from outbox.errors import InvalidSettings
from outbox.ids import uuid7_at
from outbox.reconcile import plan
from outbox.reconcile.archive.manifest import Kind, Manifest
from outbox.reconcile.archive.write import write_archive
from outbox.reconcile.model import Access, Pair, Range, Window
from outbox.reconcile.postgres import PostgresSide
from outbox.reconcile.snapshots import Snapshot, Snapshots, as_time, taken
from outbox.reconcile.told import Silent, Told


def take_archive(
    producer: Access, consumer: Access, pair: Pair, window: Window, folder: Path, told: Told | None = None
) -> tuple[Manifest, Manifest]:
    """Archive both sides of a pair into folders of its own within ``folder``; return what they have then.

    What is younger than the window's grace period isn't settled, and isn't archived. What is there already isn't read
    again, so that after a crash, or each night, the same call goes on.

    Raises:
        InvalidSettings: nothing in the window is old enough.
        SourceError: a database can't be read; a folder has an archive of something else, or is being written to.
        SchemaMissing, SchemaOutdated: a database isn't migrated.
    """
    teller = told or Silent()
    own = folder / f"{quote(pair.topic, safe='')}.{quote(pair.group, safe='')}"
    with taken(producer, consumer) as snapshots:
        ranges = _ranges(window, snapshots)
        sides: tuple[tuple[Snapshot, Kind, float], ...] = (
            (snapshots.producer, "producer", producer.settings.retention),
            (snapshots.consumer, "consumer", consumer.settings.inbox_retention),
        )
        manifests = []
        for snapshot, kind, retention in sides:
            teller.stage(f"{pair}: archive of the {kind}", len(ranges))
            manifests.append(
                write_archive(
                    PostgresSide(snapshot.access, kind, pair, snapshot.name),
                    ranges,
                    own / kind,
                    kind=kind,
                    pair=pair,
                    taken_at=as_time(snapshot.now),
                    horizon=_horizon(snapshot, retention),
                    done=teller.done,
                )
            )
    return manifests[0], manifests[1]


def _ranges(window: Window, snapshots: Snapshots) -> Sequence[Range]:
    """Return what of the window is old enough, cut so that each part fits in memory."""
    oldest = min(snapshots.producer.now, snapshots.consumer.now) / 1e6 - window.grace
    settled = UUID(int=uuid7_at(oldest).int >> 80 << 80)
    first, end = window.range
    if end is None or end > settled:
        end = settled
    if first >= end:
        raise InvalidSettings(
            f"nothing can be archived of {window}: it is younger than the grace period of {window.grace:.0f} s"
        )
    size = plan.size_of(snapshots)
    points = plan.points(snapshots, size, plan.POINTS)
    return [each for each, _ in plan.weighed([Range(first, end)], points, size)]


def _horizon(snapshot: Snapshot, retention: float) -> UUID:
    return uuid7_at(max(snapshot.now / 1e6 - retention, 0))
