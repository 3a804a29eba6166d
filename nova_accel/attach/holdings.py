# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Read the claims of servers, and change their states.

A claim is an accelerator request of the Cyborg specifications, with its
states. It is stored before hardware is touched and removed after everything is
undone; after a crash it therefore shows what may be unfinished.

For example, server A gets an FPGA region. Its claim begins as INITIAL, is
PROVISIONING while the region is programmed, and BOUND when a guest may use it.
When A is deleted, the claim becomes DELETING: the region no longer belongs to
A, but is not free. The claim ends when the region is clean. Under the hand-over
policy "operator" it becomes WAITING instead: it belongs to no server, and all()
omits it. It ends when the operator releases the handle by ``nova-accel
release`` or ``reserved`` in Placement (inventory.ledger), or when the device is
settled or cleaned.

Claims that attach.store_age restores begin as BOUND. Claims without a server,
with which attach.settling and admin.maintenance clean devices, begin as
DELETING. TRANSITIONS lists all changes of states; others raise
IllegalTransition. docs/source/contributor/architecture.rst draws them.
"""

import collections
from collections.abc import Iterable, Iterator, Mapping
import contextlib
import dataclasses
from typing import Any, NamedTuple

from nova_accel import exception
from nova_accel.inventory import offers
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request
from nova_accel.store import claim_store
from nova_accel.store import values
from nova_accel import text

LOG = logging.getLogger(__name__)

_State = model.ClaimState
_IN_HAND = frozenset((_State.INITIAL, _State.PROVISIONING, _State.BOUND,
                      _State.UNKNOWN))


class Transition(NamedTuple):
    #: the states in which the transition may begin
    leaves: frozenset[model.ClaimState]
    #: None: the claim ends
    to: model.ClaimState | None


#: by the names in the table of architecture.rst
TRANSITIONS = {
    'provisioning': Transition(_IN_HAND, _State.PROVISIONING),
    'bound': Transition(_IN_HAND, _State.BOUND),
    'doubt': Transition(_IN_HAND, _State.UNKNOWN),
    'not_ready': Transition(
        frozenset((_State.PROVISIONING, _State.BOUND)), _State.BOUND),
    'releasing': Transition(_IN_HAND | {_State.DELETING}, _State.DELETING),
    'released': Transition(frozenset((_State.DELETING,)), None),
    'waiting': Transition(frozenset((_State.DELETING,)), _State.WAITING),
}
#: name of the transition -> verb after the name of the server in the log
_SAID = {'bound': 'has', 'releasing': 'releases'}


class Holdings:

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        #: a state is compared and changed by one thread at a time
        self._lock = locks.Lock('holdings')

    # Queries

    def of_migration(self, server_uuid: str, migration_uuid: str,
                     ) -> list[model.Claim]:
        """Return the claims that a server had before a move, in a stable
        order."""
        return [claim for claim in self.of(server_uuid, model.Role.OLD)
                if claim.consumer_uuid == migration_uuid]

    def of(self, server_uuid: str, role: model.Role = model.Role.CURRENT,
           ) -> list[model.Claim]:
        """Return the claims of a server, except claims that are being
        released, in a stable order."""
        return [claim for claim in self._store.claims(server_uuid, role)
                if claim.state is not _State.DELETING]

    def all(self) -> list[model.Claim]:
        """Return the claims of all servers, including claims that are being
        released. Claims in the state WAITING are omitted."""
        return self._store.claims()

    def now(self, claims: Iterable[model.Claim]) -> list[model.Claim]:
        """Return the present version of claims, without those that have ended.
        """
        return self._store.by_uuid([claim.uuid for claim in claims])

    def being_released(self) -> list[model.Claim]:
        return [c for c in self.all() if c.state is _State.DELETING]

    def any_of(self, server_uuid: str) -> bool:
        """Return whether a server has a claim, even if the claim is being
        released."""
        return bool(self._store.claims(server_uuid))

    # Changes

    def claim(self, claims: Iterable[model.Claim]) -> None:
        """Write new claims, all or none.

        :raises ClaimConflict: another server holds one of the handles.
        """
        self._store.add(claims)

    def provisioning(self, claims: Iterable[model.Claim]) -> None:
        """Store that work on the devices begins."""
        self._go('provisioning', claims)

    def bound(self, claims: Iterable[model.Claim],
              region: model.Region | None, by_owner: bool = False) -> None:
        """Store that devices are ready for the guest.

        :param region: the region of all claims, or None for devices without
            regions. Its content is stored: if the card loses the content, it
            is restored, and after the server it is cleaned.
        :param by_owner: whether the owner of the server chose the content. The
            claims then keep the operator's image that they name, to program it
            after the server.
        """
        claims = list(claims)
        changes: dict[str, Any] = {}
        if region:
            loaded = self._store.loaded().get(
                (claims[0].device_address, region.index))
            changes = {'prepared': True,
                       'restore_function': region.function_uuid,
                       'restore_bitstream': region.bitstream_id,
                       'restore_origin': region.origin,
                       'restore_content': loaded.content if loaded and (
                           region.bitstream_id) else None}
            if region.operators_bitstream and not (by_owner and any(
                    claim.operators_bitstream for claim in self.now(claims))):
                changes['operators_bitstream'] = region.operators_bitstream
        self._go('bound', claims, error='', **changes)

    def bound_as_before(self, claims: Iterable[model.Claim]) -> None:
        """Store that devices are ready, with unchanged content."""
        self._go('bound', claims, error='')

    def doubt(self, claims: Iterable[model.Claim], error: str) -> None:
        """Store that the content of devices is unknown. The next start of the
        server restores the content."""
        self._go('doubt', claims, error=error)

    def not_ready(self, claims: Iterable[model.Claim], error: str) -> None:
        """Store that the devices of a server could not be prepared. The server
        keeps the devices, and its next start tries again."""
        self._go('not_ready', claims, error=error)

    @contextlib.contextmanager
    def kept_on_error(self, claims: Iterable[model.Claim]):
        """Keep the claims of a server if the context raises an error.

        The error is stored by not_ready() for claims that were BOUND when the
        context began, and by doubt() for the other claims.
        """
        bound = {c.uuid: c.state is _State.BOUND for c in claims}
        try:
            yield
        except Exception as error:
            now = [c for c in self.all()
                   if c.uuid in bound and c.state in _IN_HAND]
            self.not_ready([c for c in now if bound[c.uuid]], str(error))
            self.doubt([c for c in now if not bound[c.uuid]], str(error))
            raise

    def releasing(self, claims: Iterable[model.Claim]) -> list[model.Claim]:
        """Store that a server has lost claims. Their handles are not free yet.

        :returns: the claims as they are stored now. A claim that had ended
            already is left out.
        """
        return self._go('releasing', claims, gone_is_fine=True, error='')

    def released(self, claims: Iterable[model.Claim]) -> None:
        """End claims whose devices are clean and free."""
        with self._lock:
            before = self._checked('released', claims, gone_is_fine=True)
            self._store.remove(before)
        for claim in before:
            LOG.info('%s, which server %s had, is free', _device(claim),
                     claim.holder)

    def ask(self, claims: Iterable[model.Claim], request: str) -> None:
        """Store in claims the part of a request that their driver needs."""
        self._store.update([c for c in claims if c.driver_request != request],
                           driver_request=request)

    def remember(self, claim: model.Claim, memory: str) -> None:
        """Store data that the driver needs when the claim ends.

        From now on release() of the driver is called when the claim ends.

        :raises DeviceUnavailable: the server has released the claim meanwhile.
            The data are not stored, and release() will not be called.
        """
        with self._lock:
            now = self.now([claim])
            if not now or (now[0].state is _State.DELETING
                           and not now[0].prepared):
                raise exception.DeviceUnavailable(
                    f'{claim.handle.address} had to be prepared for server '
                    f'{claim.instance_uuid}, which has released it meanwhile: '
                    f'find out why that took so long.')
            self._store.update(now, driver_memory=memory, prepared=True)

    def mark_prepared(self, claim: model.Claim, prepared: bool) -> None:
        """Store whether a handle may contain data of its server, or must be
        released by its driver."""
        self._store.update([claim], prepared=prepared)

    def keep_error(self, claim: model.Claim, error: str) -> None:
        """Store the error of a release that has not finished."""
        self._store.update([claim], error=error)

    # Devices that may contain data of a server without a claim

    def settle(self, done: Iterable[values.Unsettled] = (),
               todo: Iterable[values.Unsettled] = (),
               claims: Iterable[model.Claim] = ()) -> None:
        """Settle devices, and write claims in the state BOUND or DELETING for
        them; see ClaimStore.settle()."""
        self._store.settle(done, todo, claims)

    def restore(self, claims: Iterable[model.Claim],
                gone: Iterable[model.Claim],
                todo: Iterable[values.Unsettled],
                seen: Iterable[tuple[str, int]]) -> None:
        """Restore claims that guests carry, in the state BOUND; see
        ClaimStore.restore()."""
        with self._lock:
            self._store.restore(claims, gone, todo, seen)

    def remember_cards(self, identities: Iterable[
            tuple[model.Claim, Mapping[str, str]]]) -> None:
        """Add serial numbers, ids and ports to claims that were created
        without them, in one transaction.

        :param identities: each claim with some of serial, ids and ports.
        """
        self._store.change(([claim], new) for claim, new in identities)

    def with_waiting(self) -> tuple[model.Claim, ...]:
        """Return all(), and the claims of handles that wait for the operator.
        """
        return self._store.all_claims()

    def follow(self, moved: Mapping[str, model.Claim]) -> list[model.Claim]:
        """Write the present addresses of cards into claims, all or none.

        :param moved: uuid of a claim -> the claim with its new device_address,
            ports and handle. Changes of other fields are ignored.
        :returns: the changed claims, without claims that have ended.
        """
        with self._lock:
            old = [c for c in self.with_waiting() if c.uuid in moved]
            new = [dataclasses.replace(
                claim, device_address=moved[claim.uuid].device_address,
                ports=moved[claim.uuid].ports,
                handle=moved[claim.uuid].handle) for claim in old]
            self._store.exchange(old, new)
        return new

    def reshaped(self, claim: model.Claim, provider_uuid: str) -> None:
        """Store the provider that now has the allocation of a claim."""
        self._store.update([claim], provider_uuid=provider_uuid)

    # Between two servers

    def note_unclean(self, claim: model.Claim, device: model.Device,
                     policy: str | None) -> None:
        """Store whether the handle of an ending claim is clean.

        :param device: the device of the handle.
        :param policy: the [accel] handover policy of the release, or
            handover.NOT_SHOWN; None if the handle is clean.
        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        address = claim.device_address
        self._store.change_unclean(
            [row for row in self._store.unclean()
             if (row.card.means(claim.card) or device.is_of(row.card))
             and offers.handle_at(row, address) == claim.handle.address],
            [values.Unclean(claim.handle.address, address, claim.serial,
                            claim.ids, policy, claim.ports)]
            if policy else ())

    def await_operator(self, claim: model.Claim) -> None:
        """Withhold the handle of an ending claim until the operator releases
        it.

        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        with self._lock:
            if self._checked('waiting', [claim], gone_is_fine=True):
                self._store.await_operator(claim)

    def returned(self, waiting: Iterable[model.Claim]) -> None:
        """End claims of waiting handles that the operator has cleaned.

        :raises AcceleratorsUnavailable: the store cannot be written.
        """
        with self._lock:
            self._store.remove(waiting)
        for claim in waiting:
            LOG.info('The operator has released %s', _device(claim))

    def note_handover(
            self, device: model.Device, before: model.Region | None,
            after: model.Region | None, method: str, result: str,
            claim: model.Claim | None = None, shown: str = '') -> None:
        """Write a hand-over into the journal.

        :param before: the region before the hand-over, if any.
        :param after: the region now, if any.
        :param claim: the ending claim; None if no server had the region.
        :param shown: values that were read back (drivers.base.Cleaned).
        :raises AcceleratorsUnavailable: the store cannot be written. The
            caller must then keep the claim, because vouching() would return an
            older hand-over. If the hand-over failed, and will be retried, the
            error is only logged.
        """
        handles = [claim.handle] if claim else before.handles if before else ()
        handle = handles[0].address if handles else ''
        server = claim.instance_uuid if claim else ''
        handover = values.Handover(
            time=text.now(), device=device.address,
            serial=claim.serial if claim and result == values.EXCHANGED
            else device.serial, handle=handle, server=server,
            origin=before.origin or '' if before else '', method=method,
            before=_function(before), after=_function(after),
            result=result,
            since=text.to_second(claim.since) if claim else '',
            ports=claim.ports if claim and result == values.EXCHANGED
            else device.ports, shown=shown)
        try:
            self._store.add_handover(handover)
        except exception.AcceleratorsUnavailable as error:
            if not handover.failed:
                raise
            LOG.warning('The hand-over of %s after server %s is not in the '
                        'journal: %s', handle, server, error)

    def last_shown(self, device: model.Device) -> str:
        """Return the values that the driver read back at the last completed
        hand-over of a device, or ''.

        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        found = self.vouching(device)
        return found.shown if found else ''

    def vouching(self, device: model.Device, handle: str = '',
                 ) -> values.Handover | None:
        """Return the last completed hand-over of a device, if any. It shows
        the next server how the device was cleaned.

        :param handle: address of a handle, to return only its hand-overs.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        return self._store.vouching(
            device.serial or device.ports or device.address, handle)

    # Servers that move

    def set_aside(self, server_uuid: str, migration_uuid: str) -> None:
        """Transfer the claims of a server on this host to its migration."""
        self._store.update(self.of(server_uuid), consumer_uuid=migration_uuid)

    def revert(self, server_uuid: str, claims: Iterable[model.Claim],
               ) -> list[model.Claim]:
        """Revert a move in one transaction.

        The server loses its present claims and gets the claims of the
        migration.

        :param claims: the claims of the migration.
        :returns: the claims that the server has lost; their handles are not
            free yet.
        """
        with self._lock:
            ended = self.of(server_uuid)
            changed = self._store.change([
                (ended, {'state': _State.DELETING, 'error': ''}),
                (self.now(claims), {'consumer_uuid': server_uuid})])
        for claim in ended:
            LOG.info('Server %s releases %s', claim.holder, _device(claim))
        return changed[:len(ended)]

    def _go(self, name: str, claims: Iterable[model.Claim],
            gone_is_fine: bool = False, **changes: Any) -> list[model.Claim]:
        state = TRANSITIONS[name].to
        with self._lock:
            before = self._checked(name, claims, gone_is_fine)
            after = self._store.update(before, state=state, **changes)
        for claim in before:
            if name in _SAID and claim.state is not state:
                LOG.info('Server %s %s %s', claim.holder, _SAID[name],
                         _device(claim))
        return after

    def _checked(self, name, claims, gone_is_fine):
        """Return the present version of claims, after a check that a
        transition can begin in their states.

        :param name: the transition in TRANSITIONS.
        :param gone_is_fine: whether to ignore claims that have ended.
        :raises IllegalTransition: the transition cannot begin in the state of
            a claim.
        """
        claims = list(claims)
        now = {claim.uuid: claim for claim in self.now(claims)}
        for claim in claims:
            state = now[claim.uuid].state if claim.uuid in now else None
            if state is None and gone_is_fine:
                continue
            if state not in TRANSITIONS[name].leaves:
                raise exception.IllegalTransition(
                    f'The claim of server {claim.instance_uuid} on '
                    f'{claim.handle.address} had to go through {name!r}, and '
                    f'it is {state.value if state else "released"}: report '
                    f'this as a defect of nova_accel.')
        return [now[claim.uuid] for claim in claims if claim.uuid in now]


def by_request(requests: Iterable[request.AcceleratorRequest],
               held: Iterable[model.Claim],
               ) -> Iterator[tuple[request.AcceleratorRequest,
                                   list[model.Claim]]]:
    asked = {(r.group, r.resource_class): r for r in requests}
    groups: dict = collections.defaultdict(list)
    for claim in held:
        groups[claim.group, claim.resource_class].append(claim)
    for (group, resource_class), claims in groups.items():
        yield asked.get((group, resource_class)) or request.AcceleratorRequest(
            group, resource_class, len(claims)), claims


def by_region(claims: Iterable[model.Claim],
              ) -> dict[tuple[str, int | None], list[model.Claim]]:
    """Return claims grouped by device address and region index."""
    regions: dict[tuple[str, int | None], list[model.Claim]] = {}
    for claim in claims:
        regions.setdefault(claim.part, []).append(claim)
    return regions


def _function(region: model.Region | None) -> str:
    return region.function_uuid or '' if region else ''


def _device(claim: model.Claim) -> str:
    """Return the name of the claimed device, for log lines."""
    handle = claim.handle.address
    return (handle if handle == claim.device_address
            else f'{handle} of {claim.device_address}')
