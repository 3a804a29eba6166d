# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Find bitstreams in Glance, and bring them to the regions of cards.

One region of a card is programmed at a time, never one that a guest has, and
each call of a driver has a time limit. The content of a region is recorded as
unknown before its programming begins, and as known, with its origin, after it
was read back. If a project's image may have been written to a region, the
content counts as that project's, however the programming ended.
"""

import collections
from collections.abc import Callable, Collection, Iterator
import contextlib
import dataclasses
import time
import typing

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.bitstream import cache as bitstream_cache
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.health import signals
from nova_accel import inventory as host_inventory
from nova_accel.host import usage
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

#: results of programmings that are kept if [accel] metrics_file is not set
_MOST_ENDED = 1000


class Ended(typing.NamedTuple):
    """The result of a programming, for notify.metrics."""

    #: 'programmed' or 'failed'
    result: str
    #: seconds of waiting for other work on its card
    waited: float
    #: seconds of programming the card
    took: float


class Step:
    """One programming of a region, from its request to its end.

    The caller waits for the worker of the card. If the caller gives up before
    the worker has begun, the worker does not begin.
    """

    def __init__(self, check: Callable[[], None] = lambda: None,
                 keep: Callable[[], None] = lambda: None):
        """:param check: function that raises AcceleratorError if the region
            must not be programmed now. It reads memory only.
        :param keep: function that keeps builds away from the region, or from
            other regions of its card (attach.regions).
        """
        self._check = check
        self._keep = keep
        self._lock = locks.Lock('begin')
        self._given_up = False
        self._called_at = self._began_at = float('inf')

    @property
    def has_begun(self) -> bool:
        """Return whether the driver was called."""
        return self._began_at != float('inf')

    def call(self) -> None:
        """Check the region, and begin to wait for the worker of the card.

        :raises AcceleratorError: the region must not be programmed now.
        """
        self._check()
        self._called_at = time.monotonic()

    def admit(self) -> None:
        """Keep builds away from the region, and check the region again. The
        worker of the card calls this.

        :raises AcceleratorError: the region must not be programmed now.
        """
        # before claims are read, because a build claims before it waits for it
        self._keep()
        self._check()

    @contextlib.contextmanager
    def beginning(self) -> Iterator[bool]:
        """Store that the worker of the card is about to call the driver.

        :yields: whether to call the driver; False if the caller has given up.
        """
        with self._lock:
            yield not self._given_up
            if not self._given_up:
                self._began_at = time.monotonic()

    def give_up(self) -> bool:
        """Stop waiting for the worker of the card. Return whether the worker
        has begun."""
        with self._lock:
            self._given_up = True
            return self.has_begun

    def ended(self, result: str) -> Ended:
        """Return the result and the durations of the programming, for
        notify.metrics.

        :param result: 'programmed' or 'failed'.
        """
        return Ended(result, self._began_at - self._called_at,
                     time.monotonic() - self._began_at)


class Loader:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        # functools.cached_property would open it twice (Python 3.12)
        self._opening = locks.Lock('opening')
        self._opened: bitstream_cache.BitstreamCache | None = None
        #: programmings that notify.metrics has not counted yet; it removes
        #: them, and the methods of a deque are atomic
        self.ended: collections.deque[Ended] = collections.deque(
            maxlen=_MOST_ENDED)

    def _cache(self) -> bitstream_cache.BitstreamCache:
        # created when first needed, because a host without FPGAs needs none
        with self._opening:
            if self._opened is None:
                self._opened = bitstream_cache.BitstreamCache(
                    CONF.accel.bitstream_cache, self._needed)
            return self._opened

    def cached(self) -> int | None:
        """Return the number of bytes in the cache, or None before the first
        image is requested."""
        return self._opened.bytes() if self._opened else None

    def _needed(self) -> set[str]:
        """Return the ids of the images to keep in the cache, because servers
        need them after a boot of the host. These are images in claims, and
        images last loaded into claimed regions."""
        claims = self._holdings.all()
        held = {c.part for c in claims}
        return {image for image in (
            *(image for c in claims
              for image in (c.restore_bitstream, c.operators_bitstream)),
            *(region.bitstream_id
              for device in self._inventory.devices.values()
              for region in device.regions
              if (device.address, region.index) in held)) if image}

    def find(self, context, project_id: str,
             wanted: request.AcceleratorRequest, region: model.Region):
        """Return the image of a request, and a client that may read it.

        The flavor may name an image of the operator that the tenant cannot
        see. Hence it may be read with the credentials of nova-compute. An
        image that the owner of the server names is read with the user's token,
        if available.

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
        """Return (choice, client, image): the first choice of a request that
        has an image, see glance.find_first()."""
        return glance.find_first(wanted, lambda choice: self.find(
            context, project_id, choice, region))

    def learn_name(self, device: model.Device, region: model.Region,
                   image: glance.Image) -> bool:
        """Store the name of the function in a region, if an image of the
        operator has this function.

        The name is missing if the image was renamed after the programming, or
        if the card loaded the function from its flash, which has no names.

        :returns: whether the image is the operator's, and the region carries
            the function of the image.
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
        # not by the id alone: Glance gives the id of a purged image to any
        # project that asks for it (OSSN-0075)
        return region.bitstream_id == image.id and image.content == (
            self._inventory.contents.content_of(
                device.address, region.index, image.id))

    def load(self, client, image: glance.Image, device: model.Device,
             region: model.Region, step: Step | None = None,
             function_id: str | None = None) -> None:
        """Program an image of Glance.

        :param client: a Glance client that may read the image.
        :param step: the step of a caller that makes further checks; None: a
            new one.
        :param function_id: the function that the image has to have; None: any.
        :raises AcceleratorError: the region does not carry the image.
        """
        driver = self._inventory.driver_of(device)
        with self._cache().fetch(client, image) as file:
            bitstream = driver.read_bitstream(file.path, str(image))
            glance.verify(bitstream, function_id, image, region)
            self._program(driver, device, region, bitstream, model.Loaded(
                function_uuid=bitstream.function_uuid or function_id,
                bitstream_id=image.id,
                function_name=glance.function_name(image),
                content=file.content, origin=glance.origin(image.entry)),
                step or Step())

    def load_cached(self, loaded: model.Loaded, device: model.Device,
                    region: model.Region) -> bool:
        """Program an image from the cache, without Glance.

        :param loaded: names the image, and has the hash of its data.
        :returns: False if the cache has no usable data of the image.
        :raises AcceleratorError: the region does not carry the image.
        """
        driver, image_id = self._inventory.driver_of(device), (
            loaded.bitstream_id or '')
        try:
            with self._cache().by_image(
                    image_id, loaded.content or '') as file:
                bitstream = driver.read_bitstream(
                    file.path, f'image {image_id}')
                self._program(
                    driver, device, region, bitstream,
                    dataclasses.replace(loaded, content=file.content), Step())
        except exception.BitstreamError as error:
            LOG.info('%s', error)
            return False
        return True

    def _program(self, driver, device, region, bitstream, loaded, step):
        """Program a region with a time limit, and store the result."""
        address, index = device.address, region.index
        what = (f'Programming {address} {region.name} by the driver '
                f'{device.driver}')
        step.call()

        def program():
            # check as late as possible: a guest may have got it while this
            # call waited
            check_not_in_use(
                self._cloud, driver.kernel, region.handles,
                f'{device.address} {region.name} cannot be programmed')
            step.admit()
            with step.beginning() as goes_on:
                if not goes_on:
                    return None
                self._inventory.contents.begin(address, index, loaded.origin)
            return driver.program(device, region, bitstream)

        try:
            function = self._inventory.cards.call(
                address, what, program,
                seconds=CONF.accel.programming_timeout, patient=True)
        except Exception as error:
            if step.give_up():
                self._failed(device, region, loaded, step, error)
            if isinstance(error, exception.AcceleratorError):
                raise
            raise exception.ProgrammingFailed(
                f'{what} failed ({type(error).__name__}: {error}): check '
                f'the card, and read the kernel log.',
                found=f'{what} failed') from error
        self._inventory.contents.programmed(address, index, dataclasses.replace(
            loaded, function_uuid=function))
        self._inventory.health.mark(address, signals.PROGRAMMING, False)
        self.ended.append(step.ended('programmed'))
        LOG.info('%s %s carries function %s of image %s; its origin: %s',
                 address, region.name, function, loaded.bitstream_id,
                 loaded.origin or 'unknown')

    def _failed(self, device, region, loaded, step, error):
        """Store that a programming failed after it had begun."""
        self.ended.append(step.ended('failed'))
        # after a timeout the call continues, and the card is withheld until it
        # ends
        self._inventory.programming_failed(
            device.address, region.index,
            report=not isinstance(error, exception.DeviceTimeout))
        if loaded.origin == model.OPERATOR:
            self._inventory.health.mark(device.address, signals.PROGRAMMING)


def check_data(image: glance.Image, content: str) -> None:
    """Check that an image still has the data with which a region was
    programmed.

    :param content: checksum of the data in the region; '' if they are unknown.
    :raises BitstreamError: the image has other data.
    """
    if content and image.content != content:
        raise exception.BitstreamError(
            f'{image} has other data now than when it was programmed: the '
            f'image was deleted, and its id was used again; upload the first '
            f'image with a new id, and rebuild the server with that id.')


def seconds_at_most() -> int:
    """Return the longest time, in seconds, for which an operation may occupy a
    server or a region, with download, programming, and all other steps."""
    return (glance.download_seconds() + CONF.accel.programming_timeout
            + 2 * CONF.accel.device_timeout)


def check_not_in_use(cloud: novas.Cloud, kernel,
                     handles: Collection[model.AttachHandle],
                     refused: str) -> None:
    """Check that no running guest and no process of the host uses a handle,
    regardless of claims.

    :param refused: the action that the error refuses, as a clause.
    :raises DeviceUnavailable: a guest or a process uses a handle.
    """
    addresses = {a for handle in handles for a in handle.addresses}
    for server_uuid, there in cloud.running().items():
        if addresses & there:
            LOG.error('%s, because the guest of server %s, which runs, has '
                      '%s: stop that server first', refused, server_uuid,
                      min(addresses & there))
            found = (f'{refused} while a running guest has '
                     f'{min(addresses & there)}')
            raise exception.DeviceUnavailable(
                f'{found}: see the log of nova-compute.', found=found)
    usage.check_not_in_use(kernel, handles, refused)
