# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Sign the hand-overs of a card, and link them to a chain.

Each hand-over contains the hash of the card's previous hand-over, and a
signature by the key of the host. The public part of a hand-over, the
*statement*, shows how the device was cleaned. The other fields, about servers,
projects and addresses, are *sealed*: the statement contains only their salted
hash. Hence the next owner of the device can check the signature of the
statement in the metadata of their server, and learns nothing about other
owners. For example, a GPU was reset after its first server::

    statement  {"method": "reset flr", "result": "clean", "seal": <SHA-256 of
                the sealed fields>, "time": ..., "version": "1"}
    hash       SHA-256 of the statement; "previous" of the next hand-over, where
               it is sealed
    signature  of the statement, by the key

Hashes are computed from canonical JSON without empty fields. Hence a field
that a later release adds does not change earlier hashes. A failed hand-over
also contains the hash of the previous hand-over, but is not a link of the
chain, because the journal replaces it when the next attempt ends.
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import secrets
import typing

from nova_accel.store import values

#: version of the format of statements
VERSION = '1'
#: fields that the next owner cannot read
SEALED = ('device', 'serial', 'handle', 'server', 'origin', 'before', 'after',
          'since', 'ports', 'previous', 'place', 'salt')


class Key(typing.Protocol):
    """The methods of store.keys.Key that this module uses.

    The class itself is not imported, because that would slow down the start of
    the commands that only read hand-overs.
    """

    public: str

    def sign(self, message: bytes) -> str:
        """Return a signature in base64."""


def spelled(fields: Mapping[str, str]) -> bytes:
    """Return the canonical JSON of the fields that are not empty."""
    return json.dumps({name: value for name, value in fields.items() if value},
                      sort_keys=True, separators=(',', ':')).encode()


def hashed(message: bytes) -> str:
    return hashlib.sha256(message).hexdigest()


def statement(handover: values.Handover) -> dict[str, str]:
    """Return the public fields of a hand-over, and the seal of the others."""
    fields = dataclasses.asdict(handover)
    sealed = {name: fields.pop(name) for name in SEALED}
    del fields['key'], fields['signature']
    return {**fields, 'seal': hashed(spelled(sealed))}


def certificate(handover: values.Handover) -> str:
    """Return the statement, hash and signature of a hand-over for the next
    owner. The public key is omitted, because it would show owners which
    servers share a host."""
    stated = {name: value for name, value in statement(handover).items()
              if value}
    return json.dumps({**stated, 'hash': digest(handover),
                       'signature': handover.signature})


def digest(handover: values.Handover) -> str:
    """Return the hash of a hand-over, which the next hand-over contains."""
    return hashed(spelled(statement(handover)))


def signed(handover: values.Handover, head: values.Handover | None, key: Key,
           ) -> values.Handover:
    """Return a hand-over with its place in the chain and its signature.

    :param head: the newest hand-over of the chain, or None for a new chain.
    """
    place = int(head.place) + 1 if head else 1
    handover = dataclasses.replace(
        handover, version=VERSION, previous=digest(head) if head else '',
        place='' if handover.failed else str(place), salt=secrets.token_hex(16),
        key=key.public)
    return dataclasses.replace(
        handover, signature=key.sign(spelled(statement(handover))))


def key_after(handover: values.Handover) -> str:
    """Return the public key that signs the next hand-over."""
    return (handover.result.removeprefix(values.NEW_KEY) if handover.is_key
            else handover.key)


def announced(time: str, head: values.Handover, key: Key, former: Key | None,
              ) -> values.Handover | None:
    """Return a hand-over that announces the next key of a chain, or None if
    the chain has this key already.

    The former key signs the hand-over. If the former key is lost, the new key
    signs it.

    :param head: the newest hand-over of the chain.
    """
    if key_after(head) == key.public:
        return None
    can_sign = former and former.public == key_after(head)
    return signed(
        values.Handover(time, head.device, head.serial, '', '', method='key',
                        result=values.NEW_KEY + key.public, ports=head.ports),
        head, former if former and can_sign else key)
