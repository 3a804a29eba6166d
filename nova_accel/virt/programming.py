# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Regions carry what servers ask for.

From Glance or the cache to the card, one region of a card at a time, each call
of a driver with a time limit.
"""

from collections.abc import Callable, Iterable
import contextlib
import dataclasses

from oslo_log import log as logging

from nova_accel.bitstream import cache as bitstream_cache
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import model
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class Programming:

    def __init__(self, inventory, store, images: Callable, publish: Callable):
        """
        :param images: makes a glanceclient (version 2) from a request context.
        :param publish: shows the present traits of some of our providers in
            Placement at once; called with a context and provider uuids.
        :raises BitstreamError: the cache's directory cannot be used.
        """
        self._inventory = inventory
        self._store = store
        self._images = images
        self._publish = publish
        self._cache = bitstream_cache.BitstreamCache(
            CONF.accel.bitstream_cache)

    def provision(self, context, wanted: request.AcceleratorRequest,
                  claims: Iterable[model.Claim]) -> None:
        """Make the region of one request carry what it asks for.

        :raises AcceleratorError: it does not.
        """
        if not wanted.programs:
            return
        device, region = self._inventory.find(
            claims[0].device_address, claims[0].region_index)
        if region is None:
            raise exception.InvalidRequest(
                f'The flavor asks {wanted} for a function, and '
                f'{device.address} is no FPGA: remove the accel: key from '
                f'that group.')
        if not wanted.carried_by(region):
            self._program_for(
                context, claims, device, region,
                lambda: self._from_glance(context, wanted, device, region))

    def put_back(self, context, claims: Iterable[model.Claim],
                 device: model.Device, region: model.Region) -> None:
        """Make a region carry again what a server had in it.

        :raises AcceleratorError: it does not.
        """
        image = claims[0].restore_bitstream
        function = claims[0].restore_function
        loaded = self._store.loaded().get((device.address, region.index))
        if not loaded or loaded.bitstream_id != image:
            loaded = model.Loaded(function, image, None, '')
        LOG.info('%s %s has lost function %s of server %s', device.address,
                 region.name, function, claims[0].instance_uuid)
        self._program_for(
            context, claims, device, region,
            lambda: self._as_before(context, loaded, device, region))

    def _program_for(self, context, claims, device, region, load):
        """Program a region for its only user, and say so everywhere.

        :param load: does it and returns model.Loaded.
        """
        name = f'{device.address} {region.name}'
        instance_uuid = claims[0].instance_uuid
        if not region.programmable:
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and [accel] fixed_devices forbids it.')
        others = {c.instance_uuid for c in self._store.claims()
                  if (c.device_address, c.region_index)
                  == (device.address, region.index)} - {instance_uuid}
        if others:
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and server {min(others)} uses it.')
        self._store.update(claims, state=model.ClaimState.PROVISIONING)
        loaded = load()
        self._inventory.set_loaded(device.address, region.index, loaded)
        self._publish(context, [claims[0].provider_uuid])

    def _from_glance(self, context, wanted, device, region):
        client = self._images(context)
        image = glance.find(client, wanted, region.region_type_uuid)
        driver = self._inventory.driver_of(device)
        with self._cache.fetch(client, image) as file:
            bitstream = driver.read_bitstream(file.path, str(image))
            glance.verify(bitstream, wanted, image, region)
            function = bitstream.function_uuid or wanted.function_id
            # an image found by function, whose function is there already
            # under another name, has nothing to program
            if wanted.bitstream_id or function != region.function_uuid:
                function = self._program(driver, device, region, bitstream)
            return model.Loaded(
                function_uuid=function, bitstream_id=image.id,
                function_name=glance.function_name(image),
                content=file.content)

    def _as_before(self, context, loaded, device, region):
        try:
            return self._from_cache(loaded, device, region)
        except exception.BitstreamError as error:
            LOG.info('%s', error)
            wanted = request.AcceleratorRequest(
                group='', resource_class='', amount=1,
                bitstream_id=loaded.bitstream_id)
            return self._from_glance(context, wanted, device, region)

    def _from_cache(self, loaded, device, region):
        """What was loaded before, without asking anybody."""
        driver = self._inventory.driver_of(device)
        with self._cache.by_image(loaded.bitstream_id) as file:
            bitstream = driver.read_bitstream(
                file.path, f'image {loaded.bitstream_id}')
            function = self._program(driver, device, region, bitstream)
            return dataclasses.replace(
                loaded, function_uuid=function, content=file.content)

    def _program(self, driver, device, region, bitstream):
        """Program with a time limit, one region of a card at a time."""
        what = (f'Programming {device.address} {region.name} by the driver '
                f'{device.driver}')
        seconds = CONF.accel.programming_timeout
        with contextlib.ExitStack() as stack:
            lock = self._inventory.device_locks[device.address]
            if not lock.acquire(timeout=seconds):
                raise exception.DeviceUnavailable(
                    f'{what} has to wait, and the card is still busy after '
                    f'{seconds} s: the build has to go elsewhere.')
            stack.callback(lock.release)
            stack.enter_context(self._inventory.programming(device.address))
            running = limited.start(driver.program, device, region, bitstream)
            try:
                return limited.wait(running, seconds, what)
            except exception.DeviceTimeout as error:
                # nobody knows what the card does now, until the call returns
                self._inventory.quarantine(device.address, region.index,
                                           str(error))
                later = stack.pop_all()

                def returned(_future):
                    later.close()
                    self._inventory.scan()
                running.add_done_callback(returned)
                raise
            except Exception as error:
                self._inventory.set_loaded(device.address, region.index, None)
                stack.close()
                # the driver says what the failure left
                self._inventory.scan()
                if isinstance(error, exception.AcceleratorError):
                    raise
                raise exception.ProgrammingFailed(
                    f'{what} failed ({type(error).__name__}: {error}): look '
                    f'at the card and the kernel log.') from error
