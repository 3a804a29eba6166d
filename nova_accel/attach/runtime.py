# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Program regions at run time, when owners of servers request it in metadata.

``accel<g>:bitstream_id=<image>`` requests a programming. <g> is the group of
the flavor, and may be omitted if only one group allows programming.
``accel<g>:status`` reports the result: one word, the image, and after a colon
the reason. The metadata are read periodically, because Nova does not notify
compute hosts.
"""

import collections
from concurrent import futures
import dataclasses
import re
import time
import uuid

from nova_accel.attach import carrying as guest_claims
from nova_accel.attach import cloud as novas
from nova_accel.attach import holdings as server_holdings
from nova_accel.attach import loading
from nova_accel.attach import owner_reports
from nova_accel.attach import programming as region_programming
from nova_accel.attach import readiness as device_readiness
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel import inventory as host_inventory
from nova_accel import locks
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request
from nova_accel import text

CONF = conf.CONF
LOG = logging.getLogger(__name__)

_KEY = re.compile(f'accel({request.GROUP}):([^:]+)')
_ASKS = 'bitstream_id'
#: names of nova_accel in the metadata of a server
_KNOWN = (_ASKS, 'status', 'function', 'prefer', 'health', 'maintenance')
#: maximum length of a key of metadata in Nova
_KEY_ROOM = 255
#: beginning of the reason if two keys mean the same group
_TWICE = 'Two keys are for one group'


@dataclasses.dataclass(eq=False)
class RuntimeProgramming:
    _cloud: novas.Cloud
    _inventory: host_inventory.Inventory
    _holdings: server_holdings.Holdings
    _programming: region_programming.Programming
    _readiness: device_readiness.Readiness
    _servers: locks.Locks
    _carrying: guest_claims.Carrying
    _reports: owner_reports.OwnerReports

    def __post_init__(self) -> None:
        self.background = limited.Background(
            self._start_all, 'The metadata of servers could not be searched '
            'for bitstreams')
        self._lock = locks.Lock('runtime')
        #: servers being processed, each by a thread of its own
        self._at_work: dict[str, futures.Future] = {}
        #: (device address, region index) -> when it was last programmed here
        self._programmed_at: dict = collections.defaultdict(
            lambda: float('-inf'))

    def run(self) -> int:
        """Process all servers now, and wait for them.

        :returns: how many regions were programmed.
        """
        return sum(future.result(2 * loading.seconds_at_most())
                   for future in self._start_all())

    def _start_all(self):
        # including devices that cannot be programmed: the status gives the
        # reason
        held = {c.instance_uuid for c in self._holdings.all()
                if c.role is model.Role.CURRENT}
        servers = [*(self._cloud.servers(held) if held else ())]
        self._reports.take(servers)
        return [self._start(server.uuid) for server in servers
                if self._has_work(server)]

    def _has_work(self, server):
        try:
            return bool(self._asked(server) or self._corrections(server))
        except Exception:
            # whatever the error is, the other servers are processed
            LOG.exception('The metadata of server %s cannot be read',
                          server.uuid)
            return False

    def _start(self, server_uuid):
        with self._lock:
            running = self._at_work.get(server_uuid)
            if running is None or running.done():
                running = limited.start(self._logged_server, server_uuid)
                self._at_work = {
                    uuid_: future for uuid_, future in self._at_work.items()
                    if not future.done()}
                self._at_work[server_uuid] = running
            return running

    def _logged_server(self, server_uuid):
        try:
            # operations that Nova began earlier hold the lock, and this call
            # waits for them; later ones show in task_state
            with self._servers.held(server_uuid):
                return sum(
                    self._work(server)
                    for server in self._cloud.servers([server_uuid])
                    if server.vm_state == 'active' and not server.task_state)
        except Exception as error:
            LOG.error('Server %s asks for a bitstream, and its request could '
                      'not be carried out: %s', server_uuid, error,
                      exc_info=exception.without_sentence(error))
            return 0

    def _work(self, server):
        for key, said in self._corrections(server).items():
            self._cloud.set_metadata(server.uuid, key, said)
        return sum(self._program(server, group, image)
                   for group, image in self._asked(server).items())

    def _asked(self, server):
        """Return the images that the owner requested and that have no status
        yet, by group."""
        return {group: image for group, image in _wishes(server).items()
                if not self._is_answered(server, group, image)}

    def _is_answered(self, server, group, image):
        said = server.metadata.get(f'accel{group}:status', '')
        word, _, about = said.partition(':')[0].partition(' ')
        if about != _shown(image) or word == 'programming':
            # a status 'programming' of a process that has ended
            return False
        try:
            wanted = _request(server, group, image)
        except exception.InvalidRequest:
            # the flavor has changed since
            return word != 'programmed'
        # if the claim has another image, the server moved, and its device has
        # the content that the flavor names
        return (self._carries(server, wanted) if word == 'programmed'
                else f': {_TWICE}' not in said)

    def _corrections(self, server):
        """Return the status keys to change: key -> text about an unknown key,
        or None to remove a status without a request."""
        changes: dict[str, str | None] = {}
        may_program = any(
            r.runtime_programming for r in server.accelerators.requests)
        wishes = _wishes(server)
        for key, value in server.metadata.items():
            found = _KEY.fullmatch(key)
            if not found or found[1] in wishes:
                continue
            status = f'accel{found[1]}:status'
            if len(status) > _KEY_ROOM:
                # Nova limits the length of a key; the groups of flavors are
                # shorter
                continue
            if key == status and value.startswith('failed '):
                changes.setdefault(status, None)
            elif (found[2] not in _KNOWN and may_program
                  and not key.startswith(owner_reports.KEY)):
                changes[status] = text.shortened(
                    f'failed {_shown(found[2])}: {key} is unknown: name the '
                    f'image by accel{found[1]}:{_ASKS}, or remove the key.',
                    exception.FAULT)
        return {key: said for key, said in changes.items()
                if server.metadata.get(key) != said}

    def _carries(self, server, wanted):
        """Return whether the claims of a group already name the wanted image.
        The devices may still carry another image."""
        return all(c.restore_bitstream == wanted.bitstream_id
                   for c in self._claims_of(server, wanted.group))

    def _claims_of(self, server, group):
        return [c for c in self._holdings.of(server.uuid)
                if c.group == group]

    def _is_too_soon(self, server, wanted):
        """Return whether the pause after the last programming of a group is
        not over. If it is over, begin a new pause ([accel]
        runtime_programming_pause)."""
        regions = {c.part for c in self._claims_of(server, wanted.group)}
        now = time.monotonic()
        if any(now - self._programmed_at[region]
               < CONF.accel.runtime_programming_pause for region in regions):
            return True
        self._programmed_at.update(dict.fromkeys(regions, now))
        return False

    def _program(self, server, group, image):
        def set_status(word, reason=''):
            status = f'{word} {_shown(image)}{reason and f": {reason}"}'
            LOG.info('Server %s, accel%s: %s', server.uuid, group, status)
            self._cloud.set_metadata(
                server.uuid, f'accel{group}:status',
                text.shortened(status, exception.FAULT))

        context = self._cloud.admin_context()
        try:
            wanted = _request(server, group, image)
            # first: an owner who cannot see an image does not learn where it
            # is
            self._cloud.check_image(
                context, wanted.bitstream_id, server.project_id)
            if self._carries(server, wanted) and all(
                    c.state is model.ClaimState.BOUND and not c.error
                    for c in self._claims_of(server, wanted.group)):
                # for example because another key for the same group was
                # removed
                set_status('programmed')
                return 0
            if self._is_too_soon(server, wanted):
                return 0
            set_status('programming')
            self.reprogram(context, server.accelerators, wanted)
        except exception.DeviceDetached as error:
            set_status('detached', error)
        except Exception as error:
            if not isinstance(error, exception.AcceleratorError):
                LOG.exception('Programming at run time failed')
            set_status('failed', exception.for_owner_and_log(
                error, LOG.error, f'Server {server.uuid}, accel{group}'))
        else:
            set_status('programmed')
            return 1
        return 0

    def reprogram(self, context, server: request.Server,
                  wanted: request.AcceleratorRequest) -> None:
        """Program a region of a running server with another bitstream.

        :raises AcceleratorError: programming failed, and the guest has its
            device again with the earlier function.
        :raises DeviceDetached: the earlier function could not be restored, or
            the device not attached: the guest is without the device.
        """
        claims = self._claims_of(server, wanted.group)
        if not claims:
            raise exception.DeviceUnavailable(
                f'Server {server.uuid} asks for {wanted} at run time, and '
                f'has no accelerator there: hard reboot it.')
        # cards that are unhealthy or disabled are not programmed
        self._inventory.find(
            claims[0].device_address, claims[0].region_index)
        handles = [claim.handle for claim in claims]
        try:
            self._cloud.detach(server.uuid, handles)
        except Exception:
            # nothing was touched; devices that are detached are attached again
            self._cloud.attach(server.uuid, handles)
            raise
        failure = self._programmed(context, server, wanted, claims)
        self._carrying.update(server.uuid)
        try:
            self._cloud.attach(server.uuid, handles)
        except Exception as error:
            self._detached(claims, failure or error)
        if failure:
            raise failure

    def _programmed(self, context, server, wanted, claims):
        """Program the region of claims while their handles are detached.

        :returns: None after success. After a failure the error, if the region
            has its earlier function again.
        :raises DeviceDetached: the earlier function could not be restored.
        """
        function = None
        try:
            self._readiness.rescan(claims)
            _, region = self._inventory.find_held(claims[0])
            function = region and region.function_uuid
            self._programming.provision(
                context, server.project_id, wanted, claims)
            self._readiness.bind(claims, by_owner=True)
            return None
        except Exception as error:
            failure = error
        try:
            self._restore(context, server, claims, function)
        except Exception:
            self._detached(claims, failure)
        return failure

    def _restore(self, context, server, claims, function):
        """Restore the earlier function of a region after a failed programming.

        :raises DeviceUnavailable: the function could not be restored.
        """
        now = self._holdings.now(claims)
        self._readiness.rescan(now)
        self._programming.restore(context, server.project_id, now)
        _, region = self._inventory.find_held(now[0])
        if function and not (region and region.function_uuid == function):
            raise exception.DeviceUnavailable(
                f'Function {uuid.UUID(function)} is lost, and it is not known '
                f'from which image it came: rebuild the server.')
        self._holdings.bound_as_before(now)

    def _detached(self, claims, error):
        self._holdings.doubt(claims, str(error))
        addresses = ', '.join(c.handle.address for c in claims)
        raise exception.DeviceDetached(exception.for_owner_and_log(
            error, LOG.error,
            f'{addresses} could not be attached again')) from error


def _wishes(server):
    """Return the images that the owner requests in the metadata, by group.
    Requests that have been answered are included."""
    return {found[1]: image for key, image in server.metadata.items()
            if image and (found := _KEY.fullmatch(key))
            and found[2] == _ASKS}


def _shown(image):
    """Return the image that the owner requested as a short text without
    spaces, for a status."""
    return re.sub('[^0-9A-Za-z_.-]', '?', image)[:40]


def _request(server, group, image):
    """Return the request of a group with the image that the owner names in
    the server's metadata, as if the flavor named that image.

    :raises InvalidRequest: the owner must not program the group, or the image
        is not a UUID.
    """
    free = {r.group: r for r in server.accelerators.requests
            if r.runtime_programming}
    if len(free) == 1:
        only, = free
        names = {'', only}
        if group in names and names <= _wishes(server).keys() and only:
            raise exception.InvalidRequest(
                f'{_TWICE} of the flavor, accel:{_ASKS} and '
                f'accel{only}:{_ASKS}: remove one of them.')
        group = group or only
    if group not in free:
        raise exception.InvalidRequest(
            f'accel{group}:bitstream_id does not belong to a group of the '
            f'flavor that may be programmed at run time, which are '
            f'{", ".join(map(repr, free)) or "none"}: the operator allows it '
            f'by accel<group>:{request.RUNTIME}=true.')
    try:
        bitstream_id = str(uuid.UUID(image))
    except ValueError:
        raise exception.InvalidRequest(
            f'accel{group}:bitstream_id is not an image id: give a UUID.'
        ) from None
    return dataclasses.replace(
        free[group], function_id=None, function_name=None,
        bitstream_id=bitstream_id, chosen_by_owner=True)
