# Licensed under the Apache License, Version 2.0. See LICENSE.
"""LibvirtDriver with accelerators: read this first.

Each override says when Nova calls it and which one method of ours answers.
Nova's own work is always done by super(). References are to nova 34; where
releases differ the arguments that we do not read are passed through.
"""

import contextlib
import functools
import inspect
import threading

from nova.compute import resource_tracker
from nova.compute import task_states
from nova import context as nova_context
from nova import exception as nova_exception
from nova.image import glance as nova_glance
from nova.pci import utils as pci_utils
from nova.pci import whitelist
from nova import utils
from nova.virt.libvirt import config as vconfig
from nova.virt.libvirt import driver as libvirt_driver
from oslo_context import context as current_context
from oslo_log import log as logging

from nova_accel import conf
from nova_accel import exception
from nova_accel.host import pci
from nova_accel import model
from nova_accel import request
from nova_accel.virt import attach
from nova_accel.virt import reconcile

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
        #: servers that this thread is rebooting hard: their destroy() keeps
        self._rebooting = threading.local()
        #: servers being built for which the scheduler gave no further host
        self._last_hosts = set()

    # The service

    def init_host(self, host):
        """At start, before anything else: find devices, read claims."""
        super().init_host(host)
        self.accelerators.initialize(host, CONF.state_path)
        self._refuse_shared_devices()
        self._watch_last_hosts()

    def cleanup_host(self, host):
        """At stop (Nova 33 and later)."""
        self.accelerators.close()
        super().cleanup_host(host)

    def _refuse_shared_devices(self):
        """A device that Nova's PCI tracker owns as well is given out twice."""
        specs = whitelist.Whitelist(CONF.pci.device_spec)
        for device in self.accelerators.inventory.devices.values():
            for address in device.pci_addresses():
                if specs.device_assignable(self._as_nova_sees(address)):
                    raise exception.ConfigurationError(
                        f'{address} is matched by [pci] device_spec and found '
                        f'by the driver {device.driver} of [accel] '
                        f'enabled_drivers: take it out of one of the two.')

    def _as_nova_sees(self, address):
        kernel = self.accelerators.kernel
        return {'address': address,
                'vendor_id': pci.identifier(kernel, address, 'vendor'),
                'product_id': pci.identifier(kernel, address, 'device'),
                'parent_addr': pci.physical_function(kernel, address)}

    # Errors

    def _watch_last_hosts(self):
        """Know when a build has no alternate host left.

        The manager is told, the driver is not, and when the last host fails
        Nova's word to the user is only that the hosts are exhausted.
        """
        manager = self.virtapi._compute
        build = manager._do_build_and_run_instance
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
        or that there is no use in it, and tells the user why."""
        try:
            yield
        except exception.AcceleratorError as error:
            if error.elsewhere and instance.uuid not in self._last_hosts:
                raise nova_exception.ComputeResourcesUnavailable(
                    reason=str(error)) from error
            raise BuildRefused(instance_uuid=instance.uuid,
                               reason=str(error)) from error

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
            consumers=self._consumers,
            context=nova_context.get_admin_context)

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
        """Glance for the user who asked, with his token."""
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
        with self._released_on_error(context, instance):
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
        with contextlib.suppress(exception.InvalidRequest):
            # said again, and heard, in _get_guest_config()
            self.accelerators.start_plug(
                context, instance.uuid, instance.flavor.extra_specs,
                allocations)

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
        for handle in handles:
            guest.add_device(self._hostdev(handle))
        return guest

    def _handles(self, context, instance):
        self.accelerators.join_plug(instance.uuid)
        requests = request.parse(instance.flavor.extra_specs)
        handles = self.accelerators.handles(instance.uuid)
        if len(handles) < sum(r.amount for r in requests):
            # a start without a claim, as after a lost store: never without
            # the devices
            self.accelerators.plug(
                context, instance.uuid, instance.flavor.extra_specs,
                self._allocations(context, instance))
            handles = self.accelerators.handles(instance.uuid)
        return handles

    def _hostdev(self, handle):
        if handle.type is model.HandleType.MDEV:
            hostdev = vconfig.LibvirtConfigGuestHostdevMDEV()
            hostdev.uuid = handle.address
        else:
            hostdev = vconfig.LibvirtConfigGuestHostdevPCI()
            (hostdev.domain, hostdev.bus, hostdev.slot,
             hostdev.function) = pci_utils.parse_address(handle.address)
            self._set_managed_mode(hostdev, 'true')
        return hostdev

    # Release

    def destroy(self, context, instance, *args, **kwargs):
        """At delete, shelve offload, failed boot, revert, return of a host
        from which servers were evacuated; also inside a hard reboot and
        before a rebuild, where nothing is released."""
        super().destroy(context, instance, *args, **kwargs)
        keep = (instance.uuid in self._hard_reboots()
                or instance.task_state in (
                    task_states.RESIZE_MIGRATING, task_states.REBUILDING))
        if not keep:
            self.accelerators.unplug(context, instance.uuid)

    def _hard_reboots(self):
        return self._rebooting.__dict__.setdefault('uuids', set())

    def _hard_reboot(self, context, instance, *args, **kwargs):
        """At hard reboot, start, restore, and after a reboot of the host."""
        self._hard_reboots().add(instance.uuid)
        try:
            super()._hard_reboot(context, instance, *args, **kwargs)
        finally:
            self._hard_reboots().discard(instance.uuid)

    def migrate_disk_and_power_off(self, context, instance, *args, **kwargs):
        """At resize and cold migration, on the source: what the server has
        is its old self's until the resize is confirmed or reverted."""
        disk_info = super().migrate_disk_and_power_off(
            context, instance, *args, **kwargs)
        self.accelerators.store.set_role(
            instance.uuid, model.Role.CURRENT, model.Role.OLD)
        return disk_info

    def confirm_migration(self, context, migration, instance, network_info):
        """At confirm, on the source."""
        super().confirm_migration(context, migration, instance, network_info)
        self.accelerators.unplug(context, instance.uuid, model.Role.OLD)

    def finish_revert_migration(self, context, instance, *args, **kwargs):
        """At revert, on the source, after destroy() on the destination."""
        self.accelerators.store.set_role(
            instance.uuid, model.Role.OLD, model.Role.CURRENT)
        super().finish_revert_migration(context, instance, *args, **kwargs)
