# Licensed under the Apache License, Version 2.0. See LICENSE.
"""A cloud in one process, with accelerators on simulated hosts.

nova-api, conductor, scheduler and nova-computes from Nova's own functional
test harness, Placement in the same process, and a Glance of its own in a child
process. What tests see, they see through the REST APIs and the guest XML.
"""

import contextlib
import copy
import fcntl
import json
import os
import shutil
import tempfile
import uuid
from unittest import mock

import fixtures
from keystoneauth1 import loading
from lxml import etree
from nova import objects
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.libvirt import base
from oslo_context import context
from wsgi_intercept import interceptor
import yaml

from nova_accel import conf
from nova_accel import model
from nova_accel.scheduler import filters
from nova_accel.scheduler import scheduling
from nova_accel import sim
from nova_accel.virt import door
from tests import functional
from tests.functional import cloud
from tests.functional import process
from tests.functional import tables
from tests import glance_service
from tests import scheduling as options
from tests import simulated as kernels
from tests.unit import host as simulated

CONF = conf.CONF
pf, vf = simulated.pf, simulated.vf
#: loopback function, of Intel's samples
NLB0 = 'd8424dc4-a4a3-c413-f89e-433683f9040b'
NLB3 = 'f7df405c-bd7a-cf72-22f1-44b0b93acd18'
CRYPTO = '5b3a1c7e-92d4-4f60-8e1b-c07d64a2f935'
#: interface ids of two releases of the Arria 10 shell
SHELL_11 = '9926ab6d-6c92-5a68-aabc-a7d84c545738'
SHELL_12 = '69528db6-eb31-577a-8c36-68f9faa081f6'
MEMORY = 'CUSTOM_ACCELERATOR_MEMORY_DDR'
#: inventory of the only region of a card of 8 GiB, which can be had
REGION = {'CUSTOM_ACCELERATOR_FPGA': (1, 0), MEMORY: (8192, 0)}
FENCED_REGION = {name: (total, total)
                 for name, (total, _) in REGION.items()}


def card(address, functions=(NLB0,), interface=SHELL_11, **more):
    """A simulated PAC Arria 10 with a port and a VF per function."""
    return simulated.with_vfs({
        'address': address, 'product': 'PAC_ARRIA10',
        'interface': interface, 'functions': list(functions),
        'ports': len(functions), 'programming_seconds': 0, **more})


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


class CellDatabases(nova_fixtures.CellDatabases):
    """In place of Nova's: nova-compute asks the database of its own cell.

    Nova's gives it the one that any thread has read last: while nova-api reads
    servers without a host, a server that runs is not found.
    """

    def _wrap_get_context_manager(self, context):
        cells = self._ctxt_mgrs.keys() - {objects.CellMapping.CELL0_UUID}
        if len(cells) > 1 or getattr(context, 'db_connection', None):
            return super()._wrap_get_context_manager(context)
        return self._default_ctxt_mgr


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
        # after a shelve whose snapshot failed Nova believes it runs, or paused
        for name in 'suspend', 'resume':
            original = getattr(fakelibvirt.Domain, name)
            self.useFixture(fixtures.MockPatchObject(
                fakelibvirt.Domain, name, self._of_active(original)))
        # VIR_DOMAIN_PAUSED_USER, the reason that suspend() gives it; the
        # imitation has no reasons
        self.useFixture(fixtures.MonkeyPatch(
            'nova.tests.fixtures.libvirt.Domain.state',
            lambda domain, flags=0: [domain._state, getattr(
                domain, 'reason', 1)]))
        # to libvirt a paused guest is active
        self.useFixture(fixtures.MockPatchObject(
            fakelibvirt.Domain, 'isActive', lambda domain: int(
                domain._state in (fakelibvirt.VIR_DOMAIN_RUNNING,
                                  fakelibvirt.VIR_DOMAIN_PAUSED))))
        describe = fakelibvirt.Domain.XMLDesc
        self.useFixture(fixtures.MonkeyPatch(
            'nova.tests.fixtures.libvirt.Domain.XMLDesc',
            lambda domain, flags: with_places(describe(domain, flags))))

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
                self._give(kernel, domain, hostdevs(domain.XMLDesc(0)))
                return original(domain, *args, **kwargs)
            if original.__name__ == 'attachDeviceFlags':
                original(domain, *args, **kwargs)
                self._give(kernel, domain, self._taken(domain) - before)
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
            self._give(kernel, domain, {(uuid, False)})
            there.append({'type': 'mdev', 'model': 'vfio-pci',
                          'address_uuid': uuid})
        else:
            there[:] = [d for d in there if d.get('address_uuid') != uuid]
            self._give_back(kernel, uuid, False)

    def _of_active(self, original):
        def call(domain):
            if not domain.isActive():
                raise self._error('Requested operation is not valid: domain '
                                  'is not running')
            original(domain)
        return call

    @staticmethod
    def _taken(domain):
        return hostdevs(domain.XMLDesc(0)) if domain.isActive() else set()

    def _give(self, kernel, domain, given):
        try:
            # an IOMMU group is viable when all of it goes to the guest
            managed = sorted(a for a, is_managed in given if is_managed)
            if managed:
                kernel.guest_takes(*managed, guest=domain.UUIDString())
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


class Metadata(fixtures.Fixture):
    """What libvirt does with <metadata>, which the imitation drops."""

    def _setUp(self):
        parse = fakelibvirt.Domain._parse_definition
        describe = fakelibvirt.Domain.XMLDesc

        def parsed(domain, xml):
            domain.metadata = etree.fromstring(xml).find('./metadata')
            if domain.metadata is None:
                domain.metadata = etree.Element('metadata')
            return parse(domain, xml)

        def described(domain, flags):
            found = etree.fromstring(describe(domain, flags))
            found.append(copy.deepcopy(domain.metadata))
            return etree.tostring(found, encoding='unicode')
        for name, method in (('_parse_definition', parsed),
                             ('XMLDesc', described),
                             ('setMetadata', self._set)):
            self.useFixture(fixtures.MonkeyPatch(
                f'nova.tests.fixtures.libvirt.Domain.{name}', method))

    @staticmethod
    def _set(domain, metadata_type, metadata, key, uri, flags=0):
        """virDomainDefSetMetadata() of libvirt 9: by namespace."""
        if (flags & fakelibvirt.VIR_DOMAIN_AFFECT_LIVE
                and not domain.isActive()):
            raise Hostdevs._error('Requested operation is not valid: domain '
                                  'is not running')
        for element in domain.metadata.findall(f'{{{uri}}}*'):
            domain.metadata.remove(element)
        if metadata is not None:
            found = etree.fromstring(metadata)
            into = etree.SubElement(
                domain.metadata,
                f'{{{uri}}}{etree.QName(found).localname}', nsmap={key: uri})
            into.text = found.text
            into.extend(found)


def with_places(xml):
    """Give each PCI function the place in the guest that libvirt gives it;
    the imitation of Nova 31 leaves it out."""
    devices = etree.fromstring(xml)
    for n, hostdev in enumerate(devices.iterfind(
            "./devices/hostdev[@type='pci']")):
        if hostdev.find('./address') is None:
            etree.SubElement(
                hostdev, 'address', type='pci', domain='0x0000', bus='0x00',
                slot=f'0x{n + 5:02x}', function='0x0')
    return etree.tostring(devices, encoding='unicode')


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


class Ended(Exception):
    """nova-compute would have ended its process here."""


def _end_process(status):
    raise Ended


class PlacementLogContext:
    """In place of oslo_context.context in Placement's request log."""

    class RequestContext(context.RequestContext):

        def update_store(self):
            pass


class AcceleratorTestBase(cloud.CloudOfClass, base.ServersTestBase):
    """Tests of one cloud, which ends with the class; see CloudOfClass."""

    #: of a later one nova-api reads the request spec of each server twice
    microversion = '2.95'
    ADMIN_API = True
    # casts as in a real cloud: an error reaches the server, not the caller
    CAST_AS_CALL = False
    #: tests.limits: a wait may take two minutes
    LIMIT = 600
    #: host name -> description of the simulated host
    HOSTS = {'compute1': {'cards': [card('0000:5e:00.0')]},
             'compute2': {'cards': [card('0000:5e:00.0', [NLB3])]}}

    def build(self):
        self.flavors = {}
        # set before nova-compute loads the driver, which registers them
        assert 'accel' in conf.CONF
        self.directory = self.useFixture(fixtures.TempDir()).path
        self.profiles = os.path.join(self.directory, 'profiles.yaml')
        self.hosts = os.path.join(self.directory, 'hosts')
        os.mkdir(self.hosts)
        for host, description in self.HOSTS.items():
            self.describe_host(host, description)
        self.flags(state_path=os.path.join(self.directory, 'state'))
        # Nova tells 5 s after a start that a service is up, and some are
        # stopped or killed before
        self.flags(service_down_time=3600)
        self.flags(api_paste_config=functional.API_PASTE, group='wsgi')
        vfs = {found['address']: found['vfs'] for host in self.HOSTS.values()
               for found in host.get('cards', ()) if 'vfs' in found}
        self.flags(simulated_host=self.hosts, enabled_drivers=['dfl'],
                   virtual_functions=[f'{a}={n}' for a, n in vfs.items()],
                   include_devices=['address=*'],
                   device_profiles=self.profiles,
                   runtime_programming_pause=0,
                   bitstream_cache=os.path.join(self.directory, 'cache'),
                   group='accel')
        self.flags(**options.OPTIONS)
        # what other clouds of this process were asked for does not count
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.filters.SCHEDULINGS',
            scheduling.Schedulings(filters._get)))
        # of devices that are as good, the same one in each run
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.scheduler.filters._chance', lambda: 0.0))
        # Placement answers in the thread that asks, and must not leave its own
        # contexts there as the current one
        self.useFixture(fixtures.MonkeyPatch(
            'placement.context.RequestContext.update_store',
            lambda context: None))
        self.useFixture(fixtures.MonkeyPatch(
            'placement.requestlog.context', PlacementLogContext))
        self.useFixture(fixtures.MonkeyPatch(
            'nova_accel.virt.errors.end_process', _end_process))
        # a report would fork this process, with all its memory, for uptime
        self.useFixture(fixtures.MonkeyPatch(
            'nova.virt.libvirt.driver.LibvirtDriver.get_host_uptime',
            lambda driver: '00:00:00 up 1 day, 0 users, load average: 0'))
        with mock.patch.multiple(nova_fixtures, GlanceFixture=RealGlance,
                                 CellDatabases=CellDatabases):
            # that of Nova, not that of a test
            base.ServersTestBase.setUp(self)
        self.useFixture(glance_service.NovaTokens())
        self.flags(api_servers=[self.glance.service.url], group='glance')
        self.give_credentials()
        self.useFixture(Hostdevs(self.simulated))
        self.useFixture(Metadata())
        for host in self.HOSTS:
            self.start_compute(host)

    def _setup_compute_service(self):
        # as nova-compute's main() by os-vif
        door.open_door()
        self.flags(compute_driver='accel.AccelLibvirtDriver')

    # The end of a test, see CloudOfClass

    def remember(self):
        self.options = cloud.Options()
        self.hosts_at_start = {host: self._host_state(host)
                               for host in self.HOSTS}
        self.contents_at_start = {
            host: self.parts(host).store.loaded()
            for host in self.HOSTS}
        self.images_at_start = {
            image['id'] for image in self.glance.client.images.list()}
        self.tree_at_start = self.provider_tree()

    def empty(self):
        """Delete all that the test made, and see that nothing else is left.

        What happened to hosts and cards is undone, as by somebody who
        repairs them: what Nova and we remember has to follow.
        """
        self.options.restore()
        self._repair_services()
        self._delete_every_server()
        process.until(self._see_no_claims)
        self._renew_hosts()
        self._forget_images()
        with contextlib.suppress(FileNotFoundError):
            os.unlink(self.profiles)
        self.notifier.reset()
        process.until(self._see_the_start)
        self.forget_log()

    def _repair_services(self):
        for host in self.HOSTS:
            kernel = self.simulated(host)
            for address, mine in json.loads(
                    self._host_state(host))['cards'].items():
                kernel.set_fault(address, **dict.fromkeys(mine['faults']))
        for host, compute in list(self.computes.items()):
            if compute in self.stopped:
                self.restart_compute_service(host)
        for service in self.admin_api.get_services(binary='nova-compute'):
            if service['forced_down'] or service['status'] == 'disabled':
                self.admin_api.put_service(
                    service['id'], {'forced_down': False,
                                    'status': 'enabled'})

    def _delete_every_server(self):
        servers = self.admin_api.get_servers()
        for server in servers:
            if server['OS-EXT-STS:task_state']:
                # as an operator after a crash
                self.admin_api.post_server_action(
                    server['id'], {'os-resetState': {'state': 'error'}})
            self.admin_api.delete_server(server['id'])
        for server in servers:
            self._wait_until_deleted({**server, 'status': 'ERROR'})

    def _see_no_claims(self):
        if self.claims():
            self.compare()
        self.assertEqual([], self.claims())

    def compare(self):
        """Claims are compared with libvirt and Placement on all hosts now, as
        each nova-compute does periodically."""
        for compute in self.computes.values():
            compute.driver.parts.reconciler.run()

    def _host_state(self, host):
        with open(os.path.join(self.hosts, f'{host}.yaml.state')) as file:
            return file.read()

    def guests(self, host):
        """The domains of libvirt's imitation there, also those that do not
        run."""
        return [*self.computes[
            host].driver._host.get_connection()._vms.values()]

    def _renew_hosts(self):
        """Hosts and cards are as at the start, and guests are gone."""
        for host, state in self.hosts_at_start.items():
            self.computes[
                host].driver._host.get_connection()._vms.clear()
            path = os.path.join(self.hosts, f'{host}.yaml.state')
            with open(f'{path}.lock', 'w') as lock:
                fcntl.flock(lock, fcntl.LOCK_EX)
                with open(f'{path}.then', 'w') as file:
                    file.write(state)
                os.replace(f'{path}.then', path)
            self._renew_contents(host)
            self.parts(host).inventory.scanner.scan()
        shutil.rmtree(CONF.instances_path)
        os.mkdir(CONF.instances_path)

    def _renew_contents(self, host):
        """What regions carry is known, and not known, as at the start."""
        parts = self.parts(host)
        then, now = self.contents_at_start[host], parts.store.loaded()
        for region in now.keys() | then.keys():
            if now.get(region) == then.get(region) and region in then:
                continue
            if then.get(region):
                parts.inventory.contents.set_loaded(
                    *region, then[region])
            else:
                parts.inventory.contents.forget(*region, model.OPERATOR)

    def _forget_images(self):
        for image in self.glance.client.images.list():
            if image['id'] not in self.images_at_start:
                self.glance.client.images.delete(image['id'])
        self.glance.service.forget_requests()
        self.forget_bitstreams()

    def forget_bitstreams(self):
        """Empty the cache; they have to be fetched from Glance again."""
        directory = os.path.join(self.directory, 'cache')
        if os.path.isdir(directory):
            for name in os.listdir(directory):
                os.unlink(os.path.join(directory, name))

    def _see_the_start(self):
        """Placement shows what it showed at the start."""
        for _ in range(2):
            # what is not there any more is fenced, then removed
            if self.tree_at_start.keys() != self.provider_tree().keys():
                self.report()
        tree = self.provider_tree()
        self.assertEqual(self.tree_at_start.keys(), tree.keys())
        self._show({name for name, expected in self.tree_at_start.items()
                    if tree[name] != expected})
        if self.tree_at_start != self.provider_tree():
            self.report()
            self.assertEqual(self.tree_at_start, self.provider_tree())

    def _show(self, names):
        """Have their hosts show providers, as after each change of a device;
        the report of a whole host takes ten times as long."""
        for host in self.HOSTS:
            parts = self.parts(host)
            found = [uuid for uuid, provider
                     in parts.inventory.shown.providers().items()
                     if provider.name in names]
            if found:
                parts.publisher.show(found)

    def logs(self):
        yield from super().logs()
        service = getattr(getattr(self, 'glance', None), 'service', None)
        if service:
            for name, text in service.getDetails().items():
                yield name, text.as_text()

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

    def give_credentials(self):
        """[service_user], as far as a Glance without Keystone needs it."""
        CONF.register_opts(loading.get_auth_plugin_conf_options(
            'admin_token'), group='service_user')
        self.flags(auth_type='admin_token', group='service_user',
                   token='nova:service:admin,service,member,reader',
                   endpoint=self.glance.service.url)

    def become_operator(self, token='admin:openstack:admin,member,reader'):
        """Have the environment variables of the command openstack, with an
        administrator's credentials.

        :param token: for Nova and Placement a user, for Glance roles, too.
        """
        def nova(environ, start_response):
            # in the way of Nova's own fixture
            return self.api_fixture.app()({
                **environ, 'HTTP_X_AUTH_USER': 'admin',
                'HTTP_X_AUTH_PROJECT_ID': self.api_fixture.project_id,
                'HTTP_X_ROLES': 'reader,member,admin'}, start_response)
        intercept = interceptor.RequestsInterceptor(
            lambda: nova, host='nova-of-the-operator', port=80)
        intercept.install_intercept()
        self.addCleanup(intercept.uninstall_intercept)
        for name, value in (
                ('AUTH_TYPE', 'admin_token'), ('TOKEN', token),
                ('ENDPOINT', self.placement.fixture.endpoint),
                ('PLACEMENT_ENDPOINT_OVERRIDE',
                 self.placement.fixture.endpoint),
                ('COMPUTE_ENDPOINT_OVERRIDE',
                 'http://nova-of-the-operator/v2.1'),
                ('IMAGE_ENDPOINT_OVERRIDE',
                 f'{self.glance.service.url}/v2')):
            self.useFixture(fixtures.EnvironmentVariable(f'OS_{name}', value))

    def boot(self, extra_specs, expected_state='ACTIVE', **kwargs):
        kwargs.setdefault('image_uuid', self.glance.guest_image)
        return self._create_server(
            flavor_id=self.flavor_of(extra_specs), networks='none',
            expected_state=expected_state, **kwargs)

    def flavor_of(self, extra_specs):
        """The id of the flavor with these extra specs, one for all tests."""
        asked = tuple(sorted(extra_specs.items()))
        if asked not in self.flavors:
            self.flavors[asked] = self._create_flavor(extra_spec=extra_specs)
        return self.flavors[asked]

    def _shelve_server(self, server, expected_state='SHELVED_OFFLOADED'):
        """Nova sets the status before it clears the host of the server."""
        super()._shelve_server(server, expected_state)
        gone = {'OS-EXT-SRV-ATTR:host': None}
        return self._wait_for_server_parameter(server, {
            'status': expected_state,
            **(gone if expected_state == 'SHELVED_OFFLOADED' else {})})

    def fault(self, server):
        """The reason that the owner of a failed server reads."""
        return self.api.get_server(server['id'])['fault']['message']

    # What can be seen

    def parts(self, host):
        return self.computes[host].driver.parts

    def kernel(self, host):
        return self.parts(host).kernel

    def simulated(self, host):
        """The same as kernel(), also while nova-compute does not run."""
        return kernels.Kernel(os.path.join(self.hosts, f'{host}.yaml'))

    def forget_functions(self, host):
        """Cards lose their functions, as by a power cut, without a restart of
        nova-compute, which would make their VFs again."""
        self.simulated(host).power_cycle()
        inventory = self.parts(host).inventory
        inventory.scanner.configure()
        inventory.scanner.scan()

    def claims(self, host=None):
        """The claims of a host or of all, once no region is being cleaned."""
        def look():
            found = [c for h in ([host] if host else self.computes)
                     for c in self.parts(h).store.claims()]
            self.assertEqual([], [
                c for c in found if c.state is model.ClaimState.DELETING
                and c.region_index is not None and not c.error])
            return found
        return process.until(look)

    def domain(self, server):
        """What libvirt has of a server, on the host where Nova sees it."""
        return self.domain_on(self.admin_api.get_server(
            server['id'])['OS-EXT-SRV-ATTR:host'], server)

    def domain_on(self, host, server):
        return self.computes[host].driver._host.get_connection(
            ).lookupByUUIDString(server['id'])

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

    def provider_name(self, host, address):
        """Of the provider that has a whole device, or shares it."""
        name, = [p.name for p in self.parts(
                     host).inventory.shown.providers().values()
                 if address in p.addresses and p.region_index is None]
        return name

    def traits(self, name):
        return set(self._get_provider_traits(self.provider(name)['uuid']))

    def provider_tree(self):
        """Name -> (inventory totals, traits, used) of our providers."""
        return tables.providers()
