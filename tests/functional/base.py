# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud in one process, with accelerators on simulated hosts.

nova-api, conductor, scheduler and nova-computes from Nova's own functional
test harness, Placement in the same process, and a Glance of its own in a child
process. What tests see, they see through the REST APIs and the guest XML.
"""

import contextlib
import os
import tempfile
import uuid
from unittest import mock

import fixtures
from lxml import etree
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.libvirt import base
from oslo_context import context
import yaml

from nova_accel import conf
from nova_accel import sim
from tests import functional
from tests import glance_service

#: loopback function, of Intel's samples
NLB0 = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
NLB3 = 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'
OPENCL = '18b79ffa-2ee5-4aa0-96ef-4230dafacb5f'
#: interface ids of two releases of the Arria 10 shell
SHELL_11 = '9926ab6d-6c92-5a68-aabc-a7d84c545738'
SHELL_12 = '69528db6-eb31-577a-8c36-68f9faa081f6'
#: inventory of a card of 8 GiB, and of a region that can be had
MEMORY = {'CUSTOM_ACCELERATOR_MEMORY_DDR': (8192, 0)}
REGION = {'CUSTOM_ACCELERATOR_FPGA': (1, 0)}


def card(address, functions=(NLB0,), interface=SHELL_11, **more):
    """A simulated PAC Arria 10 with one port per function."""
    return {'address': address, 'product': 'PAC_ARRIA10',
            'interface': interface, 'functions': list(functions),
            'ports': len(functions), 'programming_seconds': 0, **more}


def fpga_flavor(group='1', amount=1, **accel):
    """Extra specs of a flavor with one FPGA."""
    specs = {f'resources{group}:CUSTOM_ACCELERATOR_FPGA': str(amount)}
    specs.update({f'accel{group}:{k}': v for k, v in accel.items()})
    return specs


class RealGlance(fixtures.Fixture):
    """In place of Nova's imitation of Glance: the service itself."""

    #: what some of Nova's helpers expect to find
    auto_disk_config_enabled_image = {
        'id': '70a599e0-31e7-49b7-b260-868f441e862b'}

    def __init__(self, test):
        super().__init__()

    def _setUp(self):
        glance = self.useFixture(glance_service.SharedGlance())
        self.service, self.client = glance.service, glance.client
        self.guest_image = self.service.upload(
            self.client, 'guest', b'a guest', visibility='public')['id']


class Hostdevs(fixtures.Fixture):
    """What libvirt does with hostdevs, on the simulated host: those that it
    manages are bound to VFIO and back, the others are opened as they are."""

    def __init__(self, kernel_of):
        super().__init__()
        self._kernel_of = kernel_of

    def _setUp(self):
        for name in ('createWithFlags', 'destroy', 'shutdown', 'managedSave',
                     'attachDeviceFlags', 'detachDeviceFlags'):
            original = getattr(fakelibvirt.Domain, name)
            self.useFixture(fixtures.MockPatchObject(
                fakelibvirt.Domain, name, self._around(original)))
        # its own undefineFlags() calls it without the argument
        remove = fakelibvirt.Domain.managedSaveRemove
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Domain, 'managedSaveRemove',
            lambda domain, flags=0: remove(domain, flags)))
        # after a shelve whose snapshot failed Nova believes it paused
        resume = fakelibvirt.Domain.resume
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Domain, 'resume',
            lambda domain: self._resume(domain, resume)))
        # to libvirt a paused guest is active
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Domain, 'isActive', lambda domain: int(
                domain._state in (fakelibvirt.VIR_DOMAIN_RUNNING,
                                  fakelibvirt.VIR_DOMAIN_PAUSED))))

    def _around(self, original):
        """The call, with the devices of a running guest bound to VFIO."""
        def call(domain, *args, **kwargs):
            kernel = self._kernel_of(domain._connection.hostname)
            before = self._taken(domain)
            if original.__name__.endswith('tachDeviceFlags'):
                mdev = etree.fromstring(args[0]).find(
                    "[@type='mdev']/source/address")
                if mdev is not None:
                    return self._move(kernel, domain, original,
                                      mdev.get('uuid'))
            if original.__name__ == 'managedSave' and before:
                raise self._error('Requested operation is not valid: domain '
                                  'has assigned non-USB host devices')
            if original.__name__ == 'createWithFlags':
                self._give(kernel, hostdevs(domain.XMLDesc(0)))
                return original(domain, *args, **kwargs)
            if original.__name__ == 'attachDeviceFlags':
                original(domain, *args, **kwargs)
                self._give(kernel, self._taken(domain) - before)
                return None
            result = original(domain, *args, **kwargs)
            if original.__name__ == 'managedSave':
                # a saved guest does not run
                domain._state = fakelibvirt.VIR_DOMAIN_SHUTOFF
            for hostdev in before - self._taken(domain):
                self._give_back(kernel, *hostdev)
            return result
        return call

    def _move(self, kernel, domain, original, uuid):
        """The imitation knows how to, only of PCI functions."""
        there = domain._def['devices']['hostdevs']
        if original.__name__ == 'attachDeviceFlags':
            self._give(kernel, {(uuid, False)})
            there.append({'type': 'mdev', 'model': 'vfio-pci',
                          'address_uuid': uuid})
        else:
            there[:] = [d for d in there if d.get('address_uuid') != uuid]
            self._give_back(kernel, uuid, False)

    def _resume(self, domain, resume):
        if not domain.isActive():
            raise self._error('Requested operation is not valid: domain is '
                              'not running')
        resume(domain)

    @staticmethod
    def _taken(domain):
        return hostdevs(domain.XMLDesc(0)) if domain.isActive() else set()

    def _give(self, kernel, given):
        try:
            # an IOMMU group is viable when all of it goes to the guest
            managed = sorted(a for a, is_managed in given if is_managed)
            if managed:
                kernel.guest_takes(*managed)
            for address in sorted(a for a, is_managed in given
                                  if not is_managed):
                kernel.guest_opens(address)
        except OSError as error:
            raise self._error(f'Failed to give devices to the guest: {error}')

    @staticmethod
    def _give_back(kernel, address, managed):
        # libvirt logs it when the device is gone
        with contextlib.suppress(OSError):
            if managed:
                kernel.guest_returns(address)
            else:
                kernel.guest_closes(address)

    @staticmethod
    def _error(text):
        return fakelibvirt.make_libvirtError(
            fakelibvirt.libvirtError, text,
            error_code=fakelibvirt.VIR_ERR_INTERNAL_ERROR)


def hostdevs(xml):
    """(PCI address or UUID, whether libvirt manages it) in guest XML."""
    result = set()
    for hostdev in etree.fromstring(xml).iterfind('./devices/hostdev'):
        at = hostdev.find('./source/address')
        result.add((at.get('uuid') or '{:04x}:{:02x}:{:02x}.{:x}'.format(*(
            int(at.get(part), 16)
            for part in ('domain', 'bus', 'slot', 'function'))),
            hostdev.get('managed') == 'yes'))
    return result


def hostdev_addresses(xml):
    """Those of hostdevs() alone, in order."""
    return sorted(address for address, _ in hostdevs(xml))


class PlacementLogContext:
    """In place of oslo_context.context in Placement's request log."""

    class RequestContext(context.RequestContext):

        def update_store(self):
            pass


class AcceleratorTestBase(base.ServersTestBase):

    microversion = 'latest'
    ADMIN_API = True
    # casts as in a real cloud: an error reaches the server, not the caller
    CAST_AS_CALL = False
    #: host name -> description of the simulated host
    HOSTS = {'compute1': {'cards': [card('0000:5e:00.0')]},
             'compute2': {'cards': [card('0000:5e:00.0', [NLB3])]}}

    def setUp(self):
        # set before nova-compute loads the driver, which registers them
        assert 'accel' in conf.CONF
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.profiles = os.path.join(self.directory, 'profiles.yaml')
        self.hosts = os.path.join(self.directory, 'hosts')
        os.mkdir(self.hosts)
        for host, description in self.HOSTS.items():
            self.describe_host(host, description)
        self.flags(state_path=os.path.join(self.directory, 'state'))
        self.flags(api_paste_config=functional.API_PASTE, group='wsgi')
        self.flags(simulated_host=self.hosts, enabled_drivers=['dfl'],
                   device_profiles=self.profiles, function_cache_seconds=0,
                   runtime_programming_pause=0,
                   bitstream_cache=os.path.join(self.directory, 'cache'),
                   group='accel')
        self.flags(
            available_filters=[
                'nova.scheduler.filters.all_filters',
                'nova_accel.scheduler.filters.AcceleratorFilter'],
            enabled_filters=['ComputeFilter', 'AcceleratorFilter'],
            weight_classes=[
                'nova.scheduler.weights.all_weighers',
                'nova_accel.scheduler.weights.AcceleratorWeigher'],
            group='filter_scheduler')
        # Placement answers in the thread that asks, and must not leave its own
        # contexts there as the current one
        self.useFixture(fixtures.MonkeyPatch(
            'placement.context.RequestContext.update_store',
            lambda context: None))
        self.useFixture(fixtures.MonkeyPatch(
            'placement.requestlog.context', PlacementLogContext))
        with mock.patch.object(nova_fixtures, 'GlanceFixture', RealGlance):
            super().setUp()
        self.useFixture(glance_service.NovaTokens())
        self.flags(api_servers=[self.glance.service.url], group='glance')
        self.useFixture(Hostdevs(self.simulated))
        for host in self.HOSTS:
            self.start_compute(host)

    def _setup_compute_service(self):
        self.flags(compute_driver='accel.AccelLibvirtDriver')

    # What an operator does

    def describe_host(self, host, description):
        with open(os.path.join(self.hosts, f'{host}.yaml'), 'w') as file:
            yaml.safe_dump(description, file)

    def write_profiles(self, *profiles):
        with open(self.profiles, 'w') as file:
            yaml.safe_dump(list(profiles), file)

    def upload_bitstream(self, function, interface=SHELL_11, size=4096,
                         data=None, client=None, properties=None, **gbs):
        """Make a GBS and put it into Glance; its id is the answer."""
        if data is None:
            with tempfile.NamedTemporaryFile() as file:
                sim.make_gbs(file.name, function, interface, size=size, **gbs)
                data = file.read()
        if properties is None:
            properties = {'accel:function_id': str(uuid.UUID(function))}
        return self.glance.service.upload(
            client or self.glance.client, 'bitstream', data,
            **{'visibility': 'public', **properties})['id']

    def boot(self, extra_specs, expected_state='ACTIVE', **kwargs):
        flavor = self._create_flavor(extra_spec=extra_specs)
        kwargs.setdefault('image_uuid', self.glance.guest_image)
        return self._create_server(
            flavor_id=flavor, networks='none', expected_state=expected_state,
            **kwargs)

    def fault(self, server):
        """The reason that the owner of a failed server reads."""
        return self.api.get_server(server['id'])['fault']['message']

    # What can be seen

    def accelerators(self, host):
        return self.computes[host].driver.accelerators

    def kernel(self, host):
        return self.accelerators(host).kernel

    def simulated(self, host):
        """The same as kernel(), also while nova-compute does not run."""
        return sim.SimulatedKernel(os.path.join(self.hosts, f'{host}.yaml'))

    def claims(self, host=None):
        return [c for h in ([host] if host else self.computes)
                for c in self.accelerators(h).store.claims()]

    def domain(self, server):
        """What libvirt has of a server, on the host where Nova sees it."""
        server = self.admin_api.get_server(server['id'])
        connection = self.computes[
            server['OS-EXT-SRV-ATTR:host']].driver._host.get_connection()
        return connection.lookupByUUIDString(server['id'])

    def guest_xml(self, server):
        return self.domain(server).XMLDesc(0)

    def hostdevs(self, server):
        """PCI addresses, in sysfs form, and UUIDs of mediated devices."""
        return hostdev_addresses(self.guest_xml(server))

    def report(self):
        """One periodic pass of every nova-compute."""
        self._run_periodics()

    def provider(self, name):
        found = self.placement.get(
            f'/resource_providers?name={name}', version='1.14',
        ).body['resource_providers']
        return found[0] if found else None

    def traits(self, name):
        return set(self._get_provider_traits(self.provider(name)['uuid']))

    def provider_tree(self):
        """Name -> (inventory totals, traits, used) of our providers."""
        tree = {}
        for provider in self.placement.get(
                '/resource_providers', version='1.14',
        ).body['resource_providers']:
            if '_accel_' in provider['name']:
                url = f'/resource_providers/{provider["uuid"]}'
                inventories = self.placement.get(
                    f'{url}/inventories').body['inventories']
                tree[provider['name']] = (
                    {rc: (i['total'], i['reserved'])
                     for rc, i in inventories.items()},
                    self.traits(provider['name']),
                    self.placement.get(f'{url}/usages').body['usages'])
        return tree
