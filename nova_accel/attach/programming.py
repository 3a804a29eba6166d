# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Decide what the regions of servers carry, and program them.

Content of a project is for the server that had it loaded, and for no other.
attach.loading brings images to the cards.
"""

import collections
from collections.abc import (
    Callable, Iterable, Iterator, Mapping, Sequence)
import contextlib

from nova_accel.attach import attempts as project_attempts
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.attach import publishing
from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request

CONF = conf.CONF
LOG = logging.getLogger(__name__)

Claims = Sequence[model.Claim]


class Programming:

    def __init__(self, inventory: host_inventory.Inventory,
                 holdings: server_holdings.Holdings, cloud: novas.Cloud,
                 publisher: publishing.Publisher, loader: loading.Loader,
                 attempts: project_attempts.Attempts):
        self._inventory = inventory
        self._holdings = holdings
        self._cloud = cloud
        self._publisher = publisher
        self._loader = loader
        self._attempts = attempts
        #: regions that no new server begins with now: they are programmed for
        #: no server, or the memory is cleared that they share
        self._ordered: collections.Counter[
            tuple[str, int | None]] = collections.Counter()
        #: guards it
        self._ordered_changed = locks.condition('ordered')

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
                and self._has_data(device, region, image)):
            return
        with self._programming_for(context, claims, device, region), (
                self._step(project_id, wanted, image)) as step:
            self._loader.load(client, image, choice, device, region, step)

    def _step(self, project_id, wanted, image):
        """Return a context with the loading.Step in which to program an image;
        attempts.Attempts counts those that owners of servers chose."""
        if (not wanted.chosen_by_owner
                and glance.origin(image.entry) == model.OPERATOR):
            return contextlib.nullcontext(loading.Step())
        return self._attempts.counted(
            project_id, str(image), seconds_at_most())

    def _warn_of_better(self, wanted, claims, device, region):
        """Say so where nova-scheduler did not choose the region of this host
        that needs no programming, as happens without our filter."""
        held = {c.part for c in self._holdings.all()}
        offered = self._inventory.offered()
        better = [
            f'{other.address} {part.name}'
            for other in self._inventory.devices.values()
            for part in other.regions
            if (other.address, part.index) not in held
            and not offered.withheld_by((other.address, part.index))
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
        same = self._has_data(device, region, image)
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

    def _has_data(self, device, region, image):
        """Return whether a region was programmed with the data that an image
        has now: Glance gives the id of a purged image to any project that asks
        for it (OSSN-0075)."""
        return region.bitstream_id == image.id and image.content == (
            self._inventory.contents.content_of(
                device.address, region.index, image.id))

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
        for mine in server_holdings.by_region(claims).values():
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
            self._reprogram(context, project_id, mine, device, region)
        elif (function and not image and region.function_uuid != function
                and mine[0].group in requests):
            self.provision(
                context, project_id,
                # the server found this one on the card and expects no other
                requests[mine[0].group].only(function), mine)
            self._holdings.bound(mine, self.region_of(mine))

    def _reprogram(self, context, project_id, claims, device, region):
        image, function = (claims[0].restore_bitstream,
                           claims[0].restore_function)
        loaded = model.Loaded(
            function, image, None, '', claims[0].restore_origin)
        LOG.info('%s %s does not carry function %s of server %s any more; it '
                 'is programmed again', device.address, region.name, function,
                 claims[0].instance_uuid)
        with self._programming_for(context, claims, device, region):
            self._as_before(context, project_id, loaded, device, region)

    # Between two servers

    def reprogram(self, device: model.Device, region: model.Region,
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
                and self._loader.load_cached(loaded, device, region)):
            client = self._cloud.service_images()
            content = self._inventory.contents.content_of(
                device.address, region.index, image_id)
            image = glance.find_operators(client, image_id)
            _check_data(image, content)
            self._load(client, image, device, region)
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
            self._load(client, image, device, region,
                       loading.Step(alone, keep))
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

    def _load(self, client, image, device, region, step=None):
        """Load an image that no request asks for."""
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1, bitstream_id=image.id)
        self._loader.load(client, image, wanted, device, region, step)

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
            self._load(client, image, device, region,
                       loading.Step(see_that_it_is_idle, keep))
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

    @contextlib.contextmanager
    def _programming_for(self, context, claims, device, region):
        """Check that claims are the only ones of a region that is programmed
        inside, and show it then."""
        self._check_may_program(claims, device, region)
        self._holdings.provisioning(claims)
        yield
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

    def _as_before(self, context, project_id, loaded, device, region):
        if self._loader.load_cached(loaded, device, region):
            return
        content = self._inventory.contents.content_of(
            device.address, region.index, loaded.bitstream_id)
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1,
            bitstream_id=loaded.bitstream_id,
            # an image of any project only where its data can be compared
            chosen_by_owner=bool(content)
            and loaded.origin != model.OPERATOR)
        client, image = self._find(context, project_id, wanted, region)
        _check_data(image, content)
        self._loader.load(client, image, wanted, device, region)


def seconds_at_most() -> int:
    """Return for how long one operation may hold a server or a region: a
    download, a programming, and what comes before and after it."""
    return (glance.download_seconds() + CONF.accel.programming_timeout
            + 2 * CONF.accel.device_timeout)


def _was_loaded_for(claims, wanted, region) -> bool:
    """Return whether it is the server itself that had an image loaded, which
    it asks for again."""
    return bool(wanted.bitstream_id) and all(
        c.restore_bitstream == wanted.bitstream_id == region.bitstream_id
        and c.restore_function == region.function_uuid for c in claims)


def _check_data(image: glance.Image, content: str) -> None:
    """Check that an image has the data that a region was programmed with.

    :param content: as recorded; '' where it was not.
    :raises BitstreamError: it has others.
    """
    if content and image.content != content:
        raise exception.BitstreamError(
            f'{image} was programmed before, and its data are other ones now: '
            f'the image was deleted, and its id was used for another one; '
            f'upload the first one with a new id, and rebuild the server with '
            f'that.')


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
