"""When the differences came about: findings by kind and hour, or whatever width fits."""

from __future__ import annotations

import datetime as dt
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from outbox.reconcile.model import Outcome
from outbox.reconcile.rows import fixed_ids

_MINUTE, _HOUR, _DAY = 60, 3600, 86400

#: Widths of a column in seconds; beyond them as many years as it takes.
WIDTHS = (_MINUTE, 5 * _MINUTE, 15 * _MINUTE, _HOUR, 3 * _HOUR, 6 * _HOUR, _DAY, 7 * _DAY, 28 * _DAY, 364 * _DAY)

_NEVER = np.iinfo(np.int64).min


@dataclass(frozen=True, slots=True)
class Timeline:
    """``numbers[kind][i]`` findings are from ``starts[i]`` on, for ``width`` seconds; ``undated`` have no time."""

    width: int
    starts: tuple[dt.datetime, ...]
    numbers: dict[Outcome, tuple[int, ...]]
    undated: int


def timeline(findings: pa.Table, now: dt.datetime, most: int = 48) -> Timeline | None:
    """Return when findings came about, in at most so many columns; None if no finding has a time.

    A finding's time is `Finding.since`, else the time at which its id was made; nothing is later than ``now``.
    """
    if not findings.num_rows:
        return None
    seconds = np.minimum(_seconds(findings), int(now.timestamp()))
    dated = seconds >= 0
    if not dated.any():
        return None
    seconds, outcomes = seconds[dated], findings["outcome"].to_numpy()[dated]
    first, last = int(seconds.min()), int(seconds.max())
    width = next(
        (width for width in WIDTHS if last // width - first // width < most),
        WIDTHS[-1] * -(-(last - first + 1) // (WIDTHS[-1] * (most - 1))),
    )
    begin = first // width
    columns = last // width - begin + 1
    places = seconds // width - begin
    return Timeline(
        width,
        tuple(dt.datetime.fromtimestamp((begin + column) * width, dt.UTC) for column in range(columns)),
        {
            Outcome(kind): tuple(np.bincount(places[outcomes == kind], minlength=columns).tolist())
            for kind in np.unique(outcomes).tolist()
        },
        int((~dated).sum()),
    )


def _seconds(findings: pa.Table) -> np.ndarray[Any, Any]:
    """Return the times of findings in seconds since 1970; negative where there is none."""
    known = pc.max_element_wise(findings["at"].cast(pa.int64()), findings["changed_at"].cast(pa.int64()))
    micros = pc.fill_null(known, int(_NEVER)).to_numpy()
    heads = np.ascontiguousarray(fixed_ids(findings)).view(">u8")[::2]
    is_uuid7 = (heads >> np.uint64(12)) & np.uint64(0xF) == 7
    made = np.where(is_uuid7, (heads >> np.uint64(16)).astype(np.int64) // 1000, -1)
    return np.where(micros == _NEVER, made, micros // 1_000_000)
