# Licensed under the Apache License, Version 2.0. See LICENSE.
"""LibvirtDriver with accelerators: read this first.

The class only overrides methods of Nova's driver, in the order of a server's
life. Each override says when Nova calls it, and calls a part of the host
(nova_accel.service) or of the modules beside this file. super() always does
Nova's own work, and a server without accelerators takes only Nova's path.
Facts about Nova hold for Nova 34. Arguments that differ between releases, and
that nova_accel does not use, are passed through.
"""

import contextlib
import threading

from nova.compute import task_states
from nova.compute import vm_states
from nova import exception as nova_exception
from nova.virt.libvirt import driver as libvirt_driver
from oslo_service import periodic_task
from oslo_utils import excutils

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import signals
from nova_accel import machine
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel import service
from nova_accel.virt import cloud
from nova_accel.virt import conflicts
from nova_accel.virt import errors
from nova_accel.virt import guest as guest_xml
from nova_accel.virt import guest_devices
from nova_accel.virt import guest_nodes
from nova_accel.virt import live_migration
from nova_accel.virt import provider_trees
from nova_accel.virt import report_client
from nova_accel import wrapping

CONF = conf.CONF
#: of the resource tracker
_DELETE = 'delete_allocation_for_evacuated_instance'
_REBUILDS = (task_states.REBUILDING, task_states.REBUILD_SPAWNING,
             task_states.REBUILD_BLOCK_DEVICE_MAPPING)


class AccelLibvirtDriver(libvirt_driver.LibvirtDriver):

    def __init__(self, virtapi, read_only=False):
        super().__init__(virtapi, read_only)
        self.cloud = cloud.NovaCloud(
            self, lambda *about: self.live_migrations.by_iommufd(*about))
        self.builds = errors.Builds()
        #: name of this compute host, as Nova calls it at init_host()
        self._host_name = None
        #: whether Nova makes its first report, the only one in which it moves
        #: allocations between providers
        self._starting = False
        #: whether Nova was asked to move allocations
        self._moving = False
        self._waker = signals.Waker()
        #: servers that this thread is rebooting hard: their destroy() keeps
        #: claims
        self._rebooting = threading.local()
        with errors.start_refused():
            self._use(service.none(self.cloud))

    def _use(self, parts: service.Host):
        self.parts = parts
        self.guests = parts.guests
        self.live_migrations = live_migration.LiveMigrations(
            parts, self.cloud, self._host.has_min_version)

    # The service

    def init_host(self, host):
        """Find devices and read claims. Nova calls this first when it starts.

        Nova's own part follows, because Nova 31 creates the mediated devices
        of guests again there, and must know which belong to nova_accel.
        """
        self._host_name = host
        self._waker.start()
        errors.warn_of_simulation()
        with errors.start_refused():
            kernel = machine.open_kernel(host)
            self._use(service.initialize(
                host, CONF.state_path, kernel, self.cloud, conflicts.Conflicts(
                    kernel, self.pgpu_type_mapping,
                    self.pgpu_type_default).taken_elsewhere))
        super().init_host(host)
        # libvirt answers from here on; Nova's own start uses the claims next
        shown = self.parts.inventory.shown
        shown.migrating = {versions for versions in shown.migrating
                           if self._host.has_min_version(*versions)}
        self.parts.begin()
        manager = getattr(self.virtapi, '_compute', None)
        if manager is not None:
            self.builds.watch(manager, self._abandon)
            guest_nodes.GuestNodes(self.parts.accelerators).watch(manager)
            wrapping.wrap(manager, 'pre_start_hook', self._report_first)
            # without it, attach.reconcile restores allocations that are
            # deleted
            if hasattr(manager.rt, _DELETE):
                wrapping.wrap(manager.rt, _DELETE, self._delete_allocation)
            report_client.watch(getattr(manager, 'reportclient', None))
            provider_trees.install()
            manager.add_periodic_task(self._runtime_programming())

    def _report_first(self, hook, *args, **kwargs):
        """Wrap pre_start_hook(), in which Nova makes the first report before
        it receives requests: set _starting while it runs."""
        self._starting = True
        try:
            hook(*args, **kwargs)
        except nova_exception.ReshapeFailed as error:
            if self._moving:
                errors.log_move_refused(error)
            raise
        finally:
            self._starting = False
        self.parts.reshape.end_start()

    def _delete_allocation(self, delete, context, instance, *args, **kwargs):
        """Delete the allocations of a server after its evacuation failed, but
        not after its rebuild on this host failed.

        Nova deletes the allocations of the server on this host, as if an
        evacuation had failed (ComputeManager.rebuild_instance, 31 to 34). But
        a server of this host stays here and keeps its devices. The devices
        must stay allocated: they count in the quota of the project, and other
        servers must not get them.
        """
        if not (kwargs.get('node_type') == 'destination'
                and instance.host == self._host_name
                and self.guests.handles(instance.uuid)):
            delete(context, instance, *args, **kwargs)

    @staticmethod
    def _runtime_programming():
        @periodic_task.periodic_task(
            spacing=CONF.accel.runtime_programming_interval,
            name='accel_runtime_programming')
        def program_at_run_time(manager, context):
            manager.driver.parts.runtime.background.start()
        return program_at_run_time

    def cleanup_host(self, host):
        """Stop nova_accel. Nova 33 and later call this when nova-compute ends.
        """
        self.parts.close()
        super().cleanup_host(host)
        self._waker.close()

    def update_provider_tree(self, provider_tree, nodename, allocations=None):
        """Write nova_accel's providers into Nova's tree. Nova calls this
        periodically and at each claim, under the resource tracker's lock."""
        super().update_provider_tree(provider_tree, nodename, allocations)
        if self._host_name is not None:
            if not self.parts.report(
                    provider_tree, nodename, allocations, self._starting,
                    provider_trees.below(provider_tree, nodename)):
                # Nova calls again, with the allocations
                self._moving = True
                raise nova_exception.ReshapeNeeded()
            self.parts.reconciler.run_if_due()

    def get_available_resource(self, nodename):
        """Add to the statistics of the compute node that this host runs
        nova_accel, and its domains, for nova-scheduler. Nova calls this at the
        start and periodically.

        If the host returns to LibvirtDriver, its next report removes these
        statistics, but its providers in Placement stay.
        """
        resources = super().get_available_resource(nodename)
        if self._host_name is not None:
            resources['stats'] = {**resources.get('stats', {}),
                                  naming.STATISTIC: '1'}
            if domains := self.parts.domains.found:
                resources['stats'][naming.NEAR_STATISTIC] = ' '.join(
                    sorted(domains.values()))
        return resources

    # A guest is created

    def prepare_for_spawn(self, instance):
        """Start to prepare accelerators. ComputeManager calls this before it
        sets up block devices and the image."""
        super().prepare_for_spawn(instance)
        context = self.builds.context_of(instance)
        if context is not None:
            with contextlib.suppress(exception.InvalidRequest):
                # spawn() reports the error again, when Nova handles it
                self.guests.start_plug(
                    context, cloud.server_of(instance),
                    lambda: self.cloud.allocations(context, instance.uuid))

    def failed_spawn_cleanup(self, instance):
        """Release accelerators of a build that failed before spawn()."""
        super().failed_spawn_cleanup(instance)
        self._abandon(instance.uuid)

    def _abandon(self, server_uuid):
        """Release the accelerators of a failed build. errors.Builds calls this
        at the end of each build.

        Nova may call neither spawn() nor destroy(), if the database fails
        before each of them.
        """
        self.guests.abandon(server_uuid)

    def spawn(self, context, instance, image_meta, injected_files,
              admin_password, allocations, *args, **kwargs):
        """Attach accelerators at boot, rebuild, evacuate, unshelve and
        cross-cell resize."""
        with self._plugged(context, instance, allocations):
            super().spawn(context, instance, image_meta, injected_files,
                          admin_password, allocations, *args, **kwargs)

    def finish_migration(self, context, migration, instance, disk_info,
                         network_info, image_meta, resize_instance,
                         allocations, *args, **kwargs):
        """Attach accelerators on the destination of a resize or cold
        migration."""
        with self._plugged(
                context, instance, allocations,
                within=migration.source_compute == self._host_name):
            super().finish_migration(
                context, migration, instance, disk_info, network_info,
                image_meta, resize_instance, allocations, *args, **kwargs)

    @contextlib.contextmanager
    def _plugged(self, context, instance, allocations, within=False):
        """Attach accelerators while Nova creates a guest in the context.

        :param within: whether the server moves within this host.
        """
        rebuilt = (instance.task_state in _REBUILDS
                   and instance.host == self._host_name)
        with self._translated(instance):
            if not (rebuilt or within):
                self._end_earlier_move(instance)
            with self.guests.plugged(
                    context, cloud.server_of(instance),
                    # Nova passes {} also if Placement did not answer
                    lambda: allocations or self.cloud.allocations(
                        context, instance.uuid), rebuilt):
                yield

    def _end_earlier_move(self, instance):
        """Release the claims that an earlier move of a server has left here.

        :raises DeviceUnavailable: the guest of the server runs here.
        """
        if not self.parts.holdings.of(instance.uuid, model.Role.OLD):
            return
        if instance.uuid in self.cloud.running():
            raise exception.DeviceUnavailable(
                f'Server {instance.uuid} cannot come to a host where its guest '
                f'runs already, as after a live migration in which '
                f'nova-compute was killed: reboot the server hard.')
        self.guests.unplug(instance.uuid, model.Role.OLD)

    def _translated(self, instance):
        return self.builds.translated(
            instance, lambda: cloud.server_of(instance).requests)

    def _get_guest_config(self, instance, network_info, image_meta, disk_info,
                          rescue=None, block_device_info=None, context=None,
                          *args, **kwargs):
        """Add the accelerators of the server wherever Nova creates guest XML.
        """
        handles = self._handles_to_start(context, instance)
        if handles:
            shown = cloud.server_of(instance), instance.metadata
            self.cloud.change_metadata(instance, {
                **self.parts.descriptions.metadata_changes(*shown),
                **self.parts.descriptions.certificates(*shown)})
        guest = super()._get_guest_config(
            instance, network_info, image_meta, disk_info, rescue,
            block_device_info, context, *args, **kwargs)
        if handles:
            self.cloud.hostdevs.add(
                guest, handles,
                self.parts.descriptions.numa_nodes(instance.uuid),
                self.live_migrations.by_iommufd(
                    instance.uuid, lambda: instance))
            guest_xml.make_room(
                guest, handles, self.parts.kernel,
                self.capabilities['supports_address_space_emulated'],
                is_new=instance.vm_state == vm_states.BUILDING)
        if text := self.parts.carrying.text_of(instance.uuid):
            guest.metadata.append(guest_xml.Claims(text))
        return guest

    def _build_device_metadata(self, context, instance):
        """Add accelerators to the device metadata of a guest. Nova calls this
        at each start, and when a disk, a network card or a share is attached.
        """
        found = super()._build_device_metadata(context, instance)
        roles = self.parts.descriptions.roles(instance.uuid)
        if not roles:
            return found
        return guest_devices.with_accelerators(
            found, self._host.get_guest(instance).get_xml_desc(), roles,
            self.parts.kernel)

    def _handles_to_start(self, context, instance):
        with self._translated(instance):
            return self.guests.handles_to_start(
                context or self.cloud.admin_context(),
                cloud.server_of(instance))

    # Nova's own vGPUs

    def _vgpu_allocations(self, allocations):
        """Return the allocations for which Nova itself must create vGPUs.
        Other allocations in standard resource classes may be from nova_accel.
        """
        own = self.parts.inventory.shown.providers()
        return super()._vgpu_allocations({
            uuid: allocation for uuid, allocation
            in allocations.items() if uuid not in own}
            if own and allocations else allocations)

    def _get_all_assigned_mediated_devices(self, instance=None):
        """Hide nova_accel's mediated devices when Nova recreates those of its
        own vGPUs (Nova 31: at its start), or copies mediated devices into new
        XML (hard reboot, rescue, revert)."""
        own = self.parts.descriptions.mediated_devices()
        return {
            uuid: guest for uuid, guest in
            super()._get_all_assigned_mediated_devices(instance).items()
            if uuid not in own}

    def _get_existing_mdevs_not_assigned(self, *args, **kwargs):
        """Hide nova_accel's mediated devices when Nova looks for a free one."""
        return (super()._get_existing_mdevs_not_assigned(*args, **kwargs)
                - self.parts.descriptions.mediated_devices())

    # A guest runs

    def reboot(self, context, instance, *args, **kwargs):
        """Wait for operations on the devices of a server before its reboot. A
        soft reboot uses the present XML; for a hard reboot see _hard_reboot().
        """
        self.parts.servers.wait(instance.uuid)
        super().reboot(context, instance, *args, **kwargs)

    def _hard_reboot(self, context, instance, *args, **kwargs):
        """Mark the server during a hard reboot: destroy() then keeps its
        devices. Nova calls this also for a start, a restore, and after a
        reboot of the host. _get_guest_config() prepares the devices."""
        self._hard_reboots().add(instance.uuid)
        try:
            super()._hard_reboot(context, instance, *args, **kwargs)
        finally:
            self._hard_reboots().discard(instance.uuid)

    def _hard_reboots(self):
        return self._rebooting.__dict__.setdefault('uuids', set())

    def suspend(self, context, instance):
        """Detach devices before a suspend and a cold snapshot, because libvirt
        cannot save a guest with devices. The server keeps its devices."""
        handles = self.guests.handles(instance.uuid)
        if not handles:
            return super().suspend(context, instance)
        with errors.nothing_changed():
            self.parts.servers.wait(instance.uuid)
            try:
                self.cloud.detach(instance.uuid, handles)
                return super().suspend(context, instance)
            except Exception:
                with excutils.save_and_reraise_exception():
                    self.guests.reattach(
                        instance.uuid, 'A guest was not saved')

    def resume(self, context, instance, *args, **kwargs):
        """Attach devices again at resume."""
        handles = self.guests.handles(instance.uuid)
        if handles:
            # the memory of the guest is still saved
            with errors.nothing_changed():
                self.parts.accelerators.restore(
                    context, cloud.server_of(instance))
        super().resume(context, instance, *args, **kwargs)
        if handles:
            self.guests.reattach(instance.uuid, 'A guest runs again')

    def _resume_guest_after_snapshot(
            self, context, live_snapshot, original_power_state, instance,
            guest):
        """Attach devices again after a cold snapshot, for which Nova does not
        call resume(). A live snapshot does not detach devices."""
        super()._resume_guest_after_snapshot(
            context, live_snapshot, original_power_state, instance, guest)
        if not live_snapshot:
            self.guests.reattach(
                instance.uuid, 'A guest runs again after a snapshot')

    def _create_snapshot_metadata(self, image_meta, instance, *args,
                                  **kwargs):
        """Mark images of servers with accelerators, at snapshot and shelve."""
        metadata = super()._create_snapshot_metadata(
            image_meta, instance, *args, **kwargs)
        if cloud.server_of(instance).requests:
            metadata['properties'][request.SNAPSHOT_PROPERTY] = 'true'
        return metadata

    def unrescue(self, context, instance, *args, **kwargs):
        """Prepare devices for the guest XML from before the rescue.

        Meanwhile the host may have lost its power, or the rescue guest may
        have changed a whole card.
        """
        if self.guests.handles(instance.uuid):
            # no region is programmed while a guest has its card
            self.power_off(instance)
        self._handles_to_start(context, instance)
        super().unrescue(context, instance, *args, **kwargs)

    def _create_guest(self, context, xml, instance, *args, **kwargs):
        """Add missing devices to the XML with which unrescue starts a guest.
        The XML from before the rescue lacks devices that were detached at that
        time, for example after a failed programming."""
        if instance.task_state == task_states.UNRESCUING and (
                handles := self.guests.handles(instance.uuid)):
            xml = self.cloud.hostdevs.complete(xml, handles)
        return super()._create_guest(context, xml, instance, *args, **kwargs)

    # A server moves

    def check_can_live_migrate_destination(self, context, instance, *args,
                                           **kwargs):
        """Begin the checks of a live migration, on the destination: store for
        the source that this host can take the devices."""
        data = super().check_can_live_migrate_destination(
            context, instance, *args, **kwargs)
        self.live_migrations.offer(instance, data)
        return data

    def check_can_live_migrate_source(self, context, instance,
                                      dest_check_data, *args, **kwargs):
        """Describe the devices of the source for the destination of a live
        migration."""
        self.live_migrations.check_source(instance, dest_check_data)
        return super().check_can_live_migrate_source(
            context, instance, dest_check_data, *args, **kwargs)

    def check_source_migrate_data_at_dest(
            self, ctxt, instance, migrate_data, migration, limits, allocs):
        """Finish the checks of a live migration, on the destination: compare
        its devices with the devices of the source."""
        # first, because Nova's check may put its own mediated devices there
        moved = live_migration.moved(migrate_data)
        data = super().check_source_migrate_data_at_dest(
            ctxt, instance, migrate_data, migration, limits, allocs)
        self.live_migrations.check_destination(
            instance, data, migration, allocs, moved)
        return data

    def pre_live_migration(self, context, instance, block_device_info,
                           network_info, disk_info, migrate_data):
        """Claim and prepare devices on the destination of a live migration."""
        self.live_migrations.prepare(context, instance, migrate_data)
        try:
            return super().pre_live_migration(
                context, instance, block_device_info, network_info, disk_info,
                migrate_data)
        except Exception:
            with excutils.save_and_reraise_exception():
                self.live_migrations.release(instance, migrate_data)

    def live_migration(self, context, instance, dest, post_method,
                       recover_method, block_migration=False,
                       migrate_data=None):
        """Detach devices on the source of a live migration.

        If that fails, recover_method() is called, because an exception would
        leave the server in ERROR.
        """
        if self.live_migrations.leave(instance, migrate_data):
            super().live_migration(
                context, instance, dest, post_method, recover_method,
                block_migration, migrate_data)
        else:
            recover_method(context, instance, dest, migrate_data)

    def _live_migration_data_gb(self, instance, disk_paths):
        """Add the memory of devices to the amount from which Nova derives the
        time limit of a live migration, on the source."""
        return (super()._live_migration_data_gb(instance, disk_paths)
                + self.live_migrations.memory(instance) / 1024)

    def _live_migration_monitor(self, context, instance, guest, *args,
                                **kwargs):
        """Permit a longer pause of the guest while libvirt migrates it, on the
        source."""
        self.live_migrations.allow_downtime(instance, guest)
        super()._live_migration_monitor(
            context, instance, guest, *args, **kwargs)

    def post_live_migration_at_source(self, context, instance, network_info):
        """Release devices on the source after a live migration."""
        super().post_live_migration_at_source(
            context, instance, network_info)
        self.live_migrations.left(instance)

    def post_live_migration_at_destination(self, context, instance,
                                           network_info, *args, **kwargs):
        """Attach devices on the destination after a live migration."""
        super().post_live_migration_at_destination(
            context, instance, network_info, *args, **kwargs)
        self.live_migrations.arrive(instance)

    def rollback_live_migration_at_source(self, context, instance,
                                          migrate_data):
        """Attach devices again on the source after a failed live migration."""
        super().rollback_live_migration_at_source(
            context, instance, migrate_data)
        self.guests.reattach(
            instance.uuid, 'A live migration has failed')

    def rollback_live_migration_at_destination(
            self, context, instance, network_info, block_device_info,
            destroy_disks=True, migrate_data=None):
        """Release devices on the destination after a failed live migration."""
        try:
            super().rollback_live_migration_at_destination(
                context, instance, network_info, block_device_info,
                destroy_disks, migrate_data)
        finally:
            self.live_migrations.release(instance, migrate_data)

    def migrate_disk_and_power_off(self, context, instance, *args, **kwargs):
        """Keep the devices on the source of a resize or cold migration until
        the move is confirmed or reverted."""
        with errors.nothing_changed():
            self.parts.servers.wait(instance.uuid)
            # before Nova moves the disks, because it would not move them back
            migration = self._set_aside(context, instance)
        try:
            return super().migrate_disk_and_power_off(
                context, instance, *args, **kwargs)
        except Exception:
            with excutils.save_and_reraise_exception():
                if migration:
                    self.parts.accelerators.revert_move(
                        instance.uuid, migration)

    def _set_aside(self, context, instance):
        """Keep the devices of a server that moves away.

        :returns: uuid of the migration, or None if the server has no devices.
        """
        if not self.guests.handles(instance.uuid):
            return None
        migration = cloud.migration_of(context, instance).uuid
        self.parts.accelerators.set_aside(instance.uuid, migration)
        return migration

    def confirm_migration(self, context, migration, instance, network_info):
        """Release the earlier devices on the source at confirm."""
        super().confirm_migration(context, migration, instance, network_info)
        if self.guests.holds(instance.uuid):
            self.parts.accelerators.confirm_move(instance.uuid, migration.uuid)

    def finish_revert_migration(self, context, instance, network_info,
                                migration, *args, **kwargs):
        """Restore the devices on the source at revert, after destroy() on the
        destination."""
        if self.guests.holds(instance.uuid):
            self.parts.accelerators.revert_move(instance.uuid, migration.uuid)
        super().finish_revert_migration(
            context, instance, network_info, migration, *args, **kwargs)

    # A guest ends

    def destroy(self, context, instance, *args, **kwargs):
        """Release the devices of a server that this host no longer runs: at a
        delete, a shelve offload, a boot that failed, a revert, and for
        evacuated servers when their former host returns.

        Nova calls this also inside a hard reboot and before a rebuild. Then no
        device is released. On the source of a resize to another cell, Nova
        calls this instead of migrate_disk_and_power_off(). Then the devices
        are kept for the move.
        """
        if not self.guests.holds(instance.uuid):
            return super().destroy(context, instance, *args, **kwargs)
        # a server that was evacuated from here may have any task on its host
        is_here = instance.host == self._host_name
        leaves = (is_here
                  and instance.task_state == task_states.RESIZE_MIGRATING)
        if leaves:
            # before the guest is gone, because a missing guest looks like a
            # deleted server
            self.parts.servers.wait(instance.uuid)
            self._set_aside(context, instance)
        super().destroy(context, instance, *args, **kwargs)
        # Nova's start and its periodic tasks process one server after the
        # other, without a user (nova.context.get_admin_context)
        wait = context.user_id is not None
        if not (leaves or instance.uuid in self._hard_reboots()
                or is_here and instance.task_state == task_states.REBUILDING):
            self.guests.unplug(instance.uuid, wait=wait)
        if instance.task_state == task_states.DELETING:
            # claims of a move that failed
            self.guests.unplug(instance.uuid, model.Role.OLD, wait)

    def cleanup(self, context, instance, network_info, *args, **kwargs):
        """Release devices when a resize to another cell is confirmed on the
        source. Nova passes destroy_vifs=False only in this case."""
        super().cleanup(context, instance, network_info, *args, **kwargs)
        if not kwargs.get('destroy_vifs', True):
            self.guests.unplug(instance.uuid, model.Role.OLD)

    def cleanup_lingering_instance_resources(self, instance):
        """Release the devices of deleted servers whose migration involved this
        host."""
        super().cleanup_lingering_instance_resources(instance)
        for role in model.Role:
            self.guests.unplug(instance.uuid, role, wait=False)
