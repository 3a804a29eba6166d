# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Clean FPGA regions of the content that a server left in them.

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
"""

from collections.abc import Sequence

from nova_accel.attach import operators_images as images
from nova_accel import conf
from nova_accel.drivers import handover
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import log as logging
from nova_accel.host import usage
from nova_accel import model

CONF = conf.CONF
LOG = logging.getLogger(__name__)
Policy = handover.Policy
#: the operator has no such image, or nova-compute cannot search for it
_NO_IMAGE = (exception.ImageNotFound, exception.NoCredentials)
#: an image is not available
_UNAVAILABLE = (exception.BitstreamError, exception.GlanceUnavailable)


class Regions:

    def __init__(self, inventory: host_inventory.Inventory,
                 operators_images: images.OperatorsImages):
        self._inventory = inventory
        self._images = operators_images

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
                return ', '.join([*cleared, self._images.reprogram(
                    device, region, image)])
            except _UNAVAILABLE as error:
                LOG.warning('%s %s is not programmed again: %s',
                            device.address, region.name, error)
        if cleared:
            return cleared[0]
        return (self._reset(device, region) if region.origin
                else self._images.clear(device, region))

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
            return [self._images.clear(device, region, ('memory',))]
        except _NO_IMAGE:
            return []

    def _replace(self, device, region, claims):
        """Program a clearing image over the content that a project loaded.

        If the operator has no clearing image, program again the operator's
        image with which the server started. In that case, the memory of the
        card is not cleared.

        :raises AcceleratorError: neither image exists, or one of them cannot
            be used.
        """
        try:
            return self._images.clear(device, region)
        except _NO_IMAGE:
            image = _operators_image(claims)
            if not image:
                raise
            return self._images.reprogram(device, region, image)

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
            self._images.clear(device, region)
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
                return self._images.clear(device, region)
            except _UNAVAILABLE + _NO_IMAGE:
                pass
            raise


def _operators_image(claims: Sequence[model.Claim]) -> str | None:
    """Return the id of the operator's image to program into a region after its
    server, or None if the claims on the region name no image."""
    return next((claim.operators_bitstream for claim in claims
                 if claim.operators_bitstream), None)
