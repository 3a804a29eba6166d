# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Accelerators for servers: initialize, plug, unplug.

The three calls of the os-acc specification, inside nova-compute. A claim is
written before hardware is touched and removed after everything is undone, so
that after a crash at any point the store says what may be half done.
"""

import collections
from collections.abc import Callable, Iterable, Mapping
import contextlib
import os

from oslo_concurrency import lockutils
from oslo_log import log as logging
from oslo_utils import uuidutils

from nova_accel.attach import claims as claim_store
from nova_accel import conf
from nova_accel import drivers
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel import sim
from nova_accel.virt import handles
from nova_accel.virt import inventory as host_inventory
from nova_accel.virt import programming

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Accelerators:
    """Every accelerator of one compute host."""

    def __init__(self, images: Callable, publish: Callable):
        """
        :param images: makes a glanceclient (version 2) from a request context.
        :param publish: shows the present traits of some of our providers in
            Placement at once; called with a context and provider uuids.
        """
        self._images = images
        self._publish = publish
        self._plugging = {}
        self.store = self.inventory = self.kernel = None

    def initialize(self, host: str, state_path: str) -> None:
        """Find the devices and read the claims; ends when both are known.

        :param host: name of this compute host.
        :param state_path: directory for the claim store.
        :raises AcceleratorsUnavailable: the claim store cannot be used.
        :raises ConfigurationError: [accel] names what is not there.
        """
        self.kernel = sim.open_kernel(host)
        loaded_drivers = drivers.load(CONF.accel.enabled_drivers, self.kernel)
        os.makedirs(state_path, exist_ok=True)
        self.store = claim_store.ClaimStore(
            os.path.join(state_path, f'accel_claims_{host}.sqlite'))
        self.inventory = host_inventory.Inventory(loaded_drivers, self.store)
        self._handles = handles.Handles(self.inventory, self.store)
        self._programming = programming.Programming(
            self.inventory, self.store, self._images, self._publish)
        self._configure(loaded_drivers)
        self.inventory.scan()
        self.inventory.check_configuration()
        self.inventory.watch(self.kernel)
        # what a process that is gone was doing when it went
        interrupted = [c for c in self.store.claims() if c.state in (
            model.ClaimState.INITIAL, model.ClaimState.PROVISIONING)]
        if interrupted:
            self.store.update(
                interrupted, state=model.ClaimState.UNKNOWN,
                error='nova-compute stopped while the device was prepared')
        self._make_again()

    def _make_again(self):
        """A boot of the host forgets what was made of handles: before their
        room goes to others, make it again."""
        devices = collections.defaultdict(list)
        for claim in self.store.claims():
            if claim.created_type and claim.state is model.ClaimState.BOUND:
                devices[claim.device_address].append(claim)

        def make(claims):
            for claim in claims:
                try:
                    self._handles.prepare([claim], fresh=False)
                except Exception as error:
                    LOG.error('What server %s has is not there again: %s',
                              claim.instance_uuid, error)
                    if isinstance(error, exception.DeviceTimeout):
                        return
        for future in [limited.start(make, claims)
                       for claims in devices.values()]:
            future.result()
        self._see_made([c for claims in devices.values() for c in claims])

    @staticmethod
    def _configure(loaded_drivers):
        """What cannot be configured costs its own devices only."""
        started = {name: limited.start(driver.configure)
                   for name, driver in loaded_drivers.items()}
        for name, future in started.items():
            try:
                limited.wait(future, CONF.accel.discovery_timeout,
                             f'Configuring the devices of the driver {name}')
            except exception.ConfigurationError:
                raise
            except Exception as error:
                LOG.error('Devices of the driver %s are not as configured: '
                          '%s', name, error)

    # Attach

    def start_plug(self, context, instance_uuid: str,
                   extra_specs: Mapping[str, str],
                   allocations: Callable[[], Mapping | None],
                   wishes: Mapping[str, str]) -> None:
        """Begin plug() in the background; once, however often it is called.

        Flavors without accelerators cost nothing here.

        :param allocations: gives the instance's allocations; called in the
            background.
        """
        if instance_uuid in self._plugging or not request.parse(extra_specs):
            return

        def plug():
            context.update_store()
            return self.plug(context, instance_uuid, extra_specs,
                             allocations(), wishes)
        self._plugging[instance_uuid] = limited.start(plug)

    def join_plug(self, instance_uuid: str) -> None:
        """Wait for what start_plug() began, and raise what it raised.

        Has no limit of its own: each step of plug() has one.
        """
        future = self._plugging.get(instance_uuid)
        if future is not None:
            try:
                future.result()
            finally:
                self._plugging.pop(instance_uuid, None)

    def plug(self, context, instance_uuid: str,
             extra_specs: Mapping[str, str], allocations: Mapping | None,
             wishes: Mapping[str, str], restart: bool = False,
             ) -> list[model.Claim]:
        """Claim and prepare what was allocated to a server.

        Idempotent: devices that the server holds already stay as they are.
        After an error nothing is held.

        :param extra_specs: of the flavor, expanded.
        :param allocations: ``{provider uuid: {'resources': {class: n}}}``.
        :param wishes: properties of the server's image, see request.wish.
        :param restart: the server had its devices before, so that where
            flavor and allocations disagree the allocations are right (a
            resize that failed on its destination).
        :raises AcceleratorError: of many kinds, each in one sentence.
        """
        by_flavor = request.parse(extra_specs)
        requests = request.parse(request.wish(extra_specs, wishes))
        if allocations is None and requests:
            raise exception.PlacementUnavailable(
                f'Server {instance_uuid} was to get its accelerators, and '
                f'Placement did not say which: see that it answers '
                f'nova-compute.')
        held = self._held(instance_uuid)
        offers = self.inventory.offers(
            allocations, free={(c.device_address, c.region_index)
                               for c in held})
        # where standard classes are in force a VGPU may be one of Nova's own
        offered = {name for o in offers for name in o.resources}
        requests = [r for r in requests if r.resource_class in offered
                    or naming.is_custom(r.resource_class)]
        if restart and _amounts(requests) != collections.Counter(
                {n: sum(o.resources.get(n, 0) for o in offers)
                 for n in offered}):
            pairs = [(request.AcceleratorRequest('', name, amount), offer)
                     for offer in offers
                     for name, amount in offer.resources.items()]
        else:
            pairs = (self._held_pairs(held, requests, offers)
                     or request.match(requests, offers))
        try:
            if held and not self._same(held, pairs):
                LOG.warning('Server %s holds devices that are not allocated '
                            'to it; they are released', instance_uuid)
                self._release(context, held)
                held = []
            claims = held or self._claim(instance_uuid, pairs)
            bound = held and self.is_bound(instance_uuid)
            for wanted, offer in pairs:
                mine = [c for c in claims if c.group == wanted.group
                        and c.provider_uuid == offer.provider_uuid]
                if bound and wanted in by_flavor:
                    # a rebuild: the devices stay as they were, unless the
                    # image wants otherwise
                    self._restore_functions(context, mine,
                                            {wanted.group: wanted})
                else:
                    self._programming.provision(context, wanted, mine)
            self._handles.prepare(claims, fresh=not held)
            self._bind(claims)
            self._see_made(claims)
            self._publish(context, self._still_open(claims))
        except Exception as error:
            self._undo(context, instance_uuid, error)
            raise
        return claims

    @staticmethod
    def _held_pairs(held, requests, offers):
        """The requests with the offers that the server holds already."""
        offered = {o.provider_uuid: o for o in offers}
        pairs = []
        for wanted in requests:
            uuids = {c.provider_uuid for c in held
                     if (c.group, c.resource_class)
                     == (wanted.group, wanted.resource_class)}
            if len(uuids) != 1 or not uuids <= offered.keys():
                return None
            pairs.append((wanted, offered[uuids.pop()]))
        return pairs

    def _bind(self, claims):
        """Everything is prepared; remember what the regions carry."""
        for (address, index), mine in self._by_region(claims).items():
            _, region = self.inventory.find(address, index)
            self.store.update(
                mine, state=model.ClaimState.BOUND, error='',
                restore_function=region and region.function_uuid,
                restore_bitstream=region and region.bitstream_id)

    @staticmethod
    def _by_region(claims):
        regions = collections.defaultdict(list)
        for claim in claims:
            regions[claim.device_address, claim.region_index].append(claim)
        return regions

    def _still_open(self, claims):
        """Providers in use that can be allocated again: those must not look
        programmable, or offer what is used up, any longer, and for the others
        the next report is soon enough."""
        held = {c.handle for c in self.store.claims()}
        return sorted({
            mine[0].provider_uuid
            for (address, index), mine in self._by_region(claims).items()
            if mine[0].created_type or index is not None
            and not held.issuperset(
                self.inventory.find(address, index)[1].handles)})

    @staticmethod
    def _same(held, pairs):
        return (collections.Counter(
                    (c.provider_uuid, c.resource_class, c.group)
                    for c in held)
                == collections.Counter(
                    {(o.provider_uuid, r.resource_class, r.group): r.amount
                     for r, o in pairs}))

    def _claim(self, instance_uuid, pairs):
        with self.inventory.claiming:
            claims = self._choose(instance_uuid, pairs)
            self.store.add(claims)
        return claims

    def _choose(self, instance_uuid, pairs):
        taken = {c.handle for c in self.store.claims()}
        providers = self.inventory.own_providers()
        claims = []
        for wanted, offer in pairs:
            provider = providers[offer.provider_uuid]
            device, region = self.inventory.find(
                provider.address, provider.region_index)
            free = [h for h in (region or device).handles if h not in taken]
            if len(free) < wanted.amount:
                raise exception.DeviceUnavailable(
                    f'Server {instance_uuid} was allocated {wanted.amount} of '
                    f'{provider.name}, and {len(free)} of it are free on this '
                    f'host: the build has to go elsewhere.')
            created_type = self._handles.type_for(wanted, device)
            for handle in free[:wanted.amount]:
                taken.add(handle)
                claims.append(model.Claim(
                    created_type=created_type,
                    uuid=uuidutils.generate_uuid(),
                    instance_uuid=instance_uuid, consumer_uuid=instance_uuid,
                    role=model.Role.CURRENT,
                    provider_uuid=offer.provider_uuid,
                    resource_class=wanted.resource_class, group=wanted.group,
                    device_address=device.address,
                    region_index=region and region.index, handle=handle))
        return claims

    def restore(self, context, instance_uuid: str,
                requests: Iterable[request.AcceleratorRequest] = (),
                ) -> None:
        """Before a guest starts again: see that its devices are as they were.

        A card that lost its power has forgotten its function; it gets it back
        from the cache, or from Glance.

        :param requests: of the flavor, for a function that was found on the
            card: nothing says from which image it came.
        :raises AcceleratorError: the guest must not start.
        """
        asked = {wanted.group: wanted for wanted in requests}
        claims = self._held(instance_uuid)
        self._see_returned(claims)
        if self.is_bound(instance_uuid):
            self._handles.prepare(claims, fresh=False)
            self._see_made(claims)
        self._restore_functions(context, claims, asked)

    def _restore_functions(self, context, claims, asked):
        for (address, index), mine in self._by_region(claims).items():
            try:
                self._restore_function(context, address, index, mine, asked)
            except Exception as error:
                # the next start tries again
                self.store.update(mine, state=model.ClaimState.UNKNOWN,
                                  error=str(error))
                raise

    def _restore_function(self, context, address, index, mine, asked):
        device, region = self.inventory.find(address, index)
        self._see_handles(device, region, mine)
        image = mine[0].restore_bitstream
        function = mine[0].restore_function
        if image and (region.bitstream_id, region.function_uuid) != (
                image, function):
            self._programming.put_back(context, mine, device, region)
        elif (function and not image and region.function_uuid != function
                and mine[0].group in asked):
            self._programming.provision(context, asked[mine[0].group], mine)
            return self._bind(mine)
        elif not function or self.is_bound(mine[0].instance_uuid):
            # where it is None the preparation may not have come so far
            return None
        self.store.update(mine, state=model.ClaimState.BOUND, error='')

    @staticmethod
    def _see_handles(device, region, claims):
        """Where VFs were not made again after a boot, they are missing."""
        for claim in claims:
            if (claim.created_type is None and claim.handle
                    not in (region or device).handles):
                raise exception.DeviceUnavailable(
                    f'Server {claim.instance_uuid} has '
                    f'{claim.handle.address} of {device.address}, which is '
                    f'not there to be given now: look at it with nova-accel '
                    f'discover, and at [accel] virtual_functions.')

    def _see_returned(self, claims):
        """Look again at cards that a guest had whole, and may have
        changed."""
        opened = [(c.device_address, c.region_index) for c in claims
                  if self.inventory.is_open(c.device_address, c.region_index)]
        for address, index in opened:
            # only the guest knew what it loaded
            self.inventory.set_loaded(address, index, None)
        if opened or any(c.handle.address == c.device_address
                         for c in claims):
            self.inventory.scan()

    def _see_made(self, claims):
        """What is made takes from what its siblings offer, and what is taken
        back gives it again."""
        devices = self.inventory.devices
        names = {devices[c.device_address].driver for c in claims
                 if c.created_type and c.device_address in devices}
        if names:
            self.inventory.scan(names)

    def reprogram(self, context, instance_uuid: str,
                  wanted: request.AcceleratorRequest,
                  detach: Callable, attach: Callable) -> None:
        """Program a region of a running server anew.

        After a failure the server has its device back with the function that
        it had; where that cannot be, the device stays out of the guest.

        :param detach: takes handles out of the guest.
        :param attach: puts them back.
        :raises AcceleratorError: the server has what it had.
        :raises DeviceDetached: the guest is without its device.
        """
        claims = [c for c in self._held(instance_uuid)
                  if c.group == wanted.group]
        if not claims:
            raise exception.DeviceUnavailable(
                f'Server {instance_uuid} was to have {wanted} programmed, and '
                f'has no accelerator there: hard reboot it.')
        handles = [c.handle for c in claims]
        function = failure = None
        try:
            detach(handles)
            self._see_returned(claims)
            function = self._function(claims)
            self._programming.provision(context, wanted, claims)
            self._bind(claims)
        except Exception as error:
            failure = error
        try:
            if failure:
                self.restore(context, instance_uuid)
                if function and not self._function(claims):
                    raise exception.DeviceUnavailable(
                        f'Function {function} is lost, and nothing says from '
                        f'which image it came.')
                self.store.update(claims, state=model.ClaimState.BOUND)
            attach(handles)
        except Exception as error:
            self.store.update(claims, state=model.ClaimState.UNKNOWN,
                              error=str(error))
            raise exception.DeviceDetached(str(failure or error)) from error
        if failure:
            raise failure

    def _function(self, claims):
        _, region = self.inventory.find(
            claims[0].device_address, claims[0].region_index)
        return region and region.function_uuid

    # Release

    def unplug(self, context, instance_uuid: str,
               role: model.Role = model.Role.CURRENT) -> int:
        """Release what a server holds, when its guest is gone.

        :returns: how many accelerators were released.
        """
        self.settle(instance_uuid)
        with contextlib.suppress(Exception):
            # its failure was or will be told where it is joined
            self.join_plug(instance_uuid)
        claims = self.store.claims(instance_uuid, role)
        if claims:
            self._release(context, claims)
        return len(claims)

    def _undo(self, context, instance_uuid, error):
        claims = self.store.claims(instance_uuid, model.Role.CURRENT)
        if claims:
            self.store.update(
                claims, state=model.ClaimState.BIND_FAILED, error=str(error))
            self._release(context, claims)

    def _release(self, context, claims: Iterable[model.Claim]):
        self.store.update(claims, state=model.ClaimState.DELETING)
        released = [c for c in claims if self._handles.undo(
            c, late=lambda claim=c: self._free(context, [claim], [claim]))]
        self._free(context, claims, released)

    def _free(self, context, claims, released):
        self._see_returned(released)
        self._see_made(released)
        self.store.remove(released)
        self._publish(context, sorted({c.provider_uuid for c in claims}))

    def release_again(self, context) -> int:
        """Try again what could not be taken back.

        :returns: how many accelerators were released.
        """
        left = [c for c in self.store.claims()
                if c.state is model.ClaimState.DELETING]
        if left:
            self._release(context, left)
        return len(left) - sum(c.state is model.ClaimState.DELETING
                               for c in self.store.claims())

    # What is held

    def mediated_devices(self) -> set[str]:
        """UUIDs that are ours, whether there is such a device now or not."""
        handles = [c.handle for c in self.store.claims()]
        for device in self.inventory.devices.values():
            handles += device.handles
        return {h.address for h in handles
                if h.type is model.HandleType.MDEV}

    def is_plugging(self, instance_uuid: str) -> bool:
        return instance_uuid in self._plugging

    def handles(self, instance_uuid: str) -> list[model.AttachHandle]:
        """What the guest of a server is to be given, in a stable order."""
        return [c.handle for c in self._held(instance_uuid)]

    def _held(self, instance_uuid):
        """Claims of a server, without those that could not be taken back."""
        return [c for c in self.store.claims(
                    instance_uuid, model.Role.CURRENT)
                if c.state is not model.ClaimState.DELETING]

    def is_bound(self, instance_uuid: str) -> bool:
        """Whether all that a server holds has been prepared to the end."""
        return all(c.state is model.ClaimState.BOUND
                   for c in self._held(instance_uuid))

    @staticmethod
    def busy(instance_uuid: str) -> contextlib.AbstractContextManager:
        """While the devices of a running guest are worked on.

        Who begins sees by the server's task_state that Nova is not at it, and
        Nova's operations settle() before they touch devices. Not Nova's own
        lock: calls that may not be late wait for that one.
        """
        return lockutils.lock(f'accel-{instance_uuid}')

    def settle(self, instance_uuid: str) -> None:
        """Wait until nobody is busy() with a server."""
        with self.busy(instance_uuid):
            pass

    def set_aside(self, instance_uuid: str, migration_uuid: str) -> None:
        """The server moves away; what it has is kept for its return."""
        self.store.update(
            self.store.claims(instance_uuid, model.Role.CURRENT),
            role=model.Role.OLD, consumer_uuid=migration_uuid)

    def take_back(self, instance_uuid: str) -> None:
        """The server is back from where it moved."""
        self.store.update(
            self.store.claims(instance_uuid, model.Role.OLD),
            role=model.Role.CURRENT, consumer_uuid=instance_uuid)

    def take_back_if_allocated(self, instance_uuid: str,
                               allocations: Callable[[], Mapping | None],
                               ) -> None:
        """A move failed, and what was set aside is the server's again.

        :param allocations: gives the instance's allocations; called only
            where all that the server has here is set aside.
        """
        claims = self.store.claims(instance_uuid)
        if (claims and all(c.role is model.Role.OLD for c in claims)
                and {c.provider_uuid for c in claims} <= set(
                    allocations() or ())):
            self.take_back(instance_uuid)

    def close(self) -> None:
        self._plugging.clear()
        if self.inventory:
            self.inventory.close()


def _amounts(requests):
    amounts = collections.Counter()
    for wanted in requests:
        amounts[wanted.resource_class] += wanted.amount
    return amounts
