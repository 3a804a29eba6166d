# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Program images of the operator into regions that no server uses.

attach.cleaning does so after a server, to replace the content of its region.
The operator does so by the command nova-accel program.
"""

from collections.abc import Callable, Sequence
import dataclasses

from nova_accel.attach import cloud as novas
from nova_accel.attach import gate as region_gate
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import model
from nova_accel import request


@dataclasses.dataclass(eq=False)
class OperatorsImages:
    """Programs images of the operator into regions that no server has."""

    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _cloud: novas.Cloud
    _loader: loading.Loader
    _gate: region_gate.Gate

    def reprogram(self, device: model.Device, region: model.Region,
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
            self._load(client, image, device, region)
        return f'programmed again with image {image_id}'

    def clear(self, device: model.Device, region: model.Region,
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
            self._load(client, image, device, region)
            return f'cleared with image {image.id}'

        def check_alone():
            self._check_alone(device, region, image)
        check_alone()
        with self._gate.closing(
                (device.address, other.index) for other in device.regions
                if other.index != region.index) as close:
            self._load(client, image, device, region,
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
        with self._gate.closing([(device.address, region.index)]) as close:
            self._load(client, image, device, region,
                       loading.Step(check_idle, close))
        return image.id

    def _load(self, client, image, device, region, step=None):
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1, bitstream_id=image.id)
        self._loader.load(client, image, wanted, device, region, step)
