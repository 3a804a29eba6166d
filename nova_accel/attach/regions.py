# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Clean FPGA regions of the content that a server left in them, and program
images of the operator into regions that no server has.

======================== ================================ ==================
Content of the region    Policy clear                     Policy reset
======================== ================================ ==================
the operator's           programmed again with the same   reset
                         image; reset if the image is
                         unknown or not in Glance
of unknown origin        as the operator's if Glance      reset
                         shows that its image is the
                         operator's; otherwise as a
                         project's
a project's, loaded by   programmed with the clearing     reset
the guest itself, or     image of the region's type;
left by a failed         without one, with the operator's
programming with a       image that the server was given
project's image          (or that the region had before);
                         without that, fenced
======================== ================================ ==================

Programming initializes registers and block RAM, but not the memory of the card.
If the operator has an image that clears this memory, for the region's type,
policy clear programs it after every server, before the operator's image.

The operator programs regions by the command nova-accel program.
"""

import collections
from collections.abc import Callable, Iterable, Iterator, Sequence
import contextlib

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel.host import usage
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)
Policy = handover.Policy
#: device address and region index, as Claim.part
Part = tuple[str, int | None]
#: the operator has no such image, or nova-compute cannot search for it
_NO_IMAGE = (exception.ImageNotFound, exception.NoCredentials)
#: an image is not available
_UNAVAILABLE = (exception.BitstreamError, exception.GlanceUnavailable)


class Gate:
    """Keeps builds away from regions that are programmed without a server.

    Such a programming was ordered by the operator, or clears the memory that
    the regions of a card share. The programming closes the gate before it
    reads the claims. A build writes its claim before it waits at the gate.
    Hence at least one of the two detects the other.
    """

    def __init__(self) -> None:
        #: region -> number of programmings that keep it closed
        self._closed: collections.Counter[Part] = collections.Counter()
        #: guards _closed
        self._changed = locks.condition('ordered')

    @contextlib.contextmanager
    def closing(self, regions: Iterable[Part]) -> Iterator[Callable[[], None]]:
        """Yield a function that closes the gate for regions.

        The worker of the card calls the function when the programming begins.
        The gate opens when the context ends; a later call does nothing.
        """
        regions = list(regions)
        closed: list[Part] = []
        ended = False

        def close():
            with self._changed:
                if not ended:
                    closed.extend(regions)
                    self._closed.update(regions)
        try:
            yield close
        finally:
            with self._changed:
                ended = True
                self._closed.subtract(closed)
                self._changed.notify_all()

    def wait(self, claims: Iterable[model.Claim]) -> None:
        """Wait until the gate is open for the regions of claims.

        :raises DeviceUnavailable: the gate stays closed for longer than
            [accel] programming_timeout.
        """
        regions = {claim.part for claim in claims}
        with self._changed:
            if not self._changed.wait_for(
                    lambda: not any(self._closed[r] for r in regions),
                    CONF.accel.programming_timeout + 1):
                raise exception.DeviceUnavailable(
                    f'{min(regions)[0]} was allocated, and is still being '
                    f'programmed for the operator: the build is retried on '
                    f'another host.')


class Regions:
    """The FPGA regions of a host while no server has them."""

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud,
                 loader: loading.Loader):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._loader = loader
        self.gate = Gate()

    def look_after(self, claims: Sequence[model.Claim]) -> None:
        """Read the content of a region before the region is cleaned.

        If the guest could change the content, the content counts as loaded by
        the guest's project.

        :param claims: see clean().
        :raises DeviceUnavailable: the content cannot be read now.
        """
        device, region = self._part(claims)
        if not region or not any(claim.prepared for claim in claims):
            return
        problem = self._inventory.scanner.scan_confined([device.address])
        if problem:
            raise exception.DeviceUnavailable(
                f'{region.name} had to be cleaned after its server, and its '
                f'content cannot be read because {problem}: it is tried again '
                f'each minute.')
        device, region = self._part(claims)
        if region and (
                region.guest_can_reprogram or any(
                    # its server had the whole card, which may now have VFs
                    c.handle.address == c.device_address for c in claims)):
            self._inventory.contents.forget(
                device.address, region.index, claims[0].project_id)
            self._inventory.scanner.scan(addresses=[device.address])

    def clean(self, claims: Sequence[model.Claim]) -> str | None:
        """Clean a region after its last guest.

        :param claims: all claims on the region. Their servers no longer have
            it.
        :returns: the method, for the journal, or None if the card is absent or
            the policy is none or operator.
        :raises AcceleratorError: the region is not clean.
        """
        device, region = self._part(claims)
        if device is None or region is None:
            # cleaned when the card returns (see attach.handles)
            return None
        used = any(claim.prepared for claim in claims)
        policy = handover.policy(
            device, *(c.handle.address for c in claims))
        if policy in (Policy.NONE, Policy.OPERATOR):
            return None
        if not used and not region.has_projects_content:
            return 'not used'
        if policy is Policy.RESET:
            return self._reset(device, region)
        if region.has_projects_content:
            return self._replace(device, region, claims)
        cleared = self._clear_memory(device, region)
        image = region.bitstream_id or (
            # a programming was interrupted
            None if region.origin else _operators_image(claims))
        if image and region.programmable:
            try:
                return ', '.join([*cleared, self._reprogram(
                    device, region, image)])
            except _UNAVAILABLE as error:
                LOG.warning('%s %s is not programmed again: %s',
                            device.address, region.name, error)
        if cleared:
            return cleared[0]
        return (self._reset(device, region) if region.origin
                else self._clear(device, region))

    def _part(self, claims):
        """Return the device and the region of claims. Each is None if absent.
        """
        device = self._inventory.present(claims[0].device_address)
        return device, device and device.find_region(claims[0].region_index)

    def _clear_memory(self, device, region):
        """Clear the memory of the card if the operator has an image for it.

        Missing credentials count as a missing image. Other errors of Glance
        are raised, because the image may exist.

        :returns: the method for the journal, in a list. [] without an image.
        """
        if not region.programmable:
            return []
        try:
            return [self._clear(device, region, ('memory',))]
        except _NO_IMAGE:
            return []

    def _replace(self, device, region, claims):
        """Program a clearing image over the content that a project loaded.

        If the operator has no clearing image, program once more the operator's
        image with which the server started. In that case, the memory of the
        card is not cleared.

        :raises AcceleratorError: neither image exists, or one of them cannot
            be used.
        """
        try:
            return self._clear(device, region)
        except _NO_IMAGE:
            image = _operators_image(claims)
            if not image:
                raise
            return self._reprogram(device, region, image)

    def clean_before(self, claims: Sequence[model.Claim]) -> None:
        """Clean a region before a server gets it, if the region still has the
        content of a project.

        The content may still be there because the card was absent when the
        last server was released. Only for servers whose request accepts any
        content. Regions whose policy is not clear stay as they are.

        :param claims: claims of the server in the region.
        :raises DeviceUnavailable: the region is not clean.
        """
        device, region = self._inventory.find(
            claims[0].device_address, claims[0].region_index)
        if (region is None or not region.has_projects_content
                or handover.policy(device, *(
                    c.handle.address for c in claims)) is not Policy.CLEAR):
            return
        try:
            self._clear(device, region)
        except exception.AcceleratorError as error:
            LOG.error('%s %s has the content of a project: %s',
                      device.address, region.name, error)
            raise exception.DeviceUnavailable(
                f'{device.address} {region.name} had to be cleaned for server '
                f'{claims[0].instance_uuid}, and that failed: the build is '
                f'retried on another host.') from error

    def _reset(self, device, region):
        driver = self._inventory.driver_of(device)

        def reset():
            usage.check_not_in_use(
                driver.kernel, region.handles,
                f'{device.address} {region.name} cannot be reset')
            return driver.reset_region(device, region)
        try:
            return self._inventory.cards.call(
                device.address, f'Resetting {device.address} {region.name}',
                reset, seconds=CONF.accel.device_timeout, patient=True)
        except exception.DeviceTimeout:
            raise
        except exception.DeviceError:
            # for example a Versal card, which has no reset: a clearing image
            # removes more than the operator's image
            try:
                return self._clear(device, region)
            except _UNAVAILABLE + _NO_IMAGE:
                pass
            raise

    # Images of the operator

    def program(self, device: model.Device, region: model.Region, name: str,
                check_idle: Callable[[], None]) -> str:
        """Program the operator's image that an order names into an idle region.

        A region of [accel] fixed_devices is never programmed. But if such a
        region carries the function of the image, the function's name is
        stored.

        :param name: see glance.find_ordered().
        :param check_idle: function that raises AcceleratorError if a claim
            names the region, or if the region has changed. It reads memory
            only, because the worker of the card calls it again.
        :returns: the image's id.
        :raises BitstreamError: the operator has no such image.
        :raises IncompatibleBitstream: the image is for another type of region.
        :raises AcceleratorError: another error; the region was not programmed.
        """
        client = self._cloud.service_images()
        image = glance.find_ordered(client, name, region.region_type_uuid)
        if not region.programmable:
            check_idle()
            if not self._loader.learn_name(device, region, image):
                raise exception.DeviceUnavailable(
                    f'{device.address} {region.name} cannot be programmed with '
                    f'{image}, because [accel] fixed_devices forbids it: '
                    f'remove it there, and restart nova-compute.')
            return image.id
        with self.gate.closing([(device.address, region.index)]) as close:
            self._loader.load(client, image, device, region,
                              loading.Step(check_idle, close))
        return image.id

    def _reprogram(self, device: model.Device, region: model.Region,
                   image_id: str) -> str:
        """Program a region again with the operator's image that it carries.
        This resets registers and block RAM.

        :param image_id: id of the image. If the origin of the region is
            unknown, Glance decides whether the image is the operator's.
        :returns: the method, for the journal.
        :raises BitstreamError: Glance does not have the image any more, or the
            image is not the operator's.
        :raises AcceleratorError: another error; the region is not clean.
        """
        content = self._inventory.contents.content_of(
            device.address, region.index, image_id)
        loaded = model.Loaded(
            region.function_uuid, image_id, region.function_name, content,
            model.OPERATOR)
        if not (region.origin == model.OPERATOR
                and self._loader.load_cached(loaded, device, region)):
            client = self._cloud.service_images()
            image = glance.find_operators(client, image_id)
            loading.check_data(image, content)
            self._loader.load(client, image, device, region)
        return f'programmed again with image {image_id}'

    def _clear(self, device: model.Device, region: model.Region,
               cleared: Sequence[str] = glance.CLEARED) -> str:
        """Program the operator's clearing image of the region's type.

        :param cleared: what the image may clear: values of glance.CLEARED.
        :returns: the method, for the journal.
        :raises ImageNotFound: Glance has no such image.
        :raises BitstreamError: the image cannot be used.
        :raises DeviceUnavailable: the image clears the memory of the card, and
            a server has another region of the card.
        :raises AcceleratorError: another error; the region is not clean.
        """
        client = self._cloud.service_images()
        image = glance.find_clearing(client, region.region_type_uuid, cleared)
        if image.entry.get(glance.CLEARS) != glance.CLEARED[0]:
            self._loader.load(client, image, device, region)
            return f'cleared with image {image.id}'

        def check_alone():
            self._check_alone(device, region, image)
        check_alone()
        with self.gate.closing(
                (device.address, other.index) for other in device.regions
                if other.index != region.index) as close:
            self._loader.load(client, image, device, region,
                              loading.Step(check_alone, close))
        return f'memory cleared with image {image.id}'

    def _check_alone(self, device, region, image):
        others = [c for c in self._holdings.all()
                  if c.device_address == device.address
                  and c.region_index != region.index
                  and c.state is not model.ClaimState.DELETING]
        if others:
            raise exception.DeviceUnavailable(
                f'{device.address} {region.name} cannot be cleaned with image '
                f'{image.id}, which clears the memory of the whole card, and '
                f'server {others[0].holder} has region'
                f'{others[0].region_index} of it: the region waits for that '
                f'server\'s end, and it is tried again each minute.',
                found=f'{device.address} {region.name} had to be cleaned, and '
                      f'that has to wait')


def _operators_image(claims: Sequence[model.Claim]) -> str | None:
    """Return the id of the operator's image to program into a region after its
    server, or None if the claims on the region name no image."""
    return next((claim.operators_bitstream for claim in claims
                 if claim.operators_bitstream), None)
