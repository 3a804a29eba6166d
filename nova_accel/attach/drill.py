# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-accel drill: a false finding goes the way of a true one, and back.

The reading ``drill`` is added to what a disabled device tells. All that follows
is as with any other signal; this module looks whether it arrives at each place,
and whether it is gone from there afterwards.
"""

from collections.abc import Callable, Mapping
import contextlib
import time

from nova_accel.attach import accelerators as server_accelerators
from nova_accel.attach import cloud as novas
from nova_accel.attach import metrics
from nova_accel.attach import notices as device_notices
from nova_accel.attach import owners
from nova_accel import conf
from nova_accel import exception
from nova_accel.health import signals
from nova_accel.inventory import conditions
from nova_accel.inventory import identity
from nova_accel import model
from nova_accel import naming

CONF = conf.CONF
#: in which a finding has to arrive everywhere, or to go
SECONDS = 60
#: seconds between two scans, and between two questions
_LOOK, _PAUSE = 2, 0.1
#: of a device that goes while it is drilled
_REMOVED = conditions.Condition(
    signals.State.GONE, 'it is not on this host any more', signals.State.GONE)

#: where, as a part of a sentence -> whether the finding is there, or is gone
#: from there; what is asked may raise AcceleratorError
_Places = Mapping[str, Callable[[bool], bool]]


class Drill:

    def __init__(self, accelerators: server_accelerators.Accelerators,
                 cloud: novas.Cloud, notices: device_notices.Notices):
        self._accelerators = accelerators
        self._inventory = accelerators.inventory
        self._cloud = cloud
        self._notices = notices
        accelerators.orders.accept(signals.DRILL, self.drill)

    def drill(self, order: str) -> str:
        """Have a disabled device tell a false finding for a while.

        :param order: address, a blank, and for how many seconds the finding
            stays once it has arrived everywhere.
        :returns: where it was, in one sentence.
        :raises DeviceUnavailable: the device is not disabled by the operator,
            or is not well; the finding did not arrive, or did not go.
        :raises InvalidRequest: [accel] health has the signal off.
        """
        address, _, stays = order.partition(' ')
        device, _ = identity.part(address, self._inventory.devices)
        acts = self._check(device) is signals.Mode.ACT
        servers = self._servers_that_are_well(address) if acts else set()
        began = time.monotonic()
        with self._inventory.health.drilled(address):
            places = self._places(address, servers)
            self._wait(address, places, True)
            took = time.monotonic() - began
            step = self._recover(address)
            time.sleep(float(stays))
        self._wait(address, places, False)
        # it may be drilled again at once
        self._inventory.recover()
        beside = '' if acts else (
            f'; neither Placement nor owners are told, because '
            f'{signals.OPTION} has it observed only')
        if acts and 'in Placement' not in places:
            beside = ('; Placement does not show it, because its pool has '
                      'others')
        return (f'The drill of {address} arrived {", ".join(places)} within '
                f'{took:.1f} s{step}, and is over there{beside}.')

    def _recover(self, address: str) -> str:
        """Have the device recovered as one that has failed.

        :returns: how, as a part of the answer; '' where that is not done: a
            server has it, or [accel] health observes the drill.
        """
        known = self._condition(address)
        if not any(f.acts and f.state is signals.State.QUARANTINED
                   for f in known.findings):
            return ''
        ends = time.monotonic() + SECONDS
        while (step := self._inventory.recovery.steps.get(address)) is None:
            # a card that is being read is left for the next time
            self._inventory.recover()
            if time.monotonic() > ends:
                break
            time.sleep(_PAUSE)
        return (f', was answered by a {step}' if step else
                ', was answered by no step of recovery')

    def _condition(self, address: str) -> conditions.Condition:
        return self._inventory.health.conditions().get(address, _REMOVED)

    def _check(self, device: model.Device) -> signals.Mode:
        """Return what is done about the signal."""
        address = device.address
        disabled = self._inventory.table.disabled().get(address)
        if disabled is None or not disabled.is_operators:
            raise exception.DeviceUnavailable(
                f'A drill of {address} was asked for, and a server might get '
                f'it meanwhile, because the operator has not disabled it: '
                f'nova-accel disable {address} first.')
        known = self._condition(address)
        if known.findings or known.for_owner is not signals.State.OK:
            raise exception.DeviceUnavailable(
                f'A drill of {address} was asked for, and it is not well '
                f'({known.reason}): name a device that is.')
        mode = signals.modes()[signals.DRILL]
        if mode is signals.Mode.OFF:
            raise exception.InvalidRequest(
                f'A drill of {address} was asked for, and {signals.OPTION} has '
                f'it off: add {signals.DRILL}=observe or {signals.DRILL}=act '
                f'there, and restart nova-compute.')
        return mode

    def _servers_that_are_well(self, address: str) -> set[str]:
        """Return those that have the device, and whose metadata say nothing
        yet."""
        return {server.uuid for server in self._cloud.servers({
            claim.instance_uuid for claim in self._accelerators.holdings.all()
            if claim.device_address == address
            and claim.role is model.Role.CURRENT
            and claim.state is not model.ClaimState.DELETING})
            if not owners.health_keys(server)}

    def _places(self, address: str, servers: set[str]) -> _Places:
        """Wait until nova-compute has found it.

        :returns: where it has to arrive then, as nova-compute is configured.
        """
        found: dict[str, Callable[[bool], bool]] = {
            'at nova-compute': lambda on: on is (signals.DRILL in {
                finding.signal
                for finding in self._condition(address).findings})}
        self._wait(address, found, True)
        found['in a notification'] = lambda on: on is (
            signals.DRILL in self._notices.signals_of(address))
        path = CONF.accel.metrics_file
        if path:
            found['in the file of metrics'] = lambda on: on is metrics.has(
                path, address, signals.DRILL)
        shown = {uuid for uuid, provider in self._inventory.providers().items()
                 if address in provider.addresses
                 and naming.SUSPECT in provider.traits}
        if shown:
            found['in Placement'] = lambda on: self._is_shown(shown, on)
        if servers:
            found[f'in the metadata of {len(servers)} servers'] = lambda on: {
                on} == {bool(owners.health_keys(server))
                        for server in self._cloud.servers(servers)}
        return found

    def _is_shown(self, providers: set[str], on: bool) -> bool:
        """Have Placement show it, which the next report would do."""
        self._accelerators.publisher.show(
            self._cloud.admin_context(), providers)
        return {on} == {bool(self._cloud.find_providers(
            trait=naming.SUSPECT, uuid=uuid)) for uuid in providers}

    def _wait(self, address: str, places: _Places, on: bool) -> None:
        """Look until the finding is everywhere, or nowhere.

        :raises DeviceUnavailable: that is not so after SECONDS.
        """
        ends = time.monotonic() + SECONDS
        looks = 0.0
        left = dict(places)
        while left:
            now = time.monotonic()
            if now > ends:
                raise exception.DeviceUnavailable(
                    f'A drill of {address} was {"begun" if on else "ended"}, '
                    f'and after {SECONDS} s it is '
                    f'{"not" if on else "still"} seen {", ".join(left)}: see '
                    f'the log of nova-compute.')
            if now >= looks:
                self._inventory.scanner.looks.start()
                looks = now + _LOOK
            for place, is_so in places.items():
                with contextlib.suppress(exception.AcceleratorError):
                    if place in left and is_so(on):
                        del left[place]
            if left:
                time.sleep(_PAUSE)
