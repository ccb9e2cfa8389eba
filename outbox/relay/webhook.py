"""Publish to an HTTP endpoint, as Standard Webhooks says it: signed, never redirected, and only to where one may.

A name can lead anywhere, and elsewhere a moment later. So it is resolved for each call, all of its addresses are looked
at, and the connection is made to one of those: no later answer of a name server counts, nor a proxy of the environment.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import email.utils
import hashlib
import hmac
import ipaddress
import math
import socket
import time
from collections.abc import Sequence
from http import HTTPStatus

import httpx

from outbox.errors import InvalidHandler
from outbox.message.model import HandlerAnswer, Message, Unavailable
from outbox.relay.envelope import Envelope, RelayRecord, ascii_headers
from outbox.relay.publisher import PUBLISH_TIMEOUT, ConnectedPublisher, Undeliverable
from outbox.text import cut

#: So long (seconds) at most an endpoint can have calls put off.
LONGEST_RETRY_AFTER = 3600.0
#: Messages of one call of `publish`, which are posted at once; and connections that are kept open.
BATCH, MOST_AT_ONCE = 10, 80
# So much (bytes) of an answer is read: a connection whose answer isn't read to its end can't be used again.
_MOST_ANSWER = 64 * 1024
_SHOWN = 200

#: What says nothing of this message: the endpoint isn't there, or isn't ready for any.
_OF_THE_ENDPOINT = {401, 403, 404, 405, 407, 408, 421, 423, 425, 426, 429}

# Headers by which HTTP itself works, and by which the call is believed: those of a message would speak for it.
_OF_HTTP = {"content-length", "transfer-encoding", "host", "connection", "keep-alive", "te", "trailer", "upgrade"}
_OF_HTTP |= {"expect", "proxy-authorization", "proxy-connection", "authorization", "cookie", "content-encoding"}
_OF_HTTP |= {"webhook-id", "webhook-timestamp", "webhook-signature"}

Address = ipaddress.IPv4Address | ipaddress.IPv6Address
# Of the sixth version all that is global unicast; and addresses that a gateway sends on to the one that they carry.
_UNICAST, _NAT64 = ipaddress.ip_network("2000::/3"), ipaddress.ip_network("64:ff9b::/96")
_MAPPED = ipaddress.ip_network("::ffff:0:0/96")
# The third quarter of an ISATAP address, whose last one is of the fourth version (RFC 5214).
_ISATAP = 0x00005EFE
# What Python takes for global: relays of 6to4, documentation, and where a cloud has its own services.
_SPECIAL = [ipaddress.ip_network(each) for each in ("192.88.99.0/24", "168.63.129.16/32", "3fff::/20")]


class Webhook(ConnectedPublisher[httpx.AsyncClient]):
    """Posts each message to ``url``, signed with each of ``secrets`` (``whsec_…``, or bytes), the newest one first.

    Any answer 2xx confirms. 410 pauses the group for good; 429 and 503 may say when to come back; other answers 4xx are
    about the message, which is parked. ``private`` allows http and addresses that aren't global, for tests.
    ``headers`` are sent with each call, such as an Authorization.

    Raises:
        InvalidHandler: a URL that isn't one of https, with a password in it, or a secret that can't be read.
    """

    batch = BATCH

    def __init__(
        self,
        url: str,
        *,
        secrets: Sequence[str | bytes],
        name: str | None = None,
        envelope: Envelope | None = None,
        headers: dict[str, str] | None = None,
        timeout: float = PUBLISH_TIMEOUT,
        private: bool = False,
    ) -> None:
        super().__init__("webhook", envelope, timeout)
        self._url = httpx.URL(url)
        if self._url.scheme not in ({"https", "http"} if private else {"https"}) or not self._url.host:
            raise InvalidHandler("Webhook: the URL must begin with https://")
        if self._url.userinfo:
            raise InvalidHandler(
                "Webhook: the URL has a user or a password in it, which logs would show; give headers="
            )
        if not secrets or isinstance(secrets, str | bytes):
            raise InvalidHandler("Webhook: secrets is a list of at least one")
        self.name: str = name or self._url.host.replace(".", "-").replace(":", "-")
        self._secrets = [secret_bytes(secret) for secret in secrets]
        self._extra, self._private = ascii_headers(headers or {}), private
        self._own = _OF_HTTP | {name.lower() for name in self._extra}
        self._addresses: Sequence[str] = ()

    def _headers(self, message: Message) -> dict[str, str]:
        headers = super()._headers(message).items()
        return ascii_headers({name: value for name, value in headers if name.lower() not in self._own})

    async def _connect(self) -> httpx.AsyncClient:
        # As many at once as the relay has on their way: to wait in the client for one costs more with each that waits.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=MOST_AT_ONCE)
        return httpx.AsyncClient(timeout=self.timeout, trust_env=False, follow_redirects=False, limits=limits)

    async def _disconnect(self, client: httpx.AsyncClient) -> None:
        await client.aclose()

    async def _send_all(
        self, client: httpx.AsyncClient, records: Sequence[RelayRecord], until: float
    ) -> Sequence[HandlerAnswer | BaseException]:
        try:
            async with asyncio.timeout_at(until):
                self._addresses = await self._resolved()
        except Exception as error:
            return [error] * len(records)
        return await super()._send_all(client, records, until)

    async def _resolved(self) -> Sequence[str]:
        """Return the addresses of the endpoint, all of which may be connected to."""
        host, port = self._url.host, self._url.port or (443 if self._url.scheme == "https" else 80)
        found = await asyncio.get_running_loop().getaddrinfo(host, port, type=socket.SOCK_STREAM)
        addresses = [str(each[4][0]).partition("%")[0] for each in found]
        for address in addresses:
            if not self._private and not is_global(ipaddress.ip_address(address)):
                raise PermissionError(f"{host} leads to {address}, which isn't an address of the public internet")
        return addresses

    async def _send(self, client: httpx.AsyncClient, record: RelayRecord) -> HandlerAnswer:
        message_id = str(record.message.id)
        headers = {**record.headers, **self._extra, "Host": self._url.netloc.decode(), "webhook-id": message_id}
        headers |= signature(self._secrets, message_id, int(time.time()), record.body)
        response = await self._posted(client, record.body, headers)
        try:
            text = await _beginning(response)
        finally:
            await response.aclose()
        return self._answer(response, text)

    async def _posted(self, client: httpx.AsyncClient, body: bytes, headers: dict[str, str]) -> httpx.Response:
        """Post a body to the first of the addresses that can be connected to."""
        for number, address in enumerate(self._addresses, 1):
            url, extensions = self._url.copy_with(host=address), {"sni_hostname": self._url.host}
            request = client.build_request("POST", url, content=body, headers=headers, extensions=extensions)
            try:
                return await client.send(request, stream=True)
            except (httpx.ConnectError, httpx.ConnectTimeout):
                if number == len(self._addresses):
                    raise
        raise ConnectionError(f"{self._url.host} has no address")

    def _answer(self, response: httpx.Response, text: str) -> HandlerAnswer:
        if response.is_success:
            return None
        status = response.status_code
        reason = f"{self.name} has answered {status}" + (f": {cut(text, _SHOWN)}" if text else "")
        if status == HTTPStatus.GONE:
            return Unavailable(reason, pause=True)
        if response.is_client_error and status not in _OF_THE_ENDPOINT:
            raise Undeliverable(reason)
        if response.is_redirect:
            reason += "; redirects aren't followed: give the URL that it leads to"
        return Unavailable(reason, after=_retry_after(response.headers.get("retry-after")))


async def _beginning(response: httpx.Response) -> str:
    body = b""
    async for part in response.aiter_raw():
        body += part
        if len(body) > _MOST_ANSWER:
            break
    return body[: 4 * _SHOWN].decode(errors="replace").strip()


def _retry_after(text: str | None) -> float | None:
    """Return the seconds of a Retry-After, which has them or a date; None where there is none that can be read."""
    if not text:
        return None
    try:
        seconds = float(text)
    except ValueError:
        try:
            seconds = email.utils.parsedate_to_datetime(text).timestamp() - time.time()
        except ValueError:
            return None
    return None if math.isnan(seconds) else min(max(seconds, 0.0), LONGEST_RETRY_AFTER)


def is_global(address: Address) -> bool:
    """Tell whether an address is of the public internet, also by the one that it may carry in it."""
    if any(address in each for each in _SPECIAL):
        return False
    if isinstance(address, ipaddress.IPv4Address):
        return address.is_global and not address.is_multicast
    if address in _MAPPED or address in _NAT64:
        return is_global(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    carried = [address.sixtofour, *(address.teredo or ())]
    if (int(address) >> 32) & 0xFDFFFFFF == _ISATAP:
        carried.append(ipaddress.IPv4Address(int(address) & 0xFFFFFFFF))
    return address in _UNICAST and address.is_global and all(is_global(each) for each in carried if each)


# --- signatures: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md ----------


def secret_bytes(secret: str | bytes) -> bytes:
    """Return the bytes of a secret: those that follow ``whsec_`` in base64, or as they are.

    Raises:
        InvalidHandler: it can't be read, or is too short to be one.
    """
    if isinstance(secret, str):
        try:
            secret = base64.b64decode(secret.removeprefix("whsec_"), validate=True)
        except binascii.Error:
            raise InvalidHandler(
                "a secret of a webhook must be whsec_ and base64; its bytes can be given, too"
            ) from None
    if not 24 <= len(secret) <= 64:
        raise InvalidHandler(f"a secret of a webhook has 24 to 64 bytes, not {len(secret)}")
    return secret


def signature(secrets: Sequence[bytes], message_id: str, timestamp: int, body: bytes) -> dict[str, str]:
    """Return the headers that sign a body with each of these secrets."""
    signed = f"{message_id}.{timestamp}.".encode() + body
    digests = [base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode() for secret in secrets]
    return {"webhook-timestamp": str(timestamp), "webhook-signature": " ".join(f"v1,{digest}" for digest in digests)}
