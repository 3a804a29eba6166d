# Licensed under the Apache License, Version 2.0. See LICENSE.
"""The claims that guests carry in their metadata.

A guest carries the claims of its server as JSON in its libvirt metadata, which
no guest can change. When Nova defines a guest, the text is a part of its XML.
The text is written again if claims change while the guest exists. If
nova-compute is killed between a change of claims and this write,
attach.reconcile writes the text later.

If the claim store is lost, the claims are restored from the metadata. Hence
metadata that are damaged or belong to another compute host are refused as a
whole.
"""

from collections.abc import Collection
import dataclasses
import json
from typing import Any, NamedTuple
import uuid

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)

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


class Carrying:

    def __init__(self, store: claim_store.ClaimStore,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud):
        self._store = store
        self._holdings = holdings
        self._cloud = cloud
        #: held while texts are created and written, so the newest is written
        #: last
        self._lock = locks.Lock('guests')
        #: ClaimStore.latest() when every guest carried its claims
        self._complete: tuple[str, int] | None = None

    def text_of(self, server_uuid: str) -> str:
        """Return the claims of a server as text for the metadata of its guest,
        or '' if the server has no claims."""
        claims = self._claims(server_uuid)
        return as_text(self._carried(claims)) if claims else ''

    def _claims(self, server_uuid):
        # including its claims from before a move
        return [claim for role in model.Role
                for claim in self._holdings.of(server_uuid, role)]

    def _carried(self, claims):
        return Carried(
            self._store.lineage().node, *self._store.latest(), tuple(claims))

    def update(self, server_uuid: str) -> None:
        """Write the claims of a server into its guest, if libvirt has a guest.

        Raises nothing: after an error, the next comparison tries again.
        """
        try:
            with self._lock:
                self._cloud.carry(server_uuid, self.text_of(server_uuid))
        except Exception as error:
            self._complete = None
            LOG.warning('The present claims of server %s could not be written '
                        'into its guest (%s); that is tried again at the next '
                        'comparison', server_uuid, error)

    def run(self) -> None:
        """Update the text in each guest whose text lacks the present claims of
        its server.

        :raises Exception: libvirt does not answer.
        """
        latest = self._store.latest()
        if latest == self._complete:
            return
        self._complete = latest
        for server_uuid, text in self._cloud.carried().items():
            if self._is_late(server_uuid, text):
                self.update(server_uuid)

    def _is_late(self, server_uuid, text):
        claims = self._claims(server_uuid)
        try:
            there = parse(text, server_uuid) if text else None
        except Refused:
            # devices that this host does not report are withheld already
            return bool(claims)
        if not claims:
            # attach.settling handles claims that the store has not seen yet
            return there is not None and self._store.lineage().knows(
                there.run, there.changes)
        return (there is None or there.content != self._carried(claims).content
                or not self._store.lineage().knows(there.run, there.changes))

    def read(self, node: str) -> tuple[dict[str, Carried],
                                       dict[str, str]]:
        """Return the claims of guests whose text is newer than the store.

        :param node: provider uuid of this compute node.
        :returns: (server uuid -> usable claims, server uuid -> the reason why
            the claims are unusable).
        :raises Exception: libvirt does not answer.
        """
        found, refused = {}, {}
        for server_uuid, text in self._cloud.carried().items():
            if not text:
                continue
            try:
                there = parse(text, server_uuid)
                if self._store.lineage().knows(there.run, there.changes):
                    continue
                if there.node != node:
                    raise Refused(
                        f'they are of compute node {there.node}, and this one '
                        f'is {node}')
                found[server_uuid] = there
            except Refused as error:
                refused[server_uuid] = str(error)
        return found, refused
