"""What an operation does, in plain words."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from outbox.admin.model import Action
from outbox.admin.operations.asked import Kept

_VERB: Mapping[Action, str] = MappingProxyType({Action.ROLLBACK: "roll back"})
_HALF_STATES = {"undecided": "undecided", "fenced": "undecided"}
_WORD = {"delivered": "consumed", "being_rolled_back": "half rolled back", **_HALF_STATES}


def described(action: Action, able: Sequence[Kept]) -> str:
    """Return what is done to how many messages of which group and topic.

    Such as "retry 12 parked messages of group bank-b, topic transfers (NoAccount in bank_b.py:credit)".
    """
    counts: Counter[str] = Counter()
    for each in able:
        counts[_WORD.get(each.state, each.state)] += each.count
    number = counts.total()
    one, many = (
        ("half message", "half messages") if counts and set(counts) <= {"undecided"} else ("message", "messages")
    )
    noun = one if number == 1 else many
    verb = _VERB.get(action, str(action))
    if not number:
        return f"{verb} no message"
    if len(counts) == 1:
        what = f"{number} {next(iter(counts))} {noun}"
    else:
        what = f"{number} {noun} ({', '.join(f'{count} {word}' for word, count in counts.most_common())})"
    return f"{verb} {what}{_where(able)}"


def _where(able: Sequence[Kept]) -> str:
    groups, topics, kinds = ({getattr(each, name) for each in able} for name in ("group", "topic", "kind"))
    group, topic, kind = (values.pop() if len(values) == 1 else None for values in (groups, topics, kinds))
    places = [f"{word} {name}" for word, name in (("group", group), ("topic", topic)) if name]
    return (f" of {', '.join(places)}" if places else "") + (f" ({kind})" if kind else "")
