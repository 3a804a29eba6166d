# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Which image of Glance a region needs, and whether it carries it already."""

import contextlib

from nova_accel.attach import cloud as novas
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request

CONF = conf.CONF


class Images:
    """The images that requests of servers mean."""

    def __init__(self, inventory: host_inventory.Inventory,
                 cloud: novas.Cloud):
        self._inventory = inventory
        self._cloud = cloud

    def find(self, context, project_id: str,
             wanted: request.AcceleratorRequest, region: model.Region):
        """Return the image of a request, and a client that may read it.

        The flavor may name an image of the operator, which the tenant need not
        see. An image that the owner of the server names is read with the
        user's token, if there is one.

        :returns: (client, image).
        """
        operators = None
        if CONF.accel.bitstream_owners and not wanted.chosen_by_owner:
            operators = self._cloud.service_images()
        return glance.find(
            self._cloud.images(context), wanted, region.region_type_uuid,
            project_id, operators)

    def find_first(self, context, project_id: str,
                   wanted: request.AcceleratorRequest, region: model.Region):
        """Return (choice, client, image), see glance.find_first()."""
        return glance.find_first(wanted, lambda choice: self.find(
            context, project_id, choice, region))

    def find_named(self, context, project_id: str,
                   wanted: request.AcceleratorRequest, region: model.Region,
                   ) -> list[glance.Image]:
        """Return the images with a name of the request, if the region carries
        content of the operator, which may be one of them.

        A name without an image is ignored: another host may have a region with
        that name.
        """
        found = []
        for choice in wanted.choices:
            if choice.function_name and region.origin == model.OPERATOR:
                with contextlib.suppress(exception.BitstreamError,
                                         exception.IncompatibleBitstream):
                    found.append(self.find(
                        context, project_id, choice, region)[1])
        return found

    def learn_name(self, device: model.Device, region: model.Region,
                   image: glance.Image) -> bool:
        """Note the name of the function of a region, if this image of the
        operator has the function.

        The image was renamed since the region was programmed, or the card
        loaded the function from its flash, which has no name.

        :returns: whether the region carries the function of the image.
        """
        same = self.has_data(device, region, image)
        if glance.origin(image.entry) != model.OPERATOR or not (
                same or region.function_uuid == glance.function_id(image)
                and region.function_uuid not in (
                    None, *model.SHARED_FUNCTIONS)):
            return False
        self._inventory.contents.set_loaded(
            device.address, region.index, model.Loaded(
                region.function_uuid, region.bitstream_id,
                glance.function_name(image), image.content if same else '',
                model.OPERATOR))
        return True

    def has_data(self, device: model.Device, region: model.Region,
                 image: glance.Image) -> bool:
        """Return whether a region was programmed with the present data of an
        image.

        Glance gives the id of a purged image to any project that asks for it
        (OSSN-0075).
        """
        return region.bitstream_id == image.id and image.content == (
            self._inventory.contents.content_of(
                device.address, region.index, image.id))


def check_data(image: glance.Image, content: str) -> None:
    """Check that an image has the data that a region was programmed with.

    :param content: checksum of those data; '' if they are unknown.
    :raises BitstreamError: the image has other data.
    """
    if content and image.content != content:
        raise exception.BitstreamError(
            f'{image} was programmed before, and its data are other ones now: '
            f'the image was deleted, and its id was used for another one; '
            f'upload the first one with a new id, and rebuild the server with '
            f'that.')
