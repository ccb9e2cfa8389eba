"""Who may do what: permissions, the three roles that bundle them, and the principal who has them."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from outbox.errors import InvalidSettings
from outbox.operator.acts import ACTS


class Permission(enum.StrEnum):
    """One thing that somebody may do in the console."""

    VIEW = "view"
    RESEND = "message:resend"
    RECALL = "message:recall"
    RETRY = "dead:retry"
    DISCARD = "dead:discard"
    CHECK = "half:check"
    CANCEL = "bulk_job:cancel"
    DECIDE = "half:decide"
    COMPENSATE = "tx:compensate"
    REVEAL = "payload:read"


class Role(enum.StrEnum):
    """A bundle of permissions; each role has those of the one before it.

    ``viewer`` sees, with bodies masked. ``operator`` acts where nothing is lost. ``admin`` decides halves, rolls local
    transactions back and sees bodies unmasked.
    """

    VIEWER = "viewer"
    OPERATOR = "operator"
    ADMIN = "admin"

    @property
    def permissions(self) -> frozenset[Permission]:
        """What the role may do."""
        return ROLES[self]

    @classmethod
    def named(cls, name: str) -> Role:
        """Return the role of this name.

        Raises:
            InvalidSettings: there is none.
        """
        try:
            return cls(name)
        except ValueError:
            raise InvalidSettings(f"role {name!r} must be one of: {', '.join(cls)}") from None


_VIEWER = frozenset({Permission.VIEW})
_OPERATOR = _VIEWER | {
    Permission.RESEND,
    Permission.RECALL,
    Permission.RETRY,
    Permission.DISCARD,
    Permission.CHECK,
    Permission.CANCEL,
}

#: The permissions of each role.
ROLES: Mapping[Role, frozenset[Permission]] = MappingProxyType(
    {Role.VIEWER: _VIEWER, Role.OPERATOR: _OPERATOR, Role.ADMIN: frozenset(Permission)}
)


def needed_for(action: str) -> Permission:
    """Return the permission that an act needs, alone or in a bulk job."""
    return Permission(ACTS[action].permission)


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks: ``id`` is what the audit records, ``name`` what the pages show."""

    id: str
    name: str
    permissions: frozenset[Permission] = _VIEWER

    @classmethod
    def of(cls, id: str, role: Role | str = Role.VIEWER, *, name: str | None = None) -> Principal:  # noqa: A002
        """Return a principal of a role: ``viewer``, ``operator`` or ``admin``.

        Raises:
            InvalidSettings: there is no such role.
        """
        return cls(id, name or id, Role.named(str(role)).permissions)

    @property
    def role(self) -> str:
        """The biggest role whose permissions the principal has; ``custom`` where it has none of them."""
        return next((str(role) for role in reversed(Role) if self.permissions >= role.permissions), "custom")

    def may(self, permission: Permission | str) -> bool:
        """Tell whether the principal has a permission."""
        return permission in self.permissions
