# Licensed under the Apache License, Version 2.0. See LICENSE.
"""What tests of server operations share: more of libvirt, and invariants."""

import os
import threading

import fixtures
import nova.conf
from nova.limit import local as local_limit
from nova.virt.libvirt import driver as libvirt_driver

from nova_accel.attach import carrying
from nova_accel import model
from nova_accel.virt import guest as guests
from tests.functional import base
from tests.functional import cloud


#: limits in Keystone of what the tests do not count; Nova asks for all of them
WITHOUT_LIMIT = dict.fromkeys((
    local_limit.SERVER_METADATA_ITEMS, local_limit.INJECTED_FILES,
    local_limit.INJECTED_FILES_CONTENT, local_limit.INJECTED_FILES_PATH,
    local_limit.KEY_PAIRS, local_limit.SERVER_GROUPS,
    local_limit.SERVER_GROUP_MEMBERS, 'servers', 'class:VCPU',
    'class:MEMORY_MB', 'class:DISK_GB'), 10 ** 6)


class Killed(BaseException):
    """Nova cleans up after exceptions, and not after this."""


class HostOfThread:
    """nova.conf of Nova's libvirt driver, with the host that asks.

    In the test's process [DEFAULT] host is that of the nova-compute which was
    started last; by it the driver decides at the confirm of a resize whether
    the guest moved away and is to be undefined.
    """

    local = threading.local()

    def __getattr__(self, name):
        if name == 'host' and getattr(self.local, 'host', None):
            return self.local.host
        return getattr(nova.conf.CONF, name)

    @classmethod
    def around(cls, method):
        def call(driver, *args, **kwargs):
            cls.local.host = driver._host.get_connection().hostname
            try:
                return method(driver, *args, **kwargs)
            finally:
                cls.local.host = None
        return call


class OperationsTestBase(base.AcceleratorTestBase):
    """Two hosts with two cards each, on which servers do what they can."""

    HOSTS = {host: {'cards': [base.card('0000:5e:00.0', [base.NLB0]),
                              base.card('0000:af:00.0', [base.NLB3])]}
             for host in ('compute1', 'compute2')}
    RESOURCE_CLASS = 'CUSTOM_ACCELERATOR_FPGA'

    def build(self):
        super().build()
        self.instances_path = nova.conf.CONF.instances_path
        self.flags(allow_resize_to_same_host=False)
        # files of guests, of which there are none here
        for name, value in (('_get_instance_disk_info', []),
                            ('_get_instance_disk_info_from_config', []),
                            ('_is_path_shared_with', True)):
            self.useFixture(fixtures.MockPatch(
                f'nova.virt.libvirt.LibvirtDriver.{name}',
                return_value=value))
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.CONF', HostOfThread()))
        self.useFixture(fixtures.MockPatchObject(
            libvirt_driver.LibvirtDriver, '_cleanup_resize',
            HostOfThread.around(libvirt_driver.LibvirtDriver._cleanup_resize)))
        rename = os.rename

        def rename_what_is_there(source, target, **kwargs):
            if os.path.lexists(source):
                rename(source, target, **kwargs)
        self.useFixture(fixtures.MonkeyPatch(
            'os.rename', rename_what_is_there))
        self.function = base.CRYPTO
        self.bitstreams = {
            function: self.upload_bitstream(function)
            for function in (self.function, base.NLB0, base.NLB3)}
        self.specs = base.fpga_flavor(function_id=self.function)
        self.plain = self._create_flavor(extra_spec={})

    def boot(self, *args, **kwargs):
        server = super().boot(*args, **kwargs)
        os.makedirs(os.path.join(self.instances_path, server['id']),
                    exist_ok=True)
        return server

    def host_of(self, server):
        return self.admin_api.get_server(
            server['id'])['OS-EXT-SRV-ATTR:host']

    def held(self, server, role=model.Role.CURRENT):
        """Host and handle of each accelerator of a server, without those that
        it has lost and that are not clean."""
        return sorted((host, c.handle.address) for host in self.computes
                      for c in self.claims(host)
                      if c.instance_uuid == server['id'] and c.role is role
                      and c.state is not model.ClaimState.DELETING)

    def assertHas(self, server, count=1):
        """The guest has just what the server holds and is allocated.

        :returns: what it holds.
        """
        held = self.held(server)
        self.assertEqual(count, len(held))
        host = self.host_of(server)
        self.assertEqual(
            [(host, a) for a in base.hostdev_addresses(
                self.domain_on(host, server).XMLDesc(0))], held)
        self.assertEqual(
            sorted(c.provider_uuid for c in self.claims(host)
                   if c.instance_uuid == server['id']
                   and c.role is model.Role.CURRENT),
            self.allocated(server['id']))
        self.assertEqual(*self.carried(host, server))
        return held

    def carried(self, host, server):
        """What the store and the guest say of the claims of a server."""
        def said(claims):
            return sorted((c.uuid, c.handle.address, c.consumer_uuid,
                           c.restore_bitstream or '', c.driver_memory)
                          for c in claims)
        text = guests.read_claims(self.domain_on(host, server).XMLDesc(0))
        return said(
            c for c in self.claims(host) if c.instance_uuid == server['id']
            and c.state is not model.ClaimState.DELETING), said(
                carrying.parse(text, server['id']).claims if text else ())

    def allocated(self, consumer):
        return sorted(
            uuid for uuid, allocation
            in self._get_allocations_by_server_uuid(consumer).items()
            if self.RESOURCE_CLASS in allocation['resources'])

    def host_reboots(self, host, how='reboot'):
        kernel = self.kernel(host)
        self.computes[host].stop()
        for domain in self.guests(host):
            domain.destroy()
        getattr(kernel, how)()
        self.restart_compute_service(host)

    def assertFunction(self, held, function):
        """What the card behind a handle carries, by the driver's own look."""
        (host, address), = held
        self.parts(host).inventory.scanner.scan()
        region, = [
            r for d in self.parts(host).inventory.devices.values()
            for r in d.regions if address in [h.address for h in r.handles]]
        self.assertEqual(function.replace('-', ''), region.function_uuid)

    def mend_cards(self):
        for host in self.HOSTS:
            for address in ('0000:5e:00.0', '0000:af:00.0'):
                self.kernel(host).set_fault(address, pr_error=None)

    def break_cards(self, *hosts):
        """No region of these hosts, or of all, can be programmed."""
        for host in hosts or self.HOSTS:
            for address in ('0000:5e:00.0', '0000:af:00.0'):
                self.kernel(host).set_fault(address, pr_error='crc')

    def libvirt_migrates(self, how):
        """:param how: called as libvirt's migrateToURI3."""
        self.useFixture(fixtures.MonkeyPatch(
            'nova.tests.fixtures.libvirt.Domain.migrateToURI3', how))

    def guest_moves(self, domain, host, xml):
        """Do what libvirt and QEMU do to a guest that migrates live."""
        self.computes[host].driver._host.get_connection().defineXML(
            xml).create()
        # its process ends
        domain.destroy()
        domain.complete_job()

    def delete_servers(self):
        for server in self.api.get_servers():
            self.api.delete_server(server['id'])
            self._wait_until_deleted(server)
        self.assertEqual([], self.claims())

    def delete_all(self):
        """Every server is deleted, and nothing is held by any.

        The end of the test sees what Placement shows.
        """
        self.delete_servers()

    def delete_in_error(self, server):
        # not by its status: for that one Nova's tests wait for a fault, too
        self._wait_for_server_parameter(
            server, {'OS-EXT-STS:vm_state': 'error'})
        self.delete_all()


class StepsMixin:
    """A server that takes one step after another, in the order of their names.

    A step, step_<operation>, leaves the server as it was, which assertKept()
    checks. It saves the boot and the end of a server that a test needs.
    """

    def test_steps(self):
        options = cloud.Options()
        for name in sorted(dir(self)):
            if name.startswith('step_'):
                # a rebuild leaves none, and the next rescue writes there
                os.makedirs(os.path.join(
                    self.instances_path, self.server['id']), exist_ok=True)
                getattr(self, name)()
                self.assertKept()
                options.restore()
        self.delete_all()


class MoveTestBase(OperationsTestBase):
    """A server, and where it is."""

    def setUp(self):
        super().setUp()
        self.server = self.boot(self.specs)
        self.before = self.assertHas(self.server)
        self.host = self.host_of(self.server)
