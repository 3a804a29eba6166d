# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Regions carry what servers ask for.

From Glance or the cache to the card: one region of a card at a time, never one
that a guest has, each call of a driver with a time limit. What a region
carries is recorded as unknown before its programming begins, and as known,
with its origin, after it was read back. A region into which a project's image
may have come has that project's content, however the programming ended. Content
of a project is for the server that had it loaded, and for no other.
"""

import collections
from collections.abc import (
    Callable, Iterable, Iterator, Mapping, Sequence)
import contextlib
import dataclasses
import time
import typing

from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import publishing
from nova_accel.bitstream import cache as bitstream_cache
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.health import signals
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Claims = Sequence[model.Claim]

#: how many bitstreams of the owners of servers may fail on cards, for one
#: project and in so many seconds, before the next one is refused
_MOST_FAILURES, _FAILURE_SECONDS = 3, 600
#: kept where [accel] metrics_file is not set
_MOST_ENDED = 1000


class Ended(typing.NamedTuple):
    """A programming, for notify.metrics."""

    #: 'programmed' or 'failed'
    result: str
    #: seconds in which it waited for other work on its card
    waited: float
    #: seconds in which the card was being programmed
    took: float


class Programming:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud,
                 publisher: publishing.Publisher):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._publisher = publisher
        # functools.cached_property would open it twice (Python 3.12)
        self._opening = locks.Lock('opening')
        self._opened: bitstream_cache.BitstreamCache | None = None
        #: regions that no new server begins with now: they are programmed for
        #: no server, or the memory is cleared that they share
        self._ordered: collections.Counter[
            tuple[str, int | None]] = collections.Counter()
        #: guards it
        self._ordered_changed = locks.condition('ordered')
        #: project -> time.monotonic() of failures of its owners' bitstreams
        self._failures: dict[str, list[float]] = {}
        #: taken out by who counts them; its methods are atomic
        self.ended: collections.deque[Ended] = collections.deque(
            maxlen=_MOST_ENDED)

    def _cache(self) -> bitstream_cache.BitstreamCache:
        # when it is first needed: a host without FPGAs needs none
        with self._opening:
            if self._opened is None:
                self._opened = bitstream_cache.BitstreamCache(
                    CONF.accel.bitstream_cache, self._needed)
            return self._opened

    def cached(self) -> int | None:
        """Return the bytes in the cache; None while no image was asked for."""
        return self._opened.bytes() if self._opened else None

    def _needed(self) -> set[str]:
        """Images whose contents servers need where the host boots; also of
        those whose region has just been programmed."""
        claims = self._holdings.all()
        held = {c.part for c in claims}
        return {image for image in (
            *(image for c in claims
              for image in (c.restore_bitstream, c.operators_bitstream)),
            *(region.bitstream_id
              for device in self._inventory.devices.values()
              for region in device.regions
              if (device.address, region.index) in held)) if image}

    def provision(self, context, project_id: str,
                  wanted: request.AcceleratorRequest, claims: Claims,
                  scheduled: bool = False) -> None:
        """Make the region of a request carry what the request asks for.

        :param project_id: of the server.
        :param claims: the handles of that region that its server holds.
        :param scheduled: whether nova-scheduler has just chosen the region;
            otherwise quarantine does not matter, while the card answers.
        :raises AcceleratorError: the region does not carry it.
        """
        if not wanted.programs:
            return
        device, region = (
            self._inventory.find(
                claims[0].device_address, claims[0].region_index) if scheduled
            else self._inventory.find_held(claims[0]))
        if region is None:
            raise exception.InvalidRequest(
                f'The flavor asks {wanted} for a function, and '
                f'{device.address} is not an FPGA: remove the accel: key from '
                f'that group.')
        if _was_loaded_for(claims, wanted, region) or (
                wanted.carried_by(region) and not wanted.chosen_by_owner):
            return
        named = self._find_named(context, project_id, wanted, region)
        if any(self._has_name(device, region, image) for image in named):
            self._publisher.show(context, {c.provider_uuid for c in claims})
            return
        if scheduled and not wanted.chosen_by_owner:
            self._warn_of_better(wanted, claims, device, region)
        if not (region.bitstream_id and region.origin == model.OPERATOR and any(
                choice.bitstream_id == region.bitstream_id
                or choice.function_id == region.function_uuid
                for choice in wanted.choices)):
            # before Glance is asked: another host may do without it
            self._check_may_program(claims, device, region)
        choice, client, image = self._find_first(
            context, project_id, wanted, region)
        if (region.origin == glance.origin(image.entry) == model.OPERATOR
                and region.bitstream_id == image.id):
            return
        self._program_for(
            context, claims, device, region,
            lambda: self._for_owner(
                project_id, wanted, image, lambda **hooks: self._from_glance(
                    client, image, choice, device, region, **hooks)))

    def _for_owner(self, project_id, wanted, image, load):
        """Call load(), which programs an image; one that the owner of the
        server chose costs one card at most, and its project has to wait where
        many have failed.

        :raises AcceleratorError: not to be tried on another host, where the
            owner chose it and the card was touched.
        """
        if not (wanted.chosen_by_owner
                or glance.origin(image.entry) != model.OPERATOR):
            load()
            return
        since = time.monotonic() - _FAILURE_SECONDS
        # replaced as a whole, without a lock: one more or less does not matter
        failed = [at for at in self._failures.get(project_id, ())
                  if at > since]
        if len(failed) >= _MOST_FAILURES:
            error = exception.DeviceUnavailable(
                f'{image} is not programmed, because {len(failed)} bitstreams '
                f'of the project failed on cards of this host in the last '
                f'{_FAILURE_SECONDS // 60} minutes: test yours, and try it '
                f'{_FAILURE_SECONDS // 60} minutes later.')
            error.elsewhere = False
            raise error
        touched: list[bool] = []
        try:
            load(touched=lambda: touched.append(True))
        except exception.AcceleratorError as error:
            if touched:
                self._failures[project_id] = [*failed, time.monotonic()]
                error.elsewhere = False
            raise

    def _warn_of_better(self, wanted, claims, device, region):
        """Say so where nova-scheduler did not choose the region of this host
        that needs no programming, as happens without our filter."""
        held = {c.part for c in self._holdings.all()}
        better = [
            f'{other.address} {part.name}'
            for other in self._inventory.devices.values()
            for part in other.regions
            if (other.address, part.index) not in held
            and other.health is part.health is model.Health.OK
            and part.handles and wanted.carried_by(part)
            for traits in [naming.region_traits(other, part)]
            if wanted.forbidden.isdisjoint(traits)
            and wanted.required <= traits | {naming.PROGRAMMABLE}]
        if better:
            LOG.warning(
                'Server %(server)s was sent to %(region)s, which does not '
                'carry the function that it asks for, and %(better)s of this '
                'host is free and carries it: is AcceleratorFilter in '
                '[filter_scheduler] enabled_filters of nova-scheduler? A '
                'server that is forced to a host bypasses it.',
                {'server': claims[0].holder,
                 'region': f'{device.address} {region.name}',
                 'better': ', '.join(sorted(better))})

    def _find_named(self, context, project_id, wanted, region):
        """Images of the names, where the region has what one may mean.

        Without an image of that name another host may still know the name, by
        its trait.
        """
        found = []
        for choice in wanted.choices:
            if choice.function_name and region.origin == model.OPERATOR:
                with contextlib.suppress(exception.BitstreamError,
                                         exception.IncompatibleBitstream):
                    found.append(self._find(
                        context, project_id, choice, region)[1])
        return found

    def _find_first(self, context, project_id, wanted, region):
        """(choice, client, image), see glance.find_first()."""
        return glance.find_first(wanted, lambda choice: self._find(
            context, project_id, choice, region))

    def _has_name(self, device, region, image):
        """Return whether a region carries the function of an image of the
        operator, and if so, write down the name that the image gives it.

        The region was programmed with the image, which has another name now;
        or the card loaded the function from its flash, which has no name.
        """
        same = region.bitstream_id == image.id
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

    def _find(self, context, project_id, wanted, region):
        """(client, image) of what is asked for.

        What the flavor names may be the operator's own image, which the
        tenant need not see. What the owner of the server names is read as the
        user, where there is one.
        """
        operators = None
        if CONF.accel.bitstream_owners and not wanted.chosen_by_owner:
            operators = self._cloud.service_images()
        return glance.find(
            self._cloud.images(context), wanted, region.region_type_uuid,
            project_id, operators)

    def restore(self, context, project_id: str, claims: Iterable[model.Claim],
                requests: Mapping[str, request.AcceleratorRequest] = {},
                ) -> None:
        """Make regions carry again what their server had in them.

        A card that lost its power has forgotten its function; it comes back
        from the cache, or from Glance.

        :param project_id: of the server.
        :param claims: those of the devices to restore, none of
            them in a running guest.
        :param requests: of the flavor by group, for a function that the server
            found on the card: only they say from which image it comes.
        :raises AcceleratorError: a region does not carry it; the claims stay,
            and the next start tries again.
        """
        for mine in by_region(claims).values():
            with self._holdings.kept_on_error(mine):
                self._restore(context, project_id, mine, requests)

    def _restore(self, context, project_id, mine, requests):
        device, region = self._inventory.find_held(mine[0])
        _check_handles(device, region, mine)
        image = mine[0].restore_bitstream
        function = mine[0].restore_function
        if region is None:
            return
        if image and (region.bitstream_id, region.function_uuid) != (
                image, function):
            self._put_back(context, project_id, mine, device, region)
        elif (function and not image and region.function_uuid != function
                and mine[0].group in requests):
            self.provision(
                context, project_id,
                # the server found this one on the card and expects no other
                requests[mine[0].group].only(function), mine)
            self._holdings.bound(mine, self.region_of(mine))

    def _put_back(self, context, project_id, claims, device, region):
        image, function = (claims[0].restore_bitstream,
                           claims[0].restore_function)
        loaded = model.Loaded(
            function, image, None, '', claims[0].restore_origin)
        LOG.info('%s %s does not carry function %s of server %s any more; it '
                 'is programmed again', device.address, region.name, function,
                 claims[0].instance_uuid)
        self._program_for(
            context, claims, device, region,
            lambda: self._as_before(
                context, project_id, loaded, device, region))

    # Between two servers

    def again(self, device: model.Device, region: model.Region,
              image_id: str) -> str:
        """Program the operator's image again that a region carries.

        Registers and block RAM begin as the image has them.

        :param image_id: where it is not known whose the content of the region
            is, Glance has to say that this image is the operator's.
        :returns: how, for the journal.
        :raises BitstreamError: the image is not to be had any more, or is not
            the operator's.
        :raises AcceleratorError: of other kinds: the region is not clean.
        """
        loaded = model.Loaded(
            region.function_uuid, image_id, region.function_name, '',
            model.OPERATOR)
        if not (region.origin == model.OPERATOR
                and self._programs_cached(loaded, device, region)):
            client = self._cloud.service_images()
            self._load(client, glance.find_operators(client, image_id),
                       device, region)
        return f'programmed again with image {image_id}'

    def clear(self, device: model.Device, region: model.Region,
              cleared: Sequence[str] = glance.CLEARED) -> str:
        """Program the operator's clearing image of the region's type.

        :param cleared: which of glance.CLEARED it may clear.
        :returns: how, for the journal.
        :raises ImageNotFound: Glance has none.
        :raises BitstreamError: it cannot be used.
        :raises DeviceUnavailable: it clears the memory of the card, which a
            server uses by another region.
        :raises AcceleratorError: of other kinds: the region is not clean.
        """
        client = self._cloud.service_images()
        image = glance.find_clearing(client, region.region_type_uuid, cleared)
        if image.entry.get(glance.CLEARS) != glance.CLEARED[0]:
            self._load(client, image, device, region)
            return f'cleared with image {image.id}'

        def alone():
            self._check_alone(device, region, image)
        alone()
        with self._kept_from_builds(
                (device.address, other.index) for other in device.regions
                if other.index != region.index) as keep:
            def begin():
                # as ordered()
                keep()
                alone()
            self._load(client, image, device, region, begin=begin)
        return f'memory cleared with image {image.id}'

    def _check_alone(self, device, region, image):
        """Check that no other region of a card is in use, before the memory is
        cleared that they share."""
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

    def _load(self, client, image, device, region, **callbacks):
        """As _from_glance(), for no request."""
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1, bitstream_id=image.id)
        self._from_glance(client, image, wanted, device, region, **callbacks)

    @contextlib.contextmanager
    def _kept_from_builds(self, regions: Iterable[tuple[str, int]],
                          ) -> Iterator[Callable[[], None]]:
        """Yield what keeps new claims from regions, until the end: they wait
        in await_ordered()."""
        kept = list(regions)
        begun: list[tuple[str, int]] = []
        ended = False

        def keep():
            with self._ordered_changed:
                # a card that begins later than the caller waits
                if not ended:
                    begun.extend(kept)
                    self._ordered.update(kept)
        try:
            yield keep
        finally:
            with self._ordered_changed:
                ended = True
                self._ordered.subtract(begun)
                self._ordered_changed.notify_all()

    # For no server

    def ordered(self, device: model.Device, region: model.Region, name: str,
                see_that_it_is_idle: Callable[[], None]) -> str:
        """Program an idle region with the image of the operator that he names.

        A region of [accel] fixed_devices that carries the function of the
        image gets its name and is not programmed.

        :param name: see glance.find_ordered().
        :param see_that_it_is_idle: raises where a claim names the region or it
            is not as given; from memory, called in the worker of the card.
        :returns: the image's id.
        :raises BitstreamError: the operator has no such image.
        :raises IncompatibleBitstream: it is for another type of region.
        :raises AcceleratorError: of other kinds: it could not be programmed.
        """
        client = self._cloud.service_images()
        image = glance.find_ordered(client, name, region.region_type_uuid)
        if not region.programmable:
            see_that_it_is_idle()
            if not self._has_name(device, region, image):
                raise exception.DeviceUnavailable(
                    f'{device.address} {region.name} cannot be programmed with '
                    f'{image}, because [accel] fixed_devices forbids it: '
                    f'remove it there, and restart nova-compute.')
            return image.id
        with self._kept_from_builds([(device.address, region.index)]) as keep:
            def begin():
                # before claims are read: a build reads this after it has
                # claimed
                keep()
                see_that_it_is_idle()
            self._load(client, image, device, region,
                       fetched=see_that_it_is_idle, begin=begin)
        return image.id

    def note_handover(self, device: model.Device, region: model.Region,
                      method: str, result: str) -> None:
        """Write into the journal what was done with a region for no server.

        :param region: as it was before.
        """
        now = self._inventory.devices.get(device.address)
        self._holdings.note_handover(
            device, region, now.find_region(region.index) if now else None,
            method, result)

    def await_ordered(self, claims: Iterable[model.Claim]) -> None:
        """Wait until no order of the operator programs regions of new claims,
        and no memory that they share is cleared.

        :raises DeviceUnavailable: that takes longer than [accel]
            programming_timeout.
        """
        regions = {c.part for c in claims}
        with self._ordered_changed:
            if not self._ordered_changed.wait_for(
                    lambda: not any(self._ordered[r] for r in regions),
                    CONF.accel.programming_timeout + 1):
                raise exception.DeviceUnavailable(
                    f'{min(regions)[0]} was allocated, and its '
                    f'programming does not end: the build is retried on '
                    f'another host.')

    # The region of a server

    def region_of(self, claims: Claims) -> model.Region | None:
        """Return the region of claims that all have the same one, as it is
        now."""
        _, region = self._inventory.find_held(claims[0])
        return region

    def _program_for(self, context, claims, device, region, load):
        """Program a region for its only user, and show it.

        :param load: does it.
        """
        self._check_may_program(claims, device, region)
        self._holdings.provisioning(claims)
        load()
        self._publisher.show(context, {c.provider_uuid for c in claims})

    def _check_may_program(self, claims, device, region):
        name = f'{device.address} {region.name}'
        instance_uuid = claims[0].instance_uuid
        if not region.programmable:
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and [accel] fixed_devices forbids it.')
        others = {c.instance_uuid for c in self._holdings.all()
                  if c.part == (device.address, region.index)
                  } - {instance_uuid}
        if others:
            # the owner of the one is not told who the other is
            LOG.warning('%s would have to be programmed for server %s, and '
                        'server %s uses it', name, instance_uuid, min(others))
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and another server uses it: the build is '
                f'retried on another host.')

    def _from_glance(self, client, image, wanted, device, region,
                     fetched=lambda: None, begin=lambda: None,
                     touched=lambda: None):
        """
        :param fetched: called when the file is there; raises where the region
            is not to be programmed any more.
        :param begin: as fetched, in the worker of the card, at last.
        :param touched: called there where the driver begins.
        """
        driver = self._inventory.driver_of(device)
        with self._cache().fetch(client, image) as file:
            bitstream = driver.read_bitstream(file.path, str(image))
            glance.verify(bitstream, wanted, image, region)
            loaded = model.Loaded(
                function_uuid=bitstream.function_uuid or wanted.function_id,
                bitstream_id=image.id,
                function_name=glance.function_name(image),
                content=file.content, origin=glance.origin(image.entry))
            fetched()
            self._program(driver, device, region, bitstream, loaded, begin,
                          touched)

    def _as_before(self, context, project_id, loaded, device, region):
        if self._programs_cached(loaded, device, region):
            return
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1,
            bitstream_id=loaded.bitstream_id,
            chosen_by_owner=loaded.origin != model.OPERATOR)
        client, image = self._find(context, project_id, wanted, region)
        self._from_glance(client, image, wanted, device, region)

    def _programs_cached(self, loaded, device, region):
        """Program what was loaded before, without asking Glance; False where
        the cache has not got it."""
        driver = self._inventory.driver_of(device)
        try:
            with self._cache().by_image(
                    loaded.bitstream_id, self._inventory.contents.content_of(
                        device.address, region.index, loaded.bitstream_id),
                    loaded.origin == model.OPERATOR) as file:
                bitstream = driver.read_bitstream(
                    file.path, f'image {loaded.bitstream_id}')
                self._program(
                    driver, device, region, bitstream,
                    dataclasses.replace(loaded, content=file.content))
        except exception.BitstreamError as error:
            LOG.info('%s', error)
            return False
        return True

    def _program(self, driver, device, region, bitstream, loaded,
                 begin=lambda: None, touched=lambda: None):
        """Program with a time limit, and note what came of it."""
        address, index = device.address, region.index
        what = (f'Programming {address} {region.name} by the driver '
                f'{device.driver}')
        lock = locks.Lock('begin')
        begun: list[bool] = []
        gone: list[bool] = []

        moments = [time.monotonic()]

        def ended(result):
            asked, began, *_ = moments
            self.ended.append(
                Ended(result, began - asked, time.monotonic() - began))

        def program():
            # the last moment: a guest may have got it while this call waited
            check_not_in_a_guest(
                self._cloud, region.handles,
                f'{device.address} {region.name} cannot be programmed')
            begin()
            with lock:
                if gone:
                    return None
                self._inventory.contents.begin(
                    address, index, loaded.origin)
                begun.append(True)
                moments.append(time.monotonic())
                touched()
            return driver.program(device, region, bitstream)

        try:
            function = self._inventory.cards.call(
                address, what, program,
                seconds=CONF.accel.programming_timeout, patient=True)
        except Exception as error:
            with lock:
                gone.append(True)
            if begun:
                ended('failed')
                # after a time-out the call goes on, and the card is fenced
                # until it ends
                self._inventory.programming_failed(
                    address, index,
                    report=not isinstance(error, exception.DeviceTimeout))
                if loaded.origin == model.OPERATOR:
                    self._inventory.health.mark(
                        address, signals.PROGRAMMING)
            if isinstance(error, exception.AcceleratorError):
                raise
            raise exception.ProgrammingFailed(
                f'{what} failed ({type(error).__name__}: {error}): check '
                f'the card, and read the kernel log.',
                found=f'{what} failed') from error
        self._inventory.contents.programmed(address, index, dataclasses.replace(
            loaded, function_uuid=function))
        self._inventory.health.mark(address, signals.PROGRAMMING, False)
        ended('programmed')
        LOG.info('%s %s carries function %s of image %s; its origin: %s',
                 address, region.name, function, loaded.bitstream_id,
                 loaded.origin or 'unknown')


def check_not_in_a_guest(cloud: novas.Cloud,
                         handles: Iterable[model.AttachHandle],
                         refused: str) -> None:
    """Check that no guest that runs has one of these, whatever claims say.

    :param refused: what cannot be done then, as a clause.
    :raises DeviceUnavailable: one has.
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


def seconds_at_most() -> int:
    """Return for how long one operation may hold a server or a region: a
    download, a programming, and what comes before and after it."""
    return (glance.download_seconds() + CONF.accel.programming_timeout
            + 2 * CONF.accel.device_timeout)


def by_region(claims: Iterable[model.Claim],
              ) -> dict[tuple[str, int | None], list[model.Claim]]:
    """Return claims by device address and region index."""
    regions: dict[tuple[str, int | None], list[model.Claim]] = {}
    for claim in claims:
        regions.setdefault(claim.part, []).append(claim)
    return regions


def _was_loaded_for(claims, wanted, region) -> bool:
    """Return whether it is the server itself that had an image loaded, which
    it asks for again."""
    return bool(wanted.bitstream_id) and all(
        c.restore_bitstream == wanted.bitstream_id == region.bitstream_id
        and c.restore_function == region.function_uuid for c in claims)


def _check_handles(device, region, claims):
    """VFs that were not made again after a boot are missing."""
    for claim in claims:
        if (claim.created_type is None and claim.handle
                not in (region or device).handles):
            found = (f'Server {claim.instance_uuid} has '
                     f'{claim.handle.address} of {device.address}, which the '
                     f'host does not have now')
            raise exception.DeviceUnavailable(
                f'{found}: see nova-accel discover, and check [accel] '
                f'virtual_functions.', found=found)
