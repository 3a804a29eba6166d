# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Why devices are given to no server, or last."""

from collections.abc import Iterable
import dataclasses
import enum

from nova_accel.inventory import state
from nova_accel import log as logging
from nova_accel import model
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)

_UNSETTLED = ('it may have data of a server, and it is being found out whose, '
              'see the log of nova-compute')
# not why: owners of servers read it
_DISABLED = 'the operator has disabled it'
_OF_HEALTH = 'nova-compute has disabled it'


class Fence(enum.Enum):
    """Why a device that its driver finds is given to no server."""

    #: its driver failed, or its scan did
    DISCOVERY = 'discovery'
    #: a call about it does not return, whatever the call is for
    HANGS = 'hangs'
    #: it is being recovered
    RECOVERY = 'recovery'
    #: one of Nova's options has it as well
    CONFLICT = 'conflict'
    #: another driver has one of its functions
    SHARED = 'shared'
    #: a guest has a part of it without a claim
    GUEST = 'guest'
    #: what it tells of its health (nova_accel.health)
    HEALTH = 'health'
    # the others follow from the store, and come and go with what it has
    #: a claim is about another card at its address, or about this one at
    #: another address (inventory.identity)
    MISPLACED = 'misplaced'
    #: it may have data of a server (attach.settling)
    UNSETTLED = 'unsettled'
    #: it has something that nova_accel has not put there (Device.foreign), and
    #: no server has a claim on it
    FOREIGN = 'foreign'
    #: nova-accel disable, or inventory.conditions, until nova-accel enable
    DISABLED = 'disabled'


#: address -> cause -> a clause
ByCause = dict[str, dict[Fence, str]]


class Fences(state.State):

    def __init__(self, store: claim_store.ClaimStore, order: Iterable[str]):
        """
        :param order: names of the drivers; an earlier one has precedence.
        :raises AcceleratorsUnavailable: the store cannot be read.
        """
        super().__init__(store)
        self._order = {name: number for number, name in enumerate(order)}
        self._fences: ByCause = {}
        #: address -> why servers get it last
        self._suspects: dict[str, str] = {}
        #: address -> the two drivers that find it
        self._shared: dict[str, tuple[str, str]] = {}

    def fence(self, address: str, cause: Fence, reason: str) -> bool:
        """Withhold the device from all servers.

        :param reason: one clause.
        :returns: whether that is new.
        """
        with self._lock:
            return address in self._reported and self._fence(
                address, cause, reason)

    def _fence(self, address, cause, reason) -> bool:
        fences = self._fences.setdefault(address, {})
        if fences.get(cause) == reason:
            return False
        fences[cause] = reason
        self._generation += 1
        return True

    def unfence(self, address: str, cause: Fence) -> None:
        with self._lock:
            self._unfence(address, cause)

    def _unfence(self, address, cause):
        fences = self._fences.get(address, {})
        if fences.pop(cause, None) is not None:
            self._generation += 1
        if not fences:
            self._fences.pop(address, None)

    def _all_fences(self, claims, misplaced, disabled) -> ByCause:
        unsettled = self._store.unsettled()
        claimed = {claim.device_address for claim in claims}
        found: ByCause = {}
        for address, device in self._reported.items():
            fences = found[address] = {**self._fences.get(address, {})}
            if address in misplaced:
                fences[Fence.MISPLACED] = misplaced[address]
            elif any(row.means(device) for row in unsettled):
                fences[Fence.UNSETTLED] = _UNSETTLED
            elif device.foreign and address not in claimed:
                # while it is found out whose it is, it may be a server's
                fences[Fence.FOREIGN] = device.foreign
            if address in disabled:
                fences[Fence.DISABLED] = (
                    _DISABLED if disabled[address].is_operators
                    else _OF_HEALTH)
        return found

    def set_suspects(self, suspects: dict[str, str]) -> None:
        """Have servers get these devices last, and no others.

        :param suspects: address -> why, one clause.
        """
        with self._lock:
            if suspects != self._suspects:
                self._suspects = dict(suspects)
                self._generation += 1

    def set_mark(self, address: str, signal: str, is_so: bool) -> None:
        """Write down whether a device has one of Device.marks."""
        with self._lock:
            device = self._reported.get(address)
            if device is None or (signal in device.marks) == is_so:
                return
            now = {*device.marks, signal} if is_so else (
                {*device.marks} - {signal})
            self._reported[address] = dataclasses.replace(
                device, marks=tuple(sorted(now)))
            self._generation += 1
        self.save()

    @property
    def shared(self) -> dict[str, tuple[str, str]]:
        """Address -> the drivers that both find it, the owner first."""
        with self._lock:
            return dict(self._shared)

    def _note_shared(self, address, owner, other):
        if self._shared.get(address) != (owner, other):
            self._shared[address] = owner, other
            LOG.error('Device %s is found by the drivers %s and %s; the first '
                      'has it', address, owner, other)

    def _fence_shared(self):
        """The driver that finds a device has its function and those in its
        slot, of others the first driver; devices of others with it are fenced.
        """
        present = [d for d in self._reported.values()
                   if d.health is not model.Health.GONE]
        present.sort(key=lambda d: self._order.get(
            d.driver, len(self._order)))
        owners = {d.address: d.driver for d in present}
        for device in present:
            slot = device.address.rpartition('.')[0]
            for function in device.functions():
                if function.rpartition('.')[0] == slot:
                    owners.setdefault(function, device.driver)
        for device in present:
            functions = device.functions()
            others = sorted({owners.get(f, device.driver)
                             for f in functions} - {device.driver})
            if others:
                both = min(f for f in functions
                           if owners.get(f) == others[0])
                if self._fence(device.address, Fence.SHARED,
                               f'the driver {others[0]} has {both}'):
                    LOG.error('Device %s of the driver %s is fenced, because '
                              'the driver %s has %s of it as well: disable '
                              'one of the two, or narrow the rules of '
                              '[accel] pci_devices', device.address,
                              device.driver, others[0], both)
                continue
            owners.update(dict.fromkeys(functions, device.driver))
            if Fence.SHARED in self._fences.get(device.address, {}):
                self._unfence(device.address, Fence.SHARED)
