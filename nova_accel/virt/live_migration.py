# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Live migration of servers with accelerators.

With accel:live_migration=detach in the flavor, the guest releases its devices,
moves, and gets equal devices on the new host. Nova does the same with network
cards that are passed through (LibvirtDriver._detach_direct_passthrough_vifs).

With accel:live_migration=transparent, the guest keeps its devices, and QEMU
loads their state into equal devices of the new host. The source describes its
devices in Nova's migrate_data. The destination compares them with the devices
that it can claim, claims its devices, and adds their addresses, which Nova
writes into the guest's XML (nova.virt.libvirt.migration). Other flavors are
refused.

For example, server A moves by detach from host 1, where it has 0000:3b:00.0, to
host 2. Before the first call, Placement allocates a device of host 2 to A, and
0000:3b:00.0 to the migration. In pre_live_migration, host 2 claims and
prepares 0000:65:00.0 for the migration. In live_migration, host 1 detaches
0000:3b:00.0, and the guest moves. Then host 1 releases and cleans 0000:3b:00.0,
and host 2 transfers its claim to A and attaches 0000:65:00.0 to the guest.

The calls of Nova (31 to 34), in their order, and the owners of the devices in
the stores of the two hosts:

=================================== =========== =============== ==============
Call of Nova                        Host        Old devices     New devices
=================================== =========== =============== ==============
check_can_live_migrate_destination  destination the server's
check_can_live_migrate_source       source      the server's
check_source_migrate_data_at_dest   destination the server's
pre_live_migration                  destination the server's    the migration's
live_migration                      source      out of guest,   the migration's
                                                or the server's
post_live_migration_at_source       source      released        the migration's
post_live_migration_at_destination  destination                 the server's
=================================== =========== =============== ==============

After a failure rollback_live_migration_at_source() attaches the old devices
again, and rollback_live_migration_at_destination() releases the new devices.
If Nova calls neither, attach.reconcile does both.
"""

from collections.abc import Callable
import json

from nova import exception as nova_exception

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import vfio
from nova_accel import log as logging
from nova_accel import model
from nova_accel import request
from nova_accel import service
from nova_accel.virt import cloud as nova_cloud

CONF = conf.CONF
LOG = logging.getLogger(__name__)
#: keys of LibvirtLiveMigrateData.target_mdevs, which Nova sends between the
#: hosts. Nova uses the entries that it finds in guest XML, and cleans up on
#: each host because of them (ComputeManager._live_migration_cleanup_flags)
_MIGRATION, _MOVABLE = 'nova_accel:migration', 'nova_accel:movable'
#: stands for a migration in the data of a destination that supports the
#: migration of devices
_TRANSPARENT = 'transparent'


class LiveMigrations:

    def __init__(self, parts: service.Host, cloud: nova_cloud.NovaCloud,
                 has_versions: Callable[..., bool]):
        """:param has_versions: nova.virt.libvirt.host.Host.has_min_version"""
        self._parts = parts
        self._guests = parts.guests
        self._descriptions = parts.descriptions
        self._cloud = cloud
        self._has_versions = has_versions

    # Before anything moves

    def offer(self, instance, data) -> None:
        """Store in data that this host can take the devices of a server. The
        source reads this in check_source().

        :param data: nova.objects.LibvirtLiveMigrateData, which is changed.
        :raises MigrationPreCheckError: QEMU or libvirt of this host is too old.
        """
        server = nova_cloud.server_of(instance)
        if server.requests:
            if server.takes_along:
                self._check_versions(instance, 'new', vfio.VERSIONS)
            _note(data, _MIGRATION,
                  _TRANSPARENT if server.takes_along else '')

    def check_source(self, instance, data) -> None:
        """Check on the source whether the server can be migrated.

        :raises MigrationPreCheckError: the server cannot be migrated.
        """
        if not self._guests.handles(instance.uuid):
            return
        server = nova_cloud.server_of(instance)
        if server.takes_along:
            self._check_movable(instance, data)
            return
        if not server.detaches:
            _refuse(f'Server {instance.uuid} has accelerators, and its flavor '
                    f'does not allow live migration '
                    f'({request.LIVE_MIGRATION_KEY}): migrate it cold.')
        if _migration(data) is None:
            _refuse(f'nova-compute of the new host cannot give server '
                    f'{instance.uuid} other accelerators: upgrade nova_accel '
                    f'there.')
        if instance.uuid not in self._cloud.running():
            _refuse(f'The guest of server {instance.uuid} does not run, and '
                    f'must release its accelerators: start it, or migrate '
                    f'it cold.')

    def _check_movable(self, instance, data):
        if _migration(data) != _TRANSPARENT:
            _refuse(f'nova-compute of the new host cannot take over the '
                    f'accelerators of server {instance.uuid} with their '
                    f'state: upgrade nova_accel there.')
        self._check_versions(instance, 'old', vfio.VERSIONS)
        if CONF.libvirt.live_migration_permit_post_copy:
            _refuse(f'Server {instance.uuid} has accelerators, with which '
                    f'QEMU does not copy memory after the guest has moved: '
                    f'set [libvirt] live_migration_permit_post_copy to false '
                    f'on this host, or migrate it cold.')
        if _has_iommu(instance):
            _refuse(f'Server {instance.uuid} has accelerators, with which '
                    f'QEMU moves no guest that has an IOMMU of its own: use a '
                    f'flavor and an image without hw:viommu_model, or migrate '
                    f'it cold.')
        try:
            found = self._descriptions.of_claims(
                self._parts.holdings.of(instance.uuid))
        except exception.AcceleratorError as error:
            _refuse(f'Server {instance.uuid} stays: {error}')
        self._check_iommufd(instance)
        self._check_downtime(instance)
        _note(data, _MOVABLE, json.dumps(found))

    def _check_iommufd(self, instance):
        needed = self._descriptions.by_iommu(instance.uuid)
        if not needed:
            return
        self._check_versions(instance, 'old', vfio.IOMMUFD_VERSIONS)
        if left := self._cloud.without_iommufd(instance.uuid, needed):
            _refuse(f'The guest of server {instance.uuid} has '
                    f'{", ".join(sorted(left))} without iommufd, for example '
                    f'because it started before an upgrade of libvirt, and '
                    f'the IOMMU does not track its writes: reboot the server '
                    f'hard, and then migrate it.')

    def _check_downtime(self, instance):
        limit = nova_cloud.server_of(instance).max_downtime
        seconds = self._seconds(instance)
        if seconds > (limit or CONF.libvirt.live_migration_downtime / 1000):
            says = (f'{request.DOWNTIME_KEY}={limit} of its flavor' if limit
                    else '[libvirt] live_migration_downtime of nova.conf')
            _refuse(
                f'Server {instance.uuid} has accelerators with '
                f'{self.memory(instance)} MiB of memory, and its guest would '
                f'be paused for up to {seconds:.1f} s while that is copied, '
                f'longer than {says} allows: use a flavor with a larger '
                f'{request.DOWNTIME_KEY}, or migrate it cold.')

    def _seconds(self, instance):
        return vfio.seconds_to_copy(
            self.memory(instance), CONF.libvirt.live_migration_bandwidth)

    def _check_versions(self, instance, which, versions):
        if not self._has_versions(*versions):
            _refuse(f'Server {instance.uuid} has accelerators, whose state '
                    f'{vfio.named(versions)} move, and the {which} '
                    f'host has earlier ones: upgrade them, or migrate it '
                    f'cold.')

    def by_iommufd(self, server_uuid: str, instance: Callable) -> set[str]:
        """Return the addresses of devices that QEMU must open by iommufd to
        move their state with the guest.

        :param instance: function that reads the server from Nova's database.
            It is called only if the server may have such devices: other
            devices must be attached even if the database is unavailable.
        """
        found = self._descriptions.by_iommu(server_uuid)
        if (found and self._has_versions(*vfio.IOMMUFD_VERSIONS)
                and nova_cloud.server_of(instance()).takes_along):
            return found
        return set()

    def check_destination(self, instance, data, migration, allocations,
                          movable: str | None) -> None:
        """Check on the destination whether it has the devices that the server
        needs.

        :param movable: the result of moved() before Nova's own check.
        :raises MigrationPreCheckError: the destination lacks such devices.
            Nova then tries another host.
        """
        server = nova_cloud.server_of(instance)
        if not server.requests:
            return
        if instance.uuid in self._cloud.running():
            # devices of a guest must not be released, whatever Nova believes
            _refuse(f'Server {instance.uuid} cannot come to a host where its '
                    f'guest runs already, as after a live migration in which '
                    f'nova-compute was killed: end that guest (virsh '
                    f'destroy), and reboot the server hard.')
        if server.takes_along:
            try:
                here = self._descriptions.of_allocations(server, allocations)
                _pairs(instance, movable, here)
            except exception.AcceleratorError as error:
                _refuse(str(error))
            if any(vfio.is_by_iommu(item.kind) for item in here):
                self._check_versions(instance, 'new', vfio.IOMMUFD_VERSIONS)
            _note(data, _MOVABLE, movable)
        elif not self._parts.accelerators.can_have(
                server, allocations, moving=True):
            _refuse(f'The accelerators that Placement has allocated here to '
                    f'server {instance.uuid} are not free: see nova-accel '
                    f'tree.')
        _note(data, _MIGRATION, migration.uuid)

    # The devices of the new host

    def prepare(self, context, instance, data) -> None:
        """Claim and program devices for a server that is about to arrive.

        The guest continues to run with its old devices on the source.

        :raises MigrationError: the devices cannot be prepared. The migration
            then has no claims on this host.
        """
        server = nova_cloud.server_of(instance)
        migration = _migration(data)
        if not (migration and server.requests):
            return
        if not self._cloud.is_latest_move(migration):
            raise nova_exception.MigrationError(
                reason=f'This live migration of server {instance.uuid} was '
                       f'abandoned, and a later one moves the server.')
        # claims of a migration whose end this host did not notice
        self._guests.unplug(instance.uuid, model.Role.OLD)
        try:
            claims = self._parts.accelerators.plug(
                context, server,
                self._cloud.allocations(context, instance.uuid),
                migration=migration)
            if server.takes_along:
                _map(data, _pairs(instance, moved(data),
                                  self._descriptions.of_claims(claims)))
        except exception.AcceleratorError as error:
            self.release(instance, data)
            raise nova_exception.MigrationError(reason=str(error)) from error

    def release(self, instance, data) -> None:
        """Release the devices of a server that does not arrive by this
        migration. Nova may have begun another migration to this host since."""
        if migration := _migration(data):
            self._parts.accelerators.confirm_move(instance.uuid, migration)

    def arrive(self, instance) -> None:
        """Attach the prepared devices to a guest that has arrived.

        Raises nothing, because the server has moved: attach.reconcile retries.
        """
        holdings = self._parts.holdings
        try:
            # attach.reconcile may attach them at the same moment
            with self._parts.servers.held(instance.uuid):
                if waiting := holdings.of(
                        instance.uuid, model.Role.OLD):
                    holdings.revert(instance.uuid, waiting)
                self._cloud.change_metadata(
                    instance, self._descriptions.certificates(
                        nova_cloud.server_of(instance), instance.metadata))
                if handles := self._guests.handles(instance.uuid):
                    self._cloud.attach(instance.uuid, handles, lasts=True)
                    self._parts.carrying.update(instance.uuid)
        except Exception as error:
            LOG.error('Server %s has arrived by live migration, and its '
                      'accelerators could not be attached to its guest; that '
                      'is tried again: %s', instance.uuid, error)

    # While the guest moves

    def memory(self, instance) -> int:
        """Return how much accelerator memory a live migration copies, in MiB.
        """
        if not nova_cloud.server_of(instance).takes_along:
            return 0
        return self._descriptions.memory(instance.uuid)

    def allow_downtime(self, instance, guest) -> None:
        """Permit a pause of a guest in a live migration, as long as its flavor
        allows.

        Nova permits longer pauses step by step, and considers only RAM. Here
        each step also includes the time to copy the accelerators, and the last
        step is the limit of the flavor.

        :param guest: nova.virt.libvirt.guest.Guest, changed. Only this
            migration uses the object.
        """
        server = nova_cloud.server_of(instance)
        limit = server.max_downtime
        if not limit or not server.takes_along:
            return
        allow = guest.migrate_configure_max_downtime
        seconds = self._seconds(instance)

        def allow_more(milliseconds):
            # Nova's last step is rounded down
            last = milliseconds + 1 >= CONF.libvirt.live_migration_downtime
            most = limit * 1000 if last else min(
                limit * 1000, int(seconds * 1000) + milliseconds)
            LOG.info('The guest of server %s may be paused for %d ms when it '
                     'migrates.', instance.uuid, most)
            allow(most)
        guest.migrate_configure_max_downtime = allow_more

    # The devices of the old host

    def leave(self, instance, data) -> bool:
        """Detach the devices on the source, unless their state moves with the
        guest.

        :returns: whether the server may move.
        """
        handles = self._guests.handles(instance.uuid)
        if not handles:
            return True
        try:
            if not _migration(data):
                raise exception.DeviceUnavailable(
                    'the new host has not prepared any: upgrade nova_accel '
                    'there.')
            self._parts.servers.wait(instance.uuid)
            if not nova_cloud.server_of(instance).takes_along:
                self._cloud.detach(instance.uuid, handles)
        except Exception as error:
            LOG.error('Server %s stays here and keeps its accelerators, as '
                      'its live migration fails: %s', instance.uuid, error)
            return False
        return True

    def left(self, instance) -> None:
        """Release the devices of a guest that has moved away."""
        # the new host waits for the end of this call
        self._guests.unplug(instance.uuid, wait=False)


def _has_iommu(instance):
    return bool(
        instance.flavor.extra_specs.get('hw:viommu_model')
        or instance.system_metadata.get('image_hw_viommu_model'))


def _refuse(reason):
    raise nova_exception.MigrationPreCheckError(reason=reason)


def _note(data, key, value):
    there = data.target_mdevs if 'target_mdevs' in data else None
    data.target_mdevs = {**(there or {}), key: value}


def _noted(data, key):
    if data is None or 'target_mdevs' not in data:
        return None
    return (data.target_mdevs or {}).get(key)


def _migration(data) -> str | None:
    """Return the UUID of the migration, which check_destination() stores.

    Before it has run, return what offer() stored: _TRANSPARENT or ''. Return
    None for a server without accelerators.
    """
    return _noted(data, _MIGRATION)


def moved(data) -> str | None:
    """Return the device list that the source host stored in migrate_data."""
    return _noted(data, _MOVABLE)


def _pairs(instance, movable, here):
    """Return pairs of a device of the source and its replacement on this host.

    :param movable: see moved().
    :param here: model.MigratableDevice of each device that the server gets
        here.
    :raises DeviceUnavailable: the devices are not equal.
    """
    there = [model.MigratableDevice(*item)
             for item in json.loads(movable or '[]')]

    def described(found):
        return [item._replace(address='') for item in found]
    if described(there) != described(here):
        raise exception.DeviceUnavailable(
            f'Server {instance.uuid} has {_kinds(there)} and would get '
            f'{_kinds(here)} on the new host, which do not load the state of '
            f'the others: have equal devices, drivers and firmware on both '
            f'hosts, or migrate it cold.')
    return zip(there, here)


def _kinds(found):
    return ', '.join(item.kind for item in found) or 'none'


def _map(data, pairs):
    """Store in data which device of this host replaces each device of the
    source. Nova writes the XML of the guest from data."""
    functions = (data.pci_dev_map_src_dst or {}
                 if 'pci_dev_map_src_dst' in data else {})
    for there, here in pairs:
        if here.handle_type == model.HandleType.MDEV.value:
            _note(data, there.address, here.address)
        else:
            functions = {**functions, there.address: here.address}
    data.pci_dev_map_src_dst = functions
