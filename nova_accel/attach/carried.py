# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Convert the claims of a server to JSON for its guest, and parse them.

A guest carries the claims of its server in its libvirt metadata, which no
guest can change. If the claim store is lost, the claims are restored from the
metadata. Hence metadata that are damaged or belong to another compute host are
refused as a whole.
"""

from collections.abc import Collection
import dataclasses
import json
from typing import Any, NamedTuple
import uuid

from nova_accel import model

#: version of the format
VERSION = 1
#: fields that are not restored: the next start of the server determines them
_LEFT_OUT = ('state', 'error')
_FIELDS = {field.name: field for field in dataclasses.fields(model.Claim)
           if field.name not in _LEFT_OUT}
_HANDLE_FIELDS = {field.name for field in dataclasses.fields(
    model.AttachHandle)}
_UUIDS = ('uuid', 'instance_uuid', 'consumer_uuid', 'provider_uuid')
_OPTIONAL = {'restore_function', 'restore_bitstream', 'restore_origin',
             'restore_content', 'project_id', 'created_type',
             'operators_bitstream'}


class Refused(Exception):
    """The text in the metadata of a guest is not usable. The message is the
    reason, as a clause."""


class Carried(NamedTuple):
    """The claims that a guest carries, and the state of the store that wrote
    them."""

    #: provider uuid of the compute node
    node: str
    #: store.values.Lineage: the run that changed claims last, and how often
    run: str
    changes: int
    claims: tuple[model.Claim, ...]

    @property
    def content(self) -> tuple:
        """Return the name of the compute node, and the fields of each claim,
        for comparisons."""
        return self.node, [_fields(claim) for claim in self.claims]


def as_text(carried: Carried) -> str:
    """Return claims as text for the metadata of a guest."""
    return json.dumps({
        'version': VERSION, 'node': carried.node, 'run': carried.run,
        'changes': carried.changes, 'claims': carried.content[1],
    }, sort_keys=True)


def _fields(claim: model.Claim) -> dict[str, Any]:
    fields = dataclasses.asdict(claim)
    fields['handle']['type'] = claim.handle.type.value
    fields['handle']['companions'] = list(claim.handle.companions)
    return {name: fields[name] for name in _FIELDS}


def parse(text: str, server_uuid: str) -> Carried:
    """Parse the claims in the metadata of a guest.

    :param server_uuid: uuid of the server of this guest.
    :raises Refused: the text is damaged, was written by another release, or
        has a claim of another server.
    """
    try:
        found = json.loads(text)
        version = found['version']
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise Refused(f'they are damaged ({error!r:.200})') from error
    if type(version) is not int or version != VERSION:
        raise Refused(f'they have version {version!r:.20}, and this release '
                      f'reads version {VERSION}')
    try:
        return _carried(server_uuid, **found)
    except (ValueError, TypeError, KeyError) as error:
        raise Refused(f'they are damaged ({error!r:.200})') from error


def _carried(server_uuid, version, node, run, changes, claims):
    """Return the checked fields of a text.

    :raises ValueError, TypeError, KeyError: the text is damaged.
    """
    for name in node, run:
        _check_uuid(name)
    if type(changes) is not int or type(claims) is not list or not claims:
        raise ValueError('changes or claims')
    found = tuple(_claim(fields, server_uuid) for fields in claims)
    for names in ({c.uuid for c in found}, {c.handle for c in found}):
        if len(names) != len(found):
            raise ValueError('the same claim twice')
    return Carried(node, run, changes, found)


def _claim(fields, server_uuid):
    _check_names(fields, _FIELDS)
    for name, value in fields.items():
        _check_type(name, value)
    for name in _UUIDS:
        _check_uuid(fields[name])
    if fields['instance_uuid'] != server_uuid:
        raise ValueError('a claim of another server')
    handle = fields['handle']
    _check_names(handle, _HANDLE_FIELDS)
    if (type(handle['managed']) is not bool
            or type(handle['companions']) is not list
            or type(handle['parent']) not in (str, type(None))
            or not all(type(address) is str for address in (
                handle['address'], *handle['companions']))):
        raise ValueError('handle')
    return model.Claim(**{
        **fields, 'handle': model.from_dict(model.AttachHandle, handle),
        'state': model.ClaimState.BOUND})


def _check_names(fields: Any, names: Collection[str]) -> None:
    if type(fields) is not dict or fields.keys() != set(names):
        raise ValueError('other fields')


def _check_type(name: str, value: Any) -> None:
    if name == 'handle' or value is None and name in _OPTIONAL:
        return
    kinds = {'region_index': (int, type(None)), 'prepared': (bool,)}
    if type(value) not in kinds.get(name, (str,)):
        raise ValueError(name)


def _check_uuid(value: Any) -> None:
    if type(value) is not str or str(uuid.UUID(value)) != value:
        raise ValueError(f'{value!r:.40} is not a UUID')
