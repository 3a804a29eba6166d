# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The chain of the hand-overs of a card: what each states, and what is signed.

A hand-over has the hash of the one before of the same card, and a signature of
the key of the host. It states in public what was done. The rest of it, which is
about other servers, projects and addresses, is sealed: of that the statement
has a salted hash only. The next owner of the device can therefore check the
signature of the statement in the metadata of their server, and learns nothing
more. For example, a GPU was reset after its first server::

    statement  {"method": "reset flr", "result": "clean", "seal": <SHA-256 of
                the sealed fields>, "time": ..., "version": "1"}
    hash       SHA-256 of the statement; "previous" of the next hand-over, where
               it is sealed
    signature  of the statement, by the key

Both are JSON in one spelling, of the fields that are not empty: a field that a
later release adds changes no earlier hand-over. A failed attempt has the hash
of the one before as well, but no other refers to it, because the journal
replaces it by the next attempt (store.journal).
"""

from collections.abc import Mapping
import dataclasses
import hashlib
import json
import secrets
import typing

from nova_accel.store import values

#: of the format of a statement
VERSION = '1'
#: what no other owner reads
SEALED = ('device', 'serial', 'handle', 'server', 'origin', 'before', 'after',
          'since', 'ports', 'previous', 'place', 'salt')


class Key(typing.Protocol):
    """store.keys.Key, which commands do without that read the journal."""

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
    """Return the statement of a hand-over with its hash and its signature, as
    the next owner reads it. Not the key, which would show which servers of
    others are on his host."""
    stated = {name: value for name, value in statement(handover).items()
              if value}
    return json.dumps({**stated, 'hash': digest(handover),
                       'signature': handover.signature})


def digest(handover: values.Handover) -> str:
    """Return the hash by which the next hand-over names this one."""
    return hashed(spelled(statement(handover)))


def signed(handover: values.Handover, head: values.Handover | None, key: Key,
           ) -> values.Handover:
    """Return a hand-over with its place in the chain and its signature.

    :param head: the newest of the chain; None for the first one.
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
    """Return a hand-over by which a chain goes on with another key.

    The former key signs it if there is one, otherwise the new one: then the
    former one was lost.

    :returns: None if the chain goes on with its key.
    """
    if key_after(head) == key.public:
        return None
    can_sign = former and former.public == key_after(head)
    return signed(
        values.Handover(time, head.device, head.serial, '', '', method='key',
                        result=values.NEW_KEY + key.public, ports=head.ports),
        head, former if former and can_sign else key)
