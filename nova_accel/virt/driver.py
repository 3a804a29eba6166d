# Licensed under the Apache License, Version 2.0. See LICENSE.
"""LibvirtDriver with accelerators: read this first.

Each override says when Nova calls it and which one method of ours answers.
Nova's own work is always done by super(). References are to nova 34; where
releases differ the arguments that we do not read are passed through.
"""

import contextlib
import dataclasses
import functools
import inspect
import textwrap
import threading

from nova.compute import resource_tracker
from nova.compute import task_states
from nova import context as nova_context
from nova import exception as nova_exception
from nova.image import glance as nova_glance
from nova import objects
from nova.pci import whitelist
from nova import utils
from nova.virt.libvirt import driver as libvirt_driver
from oslo_context import context as current_context
from oslo_log import log as logging
from oslo_service import periodic_task

from nova_accel.bitstream import glance
from nova_accel import conf
from nova_accel import exception
from nova_accel.host import limited
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from nova_accel import request
from nova_accel.virt import attach
from nova_accel.virt import guest as guest_devices
from nova_accel.virt import reconcile
from nova_accel.virt import runtime

CONF = conf.CONF
LOG = logging.getLogger(__name__)


class BuildRefused(nova_exception.BuildAbortException):
    """Ends a build; its fault is our sentence alone, as a fault is cut off
    after 255 characters."""

    msg_fmt = '%(reason)s'


class AccelLibvirtDriver(libvirt_driver.LibvirtDriver):

    def __init__(self, virtapi, read_only=False):
        super().__init__(virtapi, read_only)
        self.accelerators = attach.Accelerators(
            images=self._image_client, publish=self._publish)
        self._hostdevs = guest_devices.Hostdevs(self._set_managed_mode)
        #: servers that this thread is rebooting hard: their destroy() keeps
        self._rebooting = threading.local()
        #: servers being built for which the scheduler gave no further host
        self._last_hosts = set()

    # The service

    def init_host(self, host):
        """At start, before anything else: find devices, read claims.

        Before Nova's own: Nova 31 makes the mediated devices of guests again,
        and has to know which are ours; and what refuses to start after it
        stays there for ever, for its thread of libvirt's events (Nova 34 with
        native threads).
        """
        self.accelerators.initialize(host, CONF.state_path)
        self._refuse_shared_devices()
        super().init_host(host)
        self._watch_last_hosts()
        self._watch_metadata()

    def cleanup_host(self, host):
        """At stop (Nova 33 and later)."""
        self.accelerators.close()
        super().cleanup_host(host)

    def _refuse_shared_devices(self):
        """A device that Nova's own code has as well is given out twice."""
        specs = whitelist.Whitelist(CONF.pci.device_spec)
        for device in self.accelerators.inventory.devices.values():
            for address in sorted(device.functions()
                                  | self._sharing(device)):
                seen = (self._as_nova_sees(address) if CONF.pci.device_spec
                        and pci.ADDRESS.fullmatch(address) else None)
                option = ('[pci] device_spec'
                          if seen and specs.device_assignable(seen) else
                          self._option_of_vgpus(address))
                if option:
                    raise exception.ConfigurationError(
                        f'{address} is matched by {option} and found by the '
                        f'driver {device.driver} of [accel] enabled_drivers: '
                        f'take it out of one of the two.')

    def _sharing(self, device):
        """Functions on which its vGPUs may come to be."""
        if device.type != 'VGPU' or not pci.ADDRESS.fullmatch(device.address):
            return set()
        vfs = self._read(device.address, 'the VFs', pci.virtual_functions,
                         self.accelerators.kernel, device.address)
        left = self.accelerators.inventory.rules.applied(dataclasses.replace(
            device, handles=tuple(
                model.AttachHandle(model.HandleType.PCI, vf)
                for vf in vfs or ())))
        return {h.address for h in left.handles} if left else set()

    def _option_of_vgpus(self, address):
        """The option by which Nova makes vGPUs of a function, if any.

        Nova takes its first type without addresses for every function that
        offers it and is in the addresses of no other type. What is no PCI
        device goes by the name that libvirt makes of its place in sysfs, and
        only where it is in the addresses of a type.
        """
        option = '[devices] enabled_mdev_types'
        kernel = self.accelerators.kernel
        name, place = address, pci.path(address)
        if not pci.ADDRESS.fullmatch(address):
            place = f'class/mdev_bus/{address}'
            link = self._read(address, 'the place', kernel.readlink,
                              place) or ''
            name = link.rpartition('devices/virtual/')[2].replace('/', '_')
        if name in self.pgpu_type_mapping:
            return (f'{option} (device_addresses of '
                    f'[mdev_{self.pgpu_type_mapping[name]}])')
        default = self.pgpu_type_default
        if name == address and default and self._read(
                address, 'the vGPU types', kernel.exists,
                f'{place}/mdev_supported_types/{default}'):
            return option
        return None

    def _as_nova_sees(self, address):
        """None for a function that cannot be read, which Nova cannot have."""
        def look():
            kernel = self.accelerators.kernel
            return {'address': address,
                    'vendor_id': pci.identifier(kernel, address, 'vendor'),
                    'product_id': pci.identifier(kernel, address, 'device'),
                    'parent_addr': pci.physical_function(kernel, address)}
        return self._read(address, 'the PCI ids', look)

    @staticmethod
    def _read(address, what, look, *args):
        """What look() gives, with a time limit; None where it fails."""
        try:
            return limited.wait(
                limited.start(look, *args), CONF.accel.discovery_timeout,
                f'Reading {what} of {address}')
        except (exception.DeviceTimeout, OSError) as error:
            LOG.warning('Device %s is not compared with what Nova has: %s',
                        address, error)
            return None

    # Errors

    def _watch_last_hosts(self):
        """Know when a build has no alternate host left.

        The manager is told, the driver is not, and when the last host fails
        Nova's word to the user is only that the hosts are exhausted.
        """
        manager = getattr(self.virtapi, '_compute', None)
        build = getattr(manager, '_do_build_and_run_instance', None)
        if build is None:
            LOG.warning('This Nova does not say which host is the last to try; '
                        'the reason why a build failed there is only in the '
                        'log of nova-compute')
            return
        parameters = inspect.signature(build)

        @functools.wraps(build)
        def watched(*args, **kwargs):
            given = parameters.bind(*args, **kwargs).arguments
            uuid = given['instance'].uuid
            if given.get('host_list') == []:
                self._last_hosts.add(uuid)
            try:
                return build(*args, **kwargs)
            finally:
                self._last_hosts.discard(uuid)
        manager._do_build_and_run_instance = watched

    @contextlib.contextmanager
    def _novas_words(self, instance):
        """Raise our errors as those by which Nova knows where to build next,
        or that there is no use in it, and tells the user why; on the last
        host those of libvirt, too.

        Only a boot goes elsewhere. A rebuild that is told to do so is left
        ACTIVE without a guest.
        """
        try:
            yield
        except exception.AcceleratorError as error:
            if (error.elsewhere
                    and instance.task_state == task_states.SPAWNING
                    and instance.uuid not in self._last_hosts):
                raise nova_exception.ComputeResourcesUnavailable(
                    reason=str(error)) from error
            raise BuildRefused(instance_uuid=instance.uuid,
                               reason=str(error)) from error
        except libvirt_driver.libvirt.libvirtError as error:
            if not (instance.uuid in self._last_hosts
                    and self.accelerators.handles(instance.uuid)):
                raise
            said = textwrap.shorten(str(error), 100, placeholder=' ...')
            raise BuildRefused(instance_uuid=instance.uuid, reason=(
                f'Server {instance.uuid} was to start with its accelerators, '
                f'and libvirt refuses ({said}): see the logs of nova-compute '
                f'and libvirt.')) from error

    # Placement

    def update_provider_tree(self, provider_tree, nodename, allocations=None):
        """Periodically and at each claim, under the resource tracker's lock."""
        super().update_provider_tree(provider_tree, nodename, allocations)
        self.accelerators.inventory.update_tree(
            provider_tree, nodename, self._in_use)
        self.accelerators.inventory.scan_if_due()
        self.reconciler.run_if_due()

    @functools.cached_property
    def reconciler(self):
        return reconcile.Reconciler(
            self.accelerators, guests=self.list_instance_uuids,
            running=lambda: {
                g.uuid for g in self._host.list_guests(only_running=True)},
            consumers=self._consumers, reattach=self._reattach,
            context=nova_context.get_admin_context)

    @functools.cached_property
    def runtime(self):
        def instances(uuids):
            return objects.InstanceList.get_by_filters(
                nova_context.get_admin_context(),
                {'uuid': list(uuids), 'deleted': False,
                 'host': self.virtapi._compute.host},
                expected_attrs=['metadata', 'flavor', 'system_metadata'],
                use_slave=False)

        return runtime.RuntimeProgramming(
            self.accelerators, instances=instances,
            context=nova_context.get_admin_context,
            check=lambda context, image, project: glance.check_use(
                self._image_client(context), image, project),
            detach=lambda instance, handles: self._hostdevs.detach(
                self._host.get_guest(instance), handles),
            attach=self._attach_if_running)

    def _watch_metadata(self):
        """Look for bitstreams in the metadata of servers, periodically."""
        @periodic_task.periodic_task(
            spacing=CONF.accel.runtime_programming_interval,
            name='accel_runtime_programming')
        def program_at_run_time(manager, context):
            manager.driver.runtime.start_run()
        self.virtapi._compute.add_periodic_task(program_at_run_time)

    def _consumers(self, provider_uuid):
        """Who has allocations from a provider; raises when nobody can tell."""
        return set(
            self.virtapi.reportclient.get_allocations_for_resource_provider(
                nova_context.get_admin_context(), provider_uuid).allocations)

    def _in_use(self, provider_uuid):
        try:
            return bool(self._consumers(provider_uuid))
        except nova_exception.ResourceProviderAllocationRetrievalFailed:
            return True

    def _publish(self, context, provider_uuids):
        """Show what changed now rather than at the next periodic report.

        Under the resource tracker's lock: a report under way would overwrite
        it with what it copied before. A failure is made good by the next
        report, which says the same.
        """
        client = self.virtapi.reportclient

        @utils.synchronized(
            resource_tracker.COMPUTE_RESOURCE_SEMAPHORE, fair=True)
        def publish(provider_uuid):
            provider = self.accelerators.inventory.own_providers().get(
                provider_uuid)
            if provider is None:
                return
            there = client.get_provider_traits(context, provider_uuid)
            if provider.follows_use:
                # also into Nova's own copy, with the generation of now
                inventories = client._refresh_and_get_inventory(
                    context, provider_uuid)['inventories']
                client.set_inventory_for_provider(
                    context, provider_uuid, provider.inventory_beside(
                        inventories, naming.FENCED in there.traits,
                        self._in_use))
                there = client.get_provider_traits(context, provider_uuid)
            traits = provider.traits_beside(there.traits)
            if traits != there.traits:
                client.set_traits_for_provider(
                    context, provider_uuid, traits,
                    generation=there.generation)

        for provider_uuid in provider_uuids:
            for attempts_left in (2, 1, 0):
                try:
                    publish(provider_uuid)
                    break
                except nova_exception.ResourceProviderUpdateConflict:
                    if attempts_left:
                        continue
                    LOG.warning('The traits of %s change too often to be '
                                'shown at once', provider_uuid)
                except Exception as error:
                    LOG.warning('The traits of %s are not shown before the '
                                'next report: %s', provider_uuid, error)
                    break

    # Attach

    def _image_client(self, context):
        """Glance for the user who asked, with his token; where nobody did,
        as at run time and at host boot, for nova-compute itself."""
        if not context.auth_token:
            servers = CONF.glance.api_servers
            return glance.service_client(servers[0] if servers else None)
        return nova_glance.GlanceClientWrapper(
            context, endpoint=nova_glance.generate_glance_url(context)).client

    def _allocations(self, context, instance):
        return self.virtapi.reportclient.get_allocations_for_consumer(
            context, instance.uuid)

    def prepare_for_spawn(self, instance):
        """At boot, before block devices and image: the first we hear of it."""
        super().prepare_for_spawn(instance)
        context = current_context.get_current()
        if isinstance(context, nova_context.RequestContext):
            self._start_plug(context, instance, lambda: self._allocations(
                context, instance))

    def failed_spawn_cleanup(self, instance):
        """At boot, when it fails before spawn()."""
        super().failed_spawn_cleanup(instance)
        self.accelerators.unplug(nova_context.get_admin_context(),
                                 instance.uuid)

    def spawn(self, context, instance, image_meta, injected_files,
              admin_password, allocations, *args, **kwargs):
        """At boot, rebuild, evacuate, unshelve and cross-cell resize."""
        with self._released_on_error(context, instance), \
                self._novas_words(instance):
            self._start_plug(context, instance, lambda: allocations)
            super().spawn(context, instance, image_meta, injected_files,
                          admin_password, allocations, *args, **kwargs)

    def finish_migration(self, context, migration, instance, disk_info,
                         network_info, image_meta, resize_instance,
                         allocations, *args, **kwargs):
        """At resize and cold migration, on the destination."""
        with self._released_on_error(context, instance):
            self._start_plug(context, instance, lambda: allocations)
            super().finish_migration(
                context, migration, instance, disk_info, network_info,
                image_meta, resize_instance, allocations, *args, **kwargs)

    def _start_plug(self, context, instance, allocations):
        self.accelerators.settle(instance.uuid)
        with contextlib.suppress(exception.InvalidRequest):
            # said again, and heard, in _get_guest_config()
            self.accelerators.start_plug(
                context, instance.uuid, instance.flavor.extra_specs,
                allocations, self._image_wishes(instance))

    @staticmethod
    def _image_wishes(instance):
        """Properties of the image that the server was made or rebuilt of."""
        return {key.removeprefix('image_'): value
                for key, value in instance.system_metadata.items()
                if key.startswith('image_accel')}

    @contextlib.contextmanager
    def _released_on_error(self, context, instance):
        """Not every path calls destroy() after a failure: unshelve, rebuild."""
        try:
            yield
        except Exception:
            self.accelerators.unplug(context, instance.uuid)
            raise

    def _get_guest_config(self, instance, network_info, image_meta, disk_info,
                          rescue=None, block_device_info=None, context=None,
                          *args, **kwargs):
        """Wherever Nova makes guest XML: add what the server holds."""
        with self._novas_words(instance):
            handles = self._handles(context, instance)
        guest = super()._get_guest_config(
            instance, network_info, image_meta, disk_info, rescue,
            block_device_info, context, *args, **kwargs)
        self._hostdevs.add(guest, handles)
        return guest

    def _handles(self, context, instance):
        """What the guest that is about to start is to have."""
        self.accelerators.settle(instance.uuid)
        requests = request.parse(instance.flavor.extra_specs)
        if self.accelerators.is_plugging(instance.uuid):
            self.accelerators.join_plug(instance.uuid)
        else:
            self.accelerators.take_back_if_allocated(
                instance.uuid, lambda: self._allocations(context, instance))
            self.accelerators.restore(context, instance.uuid, requests)
        handles = self.accelerators.handles(instance.uuid)
        if (len(handles) < sum(r.amount for r in requests)
                or not self.accelerators.is_bound(instance.uuid)):
            # a start without a claim, as after a lost store, or with one that
            # a crash left half: never without the devices
            self.accelerators.plug(
                context, instance.uuid, instance.flavor.extra_specs,
                self._allocations(context, instance),
                self._image_wishes(instance), restart=True)
            handles = self.accelerators.handles(instance.uuid)
        return handles

    # Nova's own vGPUs

    def _vgpu_allocations(self, allocations):
        """At each start of a guest: what Nova is to make itself, among which
        may be ours where standard resource classes are in force."""
        own = self.accelerators.inventory.own_providers()
        return super()._vgpu_allocations({
            uuid: allocation for uuid, allocation
            in (allocations or {}).items() if uuid not in own})

    def _get_all_assigned_mediated_devices(self, instance=None):
        """At hard reboot, rescue, revert and, with Nova 31, at start: what
        Nova makes again, or puts into guest XML as it was in the old one.
        Of ours the claims say who has them."""
        own = self.accelerators.mediated_devices()
        return {
            uuid: guest for uuid, guest in
            super()._get_all_assigned_mediated_devices(instance).items()
            if uuid not in own}

    def _get_existing_mdevs_not_assigned(self, *args, **kwargs):
        """Where Nova looks for one to give to a guest."""
        return (super()._get_existing_mdevs_not_assigned(*args, **kwargs)
                - self.accelerators.mediated_devices())

    # Guests that run

    def suspend(self, context, instance):
        """At suspend and cold snapshot: no guest state is saved with a
        device in it; the server keeps it all the same."""
        self.accelerators.settle(instance.uuid)
        guest = self._host.get_guest(instance)
        handles = self.accelerators.handles(instance.uuid)
        try:
            self._hostdevs.detach(guest, handles)
            super().suspend(context, instance)
        except Exception as error:
            self._hostdevs.attach(guest, handles)
            if isinstance(error, exception.AcceleratorError):
                # nothing has changed: the server is no case of ERROR. Of
                # exceptions that are not its own Nova tells only the class
                raise nova_exception.InstanceFaultRollback(
                    nova_exception.NovaException(str(error))) from error
            raise

    def resume(self, context, instance, *args, **kwargs):
        """At resume."""
        with self._novas_words(instance):
            self.accelerators.restore(
                context, instance.uuid,
                request.parse(instance.flavor.extra_specs))
        super().resume(context, instance, *args, **kwargs)
        self._hostdevs.attach(self._host.get_guest(instance),
                              self.accelerators.handles(instance.uuid))

    def unrescue(self, context, instance, *args, **kwargs):
        """At unrescue, which starts the guest XML from before the rescue:
        the host may have lost its power meanwhile."""
        with self._novas_words(instance):
            self._handles(context, instance)
        super().unrescue(context, instance, *args, **kwargs)

    def _resume_guest_after_snapshot(
            self, context, live_snapshot, original_power_state, instance,
            guest):
        """After a cold snapshot, where Nova does not call resume()."""
        super()._resume_guest_after_snapshot(
            context, live_snapshot, original_power_state, instance, guest)
        if guest.is_active():
            self._hostdevs.attach(
                guest, self.accelerators.handles(instance.uuid))

    def _create_snapshot_metadata(self, image_meta, instance, *args,
                                  **kwargs):
        """At snapshot and shelve: mark images of accelerated servers."""
        metadata = super()._create_snapshot_metadata(
            image_meta, instance, *args, **kwargs)
        if request.parse(instance.flavor.extra_specs):
            metadata['properties'][request.SNAPSHOT_PROPERTY] = 'true'
        return metadata

    def check_can_live_migrate_source(self, context, instance, *args,
                                      **kwargs):
        """Before a live migration, where nova-api has not refused it."""
        if self.accelerators.handles(instance.uuid):
            raise nova_exception.MigrationPreCheckError(
                reason=f'Server {instance.uuid} has accelerators, which '
                       f'cannot move while it runs: migrate it cold.')
        return super().check_can_live_migrate_source(
            context, instance, *args, **kwargs)

    def _reattach(self, instance_uuid):
        """Periodically: give a running guest back what it lost."""
        if not self._lacking(objects.Instance(uuid=instance_uuid)):
            return
        context = nova_context.get_admin_context()
        with self.accelerators.busy(instance_uuid):
            instance = objects.Instance.get_by_uuid(context, instance_uuid)
            lacking = self._lacking(instance)
            if lacking and instance.task_state is None:
                LOG.warning('Server %s runs without its accelerators, which '
                            'it gets back now', instance_uuid)
                self.accelerators.restore(
                    context, instance_uuid,
                    request.parse(instance.flavor.extra_specs))
                self._hostdevs.attach(self._host.get_guest(instance), lacking)

    def _lacking(self, instance):
        """What a server holds and its guest, which runs, has not got."""
        guest = self._host.get_guest(instance)
        if not guest.is_active():
            return []
        there = self._hostdevs.addresses(guest)
        return [h for h in self.accelerators.handles(instance.uuid)
                if h.address not in there]

    def _attach_if_running(self, instance, handles):
        """A guest that was shut down meanwhile gets them when it starts."""
        with contextlib.suppress(nova_exception.InstanceNotFound):
            guest = self._host.get_guest(instance)
            if guest.is_active():
                self._hostdevs.attach(guest, handles)

    def reboot(self, context, instance, *args, **kwargs):
        """At soft reboot, which takes the XML that is there, and hard."""
        self.accelerators.settle(instance.uuid)
        super().reboot(context, instance, *args, **kwargs)

    # Release

    def destroy(self, context, instance, *args, **kwargs):
        """At delete, shelve offload, failed boot, revert, return of a host
        from which servers were evacuated; also inside a hard reboot and
        before a rebuild, where nothing is released, and on the source of a
        resize to another cell, where migrate_disk_and_power_off() is not
        called."""
        leaves = instance.task_state == task_states.RESIZE_MIGRATING
        if leaves:
            # before the guest is gone, by which it could be told later
            self.accelerators.settle(instance.uuid)
            self._set_aside(context, instance)
        super().destroy(context, instance, *args, **kwargs)
        keep = (leaves or instance.uuid in self._hard_reboots()
                or instance.task_state == task_states.REBUILDING)
        if not keep:
            self.accelerators.unplug(context, instance.uuid)
        if instance.task_state == task_states.DELETING:
            # of a move that failed
            self.accelerators.unplug(context, instance.uuid, model.Role.OLD)

    def _hard_reboots(self):
        return self._rebooting.__dict__.setdefault('uuids', set())

    def _hard_reboot(self, context, instance, *args, **kwargs):
        """At hard reboot, start, restore, and after a reboot of the host."""
        self._hard_reboots().add(instance.uuid)
        try:
            super()._hard_reboot(context, instance, *args, **kwargs)
        finally:
            self._hard_reboots().discard(instance.uuid)

    def cleanup(self, context, instance, network_info, *args,
                destroy_vifs=True, **kwargs):
        """In destroy(), and by itself when a resize to another cell is
        confirmed on the source, which is told by destroy_vifs alone."""
        super().cleanup(context, instance, network_info, *args,
                        destroy_vifs=destroy_vifs, **kwargs)
        if not destroy_vifs:
            self.accelerators.unplug(context, instance.uuid, model.Role.OLD)

    def migrate_disk_and_power_off(self, context, instance, *args, **kwargs):
        """At resize and cold migration, on the source: what the server has
        is its old self's until the resize is confirmed or reverted."""
        self.accelerators.settle(instance.uuid)
        disk_info = super().migrate_disk_and_power_off(
            context, instance, *args, **kwargs)
        self._set_aside(context, instance)
        return disk_info

    def _set_aside(self, context, instance):
        if self.accelerators.handles(instance.uuid):
            migration = objects.Migration.get_by_instance_and_status(
                context, instance.uuid, 'migrating')
            self.accelerators.set_aside(instance.uuid, migration.uuid)

    def confirm_migration(self, context, migration, instance, network_info):
        """At confirm, on the source."""
        super().confirm_migration(context, migration, instance, network_info)
        self.accelerators.unplug(context, instance.uuid, model.Role.OLD)

    def finish_revert_migration(self, context, instance, *args, **kwargs):
        """At revert, on the source, after destroy() on the destination."""
        self.accelerators.take_back(instance.uuid)
        super().finish_revert_migration(context, instance, *args, **kwargs)

    def cleanup_lingering_instance_resources(self, instance):
        """For deleted servers whose migration involved this host."""
        super().cleanup_lingering_instance_resources(instance)
        context = nova_context.get_admin_context()
        for role in model.Role:
            self.accelerators.unplug(context, instance.uuid, role)
