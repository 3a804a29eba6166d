# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Decide what the regions of servers carry, and program them.

Content of a project is used only by the server for which it was loaded. For
example, a flavor asks for a function. If the region that Placement has
allocated carries it, nothing is programmed. Otherwise attach.loading finds and
programs an image with the function. If the card loses power, the next start of
the server finds another function than the one in its claim, and restore()
programs the image of the claim again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
import contextlib
import dataclasses

from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.attach import publishing
from nova_accel.bitstream import glance
from nova_accel import exception
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.store import claim_store

LOG = logging.getLogger(__name__)

Claims = Sequence[model.Claim]
#: how many bitstreams of a project may be in progress or have failed on the
#: cards of this host within FAILURE_SECONDS
MOST, FAILURE_SECONDS = 3, 600
_MINUTES = FAILURE_SECONDS // 60


class Attempts:
    """Limits the damage of bitstreams that owners of servers choose.

    A bitstream that failed is not tried on another host, and a project must
    wait after several failed attempts. An attempt counts while it is under
    way, and after a failure for another FAILURE_SECONDS. The attempt is stored
    before the card is touched, so the count survives a restart.
    """

    def __init__(self, store: claim_store.ClaimStore):
        self._store = store
        #: numbers of the attempts of this process that have not ended
        self._under_way: set[int] = set()
        #: guards _under_way, and the time between a count and the next attempt
        self._changed = locks.condition('attempts')

    @contextlib.contextmanager
    def counted(self, project_id: str, image: str) -> Iterator[loading.Step]:
        """Count an attempt of a project to program an image.

        Waits for attempts that are under way.

        :param image: name of the image, for errors.
        :yields: the step in which to program the image.
        :raises AcceleratorError: the attempt is refused, or the programming
            failed. The error forbids a retry on another host.
        """
        step = loading.Step()
        number = self._begin(project_id, image)
        failed = False
        try:
            yield step
        except BaseException as error:
            failed = step.has_begun
            if failed and isinstance(error, exception.AcceleratorError):
                error.elsewhere = False
            raise
        finally:
            self._end(project_id, number, failed)

    def _begin(self, project_id, image):
        with self._changed:
            if not self._changed.wait_for(
                    lambda: self._may_begin(project_id, image),
                    loading.seconds_at_most()):
                raise _refused(
                    f'{image} is not programmed, because {MOST} bitstreams of '
                    f'the project are being programmed on this host: '
                    f'try it later.')
            number = self._store.begin_attempt(project_id, FAILURE_SECONDS)
            self._under_way.add(number)
            return number

    def _may_begin(self, project_id, image):
        """Return whether a project may begin an attempt now. It may not while
        the sum of its running and recently failed attempts is at the limit.

        :raises DeviceUnavailable: the failed attempts alone reach the limit.
        """
        counted = self._store.attempts(project_id, FAILURE_SECONDS)
        failed = counted - self._under_way
        if len(failed) >= MOST:
            raise _refused(
                f'{image} is not programmed, because {len(failed)} bitstreams '
                f'of the project failed on cards of this host in the last '
                f'{_MINUTES} minutes: test yours, and try it {_MINUTES} '
                f'minutes later.')
        return len(counted) < MOST

    def _end(self, project_id, number, failed):
        with self._changed:
            self._under_way.discard(number)
            # an attempt whose end cannot be written stays, and counts as a
            # failure
            with contextlib.suppress(exception.AcceleratorsUnavailable):
                self._store.end_attempt(number, project_id, failed)
            self._changed.notify_all()


@dataclasses.dataclass(eq=False)
class Programming:
    """Programs the regions of a server when it gets them, and before it starts
    again."""

    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _publisher: publishing.Publisher
    _loader: loading.Loader
    _attempts: Attempts

    def provision(self, context, project_id: str,
                  wanted: request.AcceleratorRequest, claims: Claims,
                  scheduled: bool = False) -> None:
        """Ensure that the region of a request carries the requested function.

        :param claims: the claims of the server in that region.
        :param scheduled: whether nova-scheduler has just chosen the region. If
            the server had the region before, holds are ignored as long as the
            card answers.
        :raises AcceleratorError: the region does not carry the function.
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
        if wanted.bitstream_id and all(
                claim.restore_bitstream == wanted.bitstream_id
                for claim in claims):
            # its preparation was interrupted: the id may be another image's
            self._reprogram(context, project_id, claims, device, region)
            return
        if scheduled and not wanted.chosen_by_owner:
            self._warn_of_better(wanted, claims, device, region)
        if not (region.bitstream_id and region.origin == model.OPERATOR and any(
                choice.bitstream_id == region.bitstream_id
                or choice.function_id == region.function_uuid
                for choice in wanted.choices)):
            # before Glance is asked, because another host may not need Glance
            self._check_may_program(claims, device, region)
        choice, client, image = self._loader.find_first(
            context, project_id, wanted, region)
        if region.origin == model.OPERATOR and (
                choice.function_name
                or self._loader.has_data(device, region, image)
                ) and self._loader.learn_name(device, region, image):
            self._publisher.show({c.provider_uuid for c in claims})
            return
        with self._programming_for(claims, device, region), (
                self._step(project_id, wanted, image)) as step:
            self._loader.load(client, image, device, region, step,
                              choice.function_id)

    def _step(self, project_id, wanted, image):
        """Return a context manager that yields the loading.Step of a
        programming. Attempts counts the programming if the owner has
        chosen the image, or the image is not the operator's."""
        if (not wanted.chosen_by_owner
                and glance.origin(image.entry) == model.OPERATOR):
            return contextlib.nullcontext(loading.Step())
        return self._attempts.counted(project_id, str(image))

    def _warn_of_better(self, wanted, claims, device, region):
        """Warn if nova-scheduler should have chosen another region of this
        host, which was free and carries the function. Then AcceleratorFilter
        is probably disabled."""
        shown = self._inventory.shown.by_part()
        held = {c.part for c in self._holdings.all()}
        offered = self._inventory.table.offered()
        better = [
            f'{other.address} {part.name}'
            for other in self._inventory.devices.values()
            for part in other.regions
            if (other.address, part.index) not in held
            and not offered.withheld_by((other.address, part.index))
            and part.handles and wanted.carried_by(part)
            for traits in [naming.region_traits(other, part)]
            if wanted.forbidden.isdisjoint(traits)
            and wanted.required <= traits | {naming.PROGRAMMABLE}
            for provider in [shown.get((other.address, part.index))]
            if provider and self._publisher.was_free(provider)]
        if better:
            LOG.warning(
                'Server %(server)s was scheduled to %(region)s, which does not '
                'carry the requested function, although %(better)s of this '
                'host is free and carries it: check that AcceleratorFilter is '
                'in [filter_scheduler] enabled_filters of nova-scheduler. A '
                'server that is forced to a host bypasses it.',
                {'server': claims[0].holder,
                 'region': f'{device.address} {region.name}',
                 'better': ', '.join(sorted(better))})

    def restore(self, context, project_id: str, claims: Iterable[model.Claim],
                requests: Mapping[str, request.AcceleratorRequest] = {},
                ) -> None:
        """Program the regions of a server again after its card lost its power.

        The image comes from the cache, or from Glance.

        :param claims: claims whose devices are in no running guest.
        :param requests: requests of the flavor, by group. They select the
            image if the claim names none, because nothing was programmed for
            the claim.
        :raises AcceleratorError: a region was not programmed. The claims stay,
            and the next start retries.
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
                # the card already carried this function when the server got it
                requests[mine[0].group].only(function), mine)
            self._holdings.bound(mine, self._inventory.find_held(mine[0])[1])

    def _reprogram(self, context, project_id, claims, device, region):
        image, function = (claims[0].restore_bitstream,
                           claims[0].restore_function)
        loaded = model.Loaded(
            function, image, None, claims[0].restore_content,
            claims[0].restore_origin)
        LOG.info('%s %s does not carry function %s of server %s any more; it '
                 'is programmed again', device.address, region.name, function,
                 claims[0].instance_uuid)
        with self._programming_for(claims, device, region):
            self._load_again(context, project_id, loaded, device, region)

    @contextlib.contextmanager
    def _programming_for(self, claims, device, region):
        """Context manager for the programming of a region: check that it is
        permitted, mark the claims as PROVISIONING, and in the end show the
        region in Placement."""
        self._check_may_program(claims, device, region)
        self._holdings.provisioning(claims)
        yield
        self._publisher.show({c.provider_uuid for c in claims})

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
            # the error must not name the other server
            LOG.warning('%s would have to be programmed for server %s, and '
                        'server %s uses it', name, instance_uuid, min(others))
            raise exception.DeviceUnavailable(
                f'{name} would have to be programmed for server '
                f'{instance_uuid}, and another server uses it: the build is '
                f'retried on another host.')

    def _load_again(self, context, project_id, loaded, device, region):
        if self._loader.load_cached(loaded, device, region):
            return
        wanted = request.AcceleratorRequest(
            group='', resource_class='', amount=1,
            bitstream_id=loaded.bitstream_id,
            # an image of a project is used only if its data can be compared
            chosen_by_owner=bool(loaded.content)
            and loaded.origin != model.OPERATOR)
        client, image = self._loader.find(
            context, project_id, wanted, region)
        loading.check_data(image, loaded.content or '')
        self._loader.load(client, image, device, region)


def _was_loaded_for(claims, wanted, region) -> bool:
    """Return whether the region carries the image that was loaded for this
    server, and the request still names this image."""
    return bool(wanted.bitstream_id) and all(
        c.restore_bitstream == wanted.bitstream_id == region.bitstream_id
        and c.restore_function == region.function_uuid for c in claims)


def _check_handles(device, region, claims):
    """Check that the handles of claims exist."""
    for claim in claims:
        if (claim.created_type is None and claim.handle
                not in (region or device).handles):
            found = (f'Server {claim.instance_uuid} has '
                     f'{claim.handle.address} of {device.address}, which the '
                     f'host does not have now')
            raise exception.DeviceUnavailable(
                f'{found}: see nova-accel discover, and check [accel] '
                f'virtual_functions.', found=found)


def _refused(text: str) -> exception.DeviceUnavailable:
    error = exception.DeviceUnavailable(text)
    error.elsewhere = False
    return error
