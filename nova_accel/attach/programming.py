# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Regions carry what servers ask for.

From Glance or the cache to the card: one region of a card at a time, never one
that a guest has, each call of a driver with a time limit. What a region
carries is recorded as unknown before its programming begins, and as known
after it was read back.
"""

from collections.abc import Iterable, Mapping, Sequence
import dataclasses
import functools
import threading

from oslo_log import log as logging

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.bitstream import cache as bitstream_cache
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Claims = Sequence[model.Claim]


class Programming:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud,
                 publisher: publishing.Publisher):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._publisher = publisher

    @functools.cached_property
    def _cache(self):
        # when it is first needed: a host without FPGAs needs none
        return bitstream_cache.BitstreamCache(CONF.accel.bitstream_cache)

    def provision(self, context, wanted: request.AcceleratorRequest,
                  claims: Claims) -> None:
        """Make the region of a request carry what the request asks for.

        :param claims: the handles of that region that its server holds.
        :raises AcceleratorError: the region does not carry it.
        """
        if not wanted.programs:
            return
        device, region = self._inventory.find(
            claims[0].device_address, claims[0].region_index)
        if region is None:
            raise exception.InvalidRequest(
                f'The flavor asks {wanted} for a function, and '
                f'{device.address} is not an FPGA: remove the accel: key from '
                f'that group.')
        if not wanted.carried_by(region):
            self._program_for(
                context, claims, device, region,
                lambda: self._from_glance(
                    context, wanted, claims, device, region))

    def restore(self, context, claims: Iterable[model.Claim],
                requests: Mapping[str, request.AcceleratorRequest] = {},
                ) -> None:
        """Make regions carry again what their server had in them.

        A card that lost its power has forgotten its function; it comes back
        from the cache, or from Glance.

        :param claims: those of the devices that are to be restored, none of
            them in a running guest.
        :param requests: of the flavor by group, for a function that the server
            found on the card: only they say from which image it comes.
        :raises AcceleratorError: a region does not carry it; the claims stay,
            and the next start tries again.
        """
        for mine in by_region(claims).values():
            with self._holdings.kept_on_error(mine):
                self._restore(context, mine, requests)

    def _restore(self, context, mine, requests):
        device, region = self._inventory.find_held(
            mine[0].device_address, mine[0].region_index)
        _check_handles(device, region, mine)
        image = mine[0].restore_bitstream
        function = mine[0].restore_function
        if region is None:
            return
        if image and (region.bitstream_id, region.function_uuid) != (
                image, function):
            self._put_back(context, mine, device, region)
        elif (function and not image and region.function_uuid != function
                and mine[0].group in requests):
            self.provision(context, requests[mine[0].group], mine)
            self._holdings.bound(mine, self.region_of(mine))

    def _put_back(self, context, claims, device, region):
        image, function = (claims[0].restore_bitstream,
                           claims[0].restore_function)
        loaded = model.Loaded(function, image, region.function_name, '')
        LOG.info('%s %s does not carry function %s of server %s any more; it '
                 'is programmed again', device.address, region.name, function,
                 claims[0].instance_uuid)
        self._program_for(
            context, claims, device, region,
            lambda: self._as_before(context, loaded, claims, device, region))

    def region_of(self, claims: Claims) -> model.Region | None:
        """The region of claims that all have the same one, as it is now."""
        _, region = self._inventory.find_held(
            claims[0].device_address, claims[0].region_index)
        return region

    def _program_for(self, context, claims, device, region, load):
        """Program a region for its only user, and show it.

        :param load: does it.
        """
        name = f'{device.address} {region.name}'
        instance_uuid = claims[0].instance_uuid
        if not region.programmable:
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and [accel] fixed_devices forbids it.')
        others = {c.instance_uuid for c in self._holdings.all()
                  if (c.device_address, c.region_index)
                  == (device.address, region.index)} - {instance_uuid}
        if others:
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and server {min(others)} uses it.')
        self._holdings.provisioning(claims)
        load()
        self._publisher.show(context, {c.provider_uuid for c in claims})

    def _from_glance(self, context, wanted, claims, device, region):
        client = self._cloud.images(context)
        image = glance.find(client, wanted, region.region_type_uuid)
        driver = self._inventory.driver_of(device)
        with self._cache.fetch(client, image) as file:
            bitstream = driver.read_bitstream(file.path, str(image))
            glance.verify(bitstream, wanted, image, region)
            loaded = model.Loaded(
                function_uuid=bitstream.function_uuid or wanted.function_id,
                bitstream_id=image.id,
                function_name=glance.function_name(image),
                content=file.content)
            if (not wanted.bitstream_id
                    and loaded.function_uuid == region.function_uuid):
                # an image found by function, whose function is there already
                # under another name, has nothing to program
                self._inventory.set_loaded(
                    device.address, region.index, loaded)
            else:
                self._program(driver, device, region, bitstream, loaded)

    def _as_before(self, context, loaded, claims, device, region):
        try:
            self._from_cache(loaded, device, region)
        except exception.BitstreamError as error:
            LOG.info('%s', error)
            wanted = request.AcceleratorRequest(
                group='', resource_class='', amount=1,
                bitstream_id=loaded.bitstream_id)
            self._from_glance(context, wanted, claims, device, region)

    def _from_cache(self, loaded, device, region):
        """What was loaded before, without asking Glance."""
        driver = self._inventory.driver_of(device)
        with self._cache.by_image(loaded.bitstream_id) as file:
            bitstream = driver.read_bitstream(
                file.path, f'image {loaded.bitstream_id}')
            self._program(
                driver, device, region, bitstream,
                dataclasses.replace(loaded, content=file.content))

    def _program(self, driver, device, region, bitstream, loaded):
        """Program with a time limit, and record what came of it."""
        address, index = device.address, region.index
        what = (f'Programming {address} {region.name} by the driver '
                f'{device.driver}')
        lock = threading.Lock()
        begun: list[bool] = []
        gone: list[bool] = []

        def program():
            # the last moment: a guest may have got it while this call waited
            self._check_not_in_a_guest(device, region)
            with lock:
                if gone:
                    return None
                self._inventory.begin_programming(address, index)
                begun.append(True)
            return driver.program(device, region, bitstream)

        try:
            function = self._inventory.cards.call(
                address, what, program,
                seconds=CONF.accel.programming_timeout)
        except Exception as error:
            with lock:
                gone.append(True)
            if begun:
                # after a time-out the call goes on, and the card is fenced
                # until it ends
                self._inventory.programming_failed(
                    address, index,
                    report=not isinstance(error, exception.DeviceTimeout))
            if isinstance(error, exception.AcceleratorError):
                raise
            raise exception.ProgrammingFailed(
                f'{what} failed ({type(error).__name__}: {error}): look at '
                f'the card and the kernel log.') from error
        self._inventory.programmed(address, index, dataclasses.replace(
            loaded, function_uuid=function))

    def _check_not_in_a_guest(self, device, region):
        addresses = {a for handle in region.handles
                     for a in (handle.address, *handle.companions)}
        for server_uuid, there in self._cloud.running().items():
            if addresses & there:
                raise exception.DeviceUnavailable(
                    f'{device.address} {region.name} was to be programmed, '
                    f'and the guest of server {server_uuid}, which runs, has '
                    f'{min(addresses & there)}: stop that server first.')


def by_region(claims: Iterable[model.Claim],
              ) -> dict[tuple[str, int | None], list[model.Claim]]:
    """Claims by device address and region index."""
    regions: dict[tuple[str, int | None], list[model.Claim]] = {}
    for claim in claims:
        regions.setdefault(
            (claim.device_address, claim.region_index), []).append(claim)
    return regions


def _check_handles(device, region, claims):
    """VFs that were not made again after a boot are missing."""
    for claim in claims:
        if (claim.created_type is None and claim.handle
                not in (region or device).handles):
            raise exception.DeviceUnavailable(
                f'Server {claim.instance_uuid} has {claim.handle.address} of '
                f'{device.address}, which the host does not have now: look at '
                f'it with nova-accel discover, and at [accel] '
                f'virtual_functions.')
