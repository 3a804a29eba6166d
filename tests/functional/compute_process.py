# Licensed under the Apache License, Version 2.0. See LICENSE.
"""nova-compute's own main() in a process, which is killed where a test says.

main() builds a cloud whose databases are files, and forks a process for each
job that it reads, a line of JSON each. It hands on the answer when nothing of
the process runs any more, while those of tests.host.killed live on between two
jobs and answer themselves. The process starts the services of the cloud and
runs nova.cmd.compute.main() in its main thread. What a kill leaves is what
there would be: the databases of Nova and Placement, the claim stores, the
simulated hosts, and the guests of libvirt's imitation, which are a file of
each host here.

Not as in a real nova-compute: objects of Nova are read from the database and
not through the conductor, the message bus is oslo.messaging's "fake", and the
options are those of the test. Where a job has a second host, its nova-compute
is a service of that process, and ends in the same moment.
"""

import atexit
import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import types
import typing
from unittest import mock

import fixtures
from nova.cmd import compute as nova_compute
import nova.conf
from nova import context
from nova import objects
from nova.objects import base as objects_base
from nova import service as nova_service
from nova.tests import fixtures as nova_fixtures
from nova.tests.fixtures import libvirt as fakelibvirt
from nova import thread_pool_factory
from nova.virt import node
from oslo_log import log as logging
from oslo_utils.fixture import uuidsentinel
import sqlalchemy

from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.virt import driver
from tests.functional import base
from tests.functional import operations
from tests import limits

HOSTS = HOST, BESIDE = 'compute1', 'compute2'
#: owners of what a job may name as its point: (owner, method, n) is the
#: moment after the n-th call of a method has ended
OWNERS = {
    'store': claim_store.ClaimStore,
    'kernel': sim.SimulatedKernel,
    'guest': fakelibvirt.Domain,
    'driver': driver.AccelLibvirtDriver,
}
#: seconds after the last step in which the point has to be reached
REACHED = 60


class Killed(Exception):
    """The process was killed where the job said."""


class Processes:
    """One nova-compute after another in one cloud."""

    def __init__(self, **options):
        """:param options: of [accel]."""
        self._options = options

    def run(self, *steps, kill: tuple[str, str, int] | None = None,
            hosts: tuple[str, ...] = (HOST,)):
        """Start nova-compute, and do steps.

        :param steps: [name of a method of Cloud, argument ...].
        :param kill: the point at which the process is killed; counted in the
            last step.
        :param hosts: of main(), and of a second nova-compute.
        :returns: the result of each step.
        :raises Killed: it was.
        :raises AssertionError: a step failed, or nova-compute did not start.
        """
        answer = _ask({'options': self._options, 'steps': steps, 'kill': kill,
                       'hosts': hosts})
        if 'killed' in answer:
            raise Killed(answer['killed'])
        if 'error' in answer:
            raise AssertionError(answer['error'])
        return answer['results']


def forget() -> None:
    """Build another cloud for the next job: a test has failed in this one."""
    if _forker.cache_info().currsize:
        forker = _forker()
        _forker.cache_clear()
        forker.stdin.close()
        try:
            forker.wait(20)
        except subprocess.TimeoutExpired:
            os.killpg(forker.pid, signal.SIGKILL)
            forker.wait(60)
        forker.stdout.close()


def _ask(job: dict) -> dict:
    """Give a job to the process that forks; its answer."""
    forker = _forker()
    forker.stdin.write(json.dumps(job) + '\n')
    forker.stdin.flush()
    answer = forker.stdout.readline()
    if not answer:
        raise AssertionError('The cloud could not be built; see above.')
    return json.loads(answer)


@functools.cache
def _forker() -> typing.Any:
    forker = subprocess.Popen(
        [sys.executable, '-W', 'ignore', '-c',
         f'from {__name__} import main; main()'],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        start_new_session=True)
    limits.PROCESSES.add(forker.pid)
    atexit.register(forget)
    return forker


class Connection(fakelibvirt.Connection):
    """libvirt's imitation, whose guests live on without nova-compute."""

    def __init__(self, path, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self._path = path
        if os.path.exists(path):
            with open(path) as file:
                for xml, state in json.load(file):
                    domain = fakelibvirt.Domain(
                        self, xml, state == fakelibvirt.VIR_DOMAIN_RUNNING)
                    self._vms[domain.name()] = domain

    def save(self):
        found = [(domain.XMLDesc(0), domain._state)
                 for domain in [*self._vms.values()]]
        with open(f'{self._path}.new', 'w') as file:
            json.dump(found, file)
        os.replace(f'{self._path}.new', self._path)

    def defineXML(self, xml):
        domain = super().defineXML(xml)
        self.save()
        return domain

    def _mark_running(self, domain):
        super()._mark_running(domain)
        if domain in self._vms.values():
            self.save()

    def _mark_not_running(self, domain):
        super()._mark_not_running(domain)
        self.save()

    def _undefine(self, domain):
        super()._undefine(domain)
        self.save()


OWNERS['libvirt'] = Connection


class Cloud(operations.OperationsTestBase):
    """The cloud that processes inherit; its services run in each of them."""

    HOSTS: typing.ClassVar[dict] = {
        HOST: {'cards': [base.card('0000:5e:00.0'), base.card('0000:5f:00.0')],
               'nvmes': [{'address': f'0000:{n:02x}:00.0'}
                         for n in range(1, 9)]},
        BESIDE: {'cards': [base.card('0000:5e:00.0'),
                           base.card('0000:5f:00.0')]}}

    def runTest(self):
        """testtools wants one."""

    def build(self):
        super().build()
        self.flags(enabled_drivers=['dfl', 'nvme'], group='accel')
        for host in HOSTS:
            mapping = objects.HostMapping(
                context=context.get_admin_context(), host=host,
                cell_mapping=self.cell_mappings['cell1'])
            mapping.create()
            self.host_mappings[host] = mapping
            # the same one in each process
            node_of(host)
        self.libvirt_migrates(self.migrate)
        for name in 'attachDeviceFlags', 'detachDeviceFlags':
            self.useFixture(fixtures.MockPatchObject(
                fakelibvirt.Domain, name,
                self._saved(getattr(fakelibvirt.Domain, name))))

    @staticmethod
    def _saved(change):
        def call(domain, *args, **kwargs):
            change(domain, *args, **kwargs)
            domain._connection.save()
        return call

    def migrate(self, domain, destination, params, flags):
        """In place of libvirt's."""
        host, = {*HOSTS} - {domain._connection.hostname}
        self.guest_moves(domain, host, params['destination_xml'])

    def _setup_services(self):
        self.flags(transport_url=self.cell_mappings['cell1'].transport_url)
        self._setup_compute_service()
        self.api_fixture = self.useFixture(nova_fixtures.OSAPIFixture(
            api_version='v2.1'))
        self.api = self.admin_api = self.api_fixture.admin_api
        self.api.microversion = self.microversion

    def start_compute(self, *args, **kwargs):
        """It is main() that does."""

    # in the process of a nova-compute

    def start_others(self, hosts):
        self.conductor = self.start_service('conductor')
        self.scheduler = self._setup_scheduler_service()
        for host in hosts[1:]:
            super().start_compute(host, connection=self._connect(host))
        self.flags(host=hosts[0])
        self.mock_conn.return_value = self._connect(hosts[0])

    def _connect(self, host):
        return Connection(
            os.path.join(self.directory, f'guests of {host}'),
            'qemu:///system', version=fakelibvirt.FAKE_LIBVIRT_VERSION,
            hv_version=fakelibvirt.FAKE_QEMU_VERSION, hostname=host,
            host_info=fakelibvirt.HostInfo(
                cpu_nodes=2, cpu_sockets=1, cpu_cores=2, cpu_threads=2))

    # steps

    def server(self, specs, host=None):
        return self.boot(specs, host=host)['id']

    def begin(self, action):
        """Ask for an operation of the only server, and do not wait for it.

        :param action: the body of the request; extra specs in place of a
            flavor, and no image.
        """
        server, = self.api.get_servers()
        (name, body), = action.items()
        if name == 'rebuild':
            body['imageRef'] = self.glance.guest_image
        if name == 'resize':
            body['flavorRef'] = self.flavor_of(body['flavorRef'])
        self.admin_api.post_server_action(server['id'], action)

    def begin_server(self, specs):
        """Create a server, and do not wait for it."""
        return self.api.post_server({'server': self._build_server(
            None, self.glance.guest_image, self.flavor_of(specs),
            'none')})['id']

    def delete_all(self):
        self._delete_every_server()

    def pull(self, address):
        """Take a card out, as far as the kernel notices."""
        self.simulated(HOST).set_fault(address, vanish=True)

    def put_back(self, address):
        self.simulated(HOST).set_fault(address, vanish=None)
        self.parts(HOST).inventory.scanner.scan()

    def await_nothing(self):
        """Wait until no server and no claim is left."""
        def look():
            self.assertEqual([], self.api.get_servers())
            self.assertEqual([], self.claims())
        base.process.until(look)

    def hears_signals(self):
        """Whether something wakes the main thread when one comes."""
        return 'accel-signals' in {
            thread.name for thread in threading.enumerate()}

    def names(self):
        """Of our providers of this host."""
        return sorted(name for name in self.provider_tree()
                      if name.startswith(HOST))

    def _guests(self, host):
        """Those that run there, with their devices."""
        return {domain.UUIDString(): base.hostdev_addresses(domain.XMLDesc(0))
                for domain in self.guests(host) if domain.isActive()}

    def agree(self, held, has):
        """Claims, Placement and the guest of the only server agree.

        :param held: the hosts all of whose cards are claimed.
        :param has: those where the guest has all of them.
        """
        self.compare()
        server, = self.api.get_servers()
        claims = {host: self.claims(host) for host in self.computes}
        self.assertEqual(held, sorted(filter(claims.get, claims)))
        for host in held:
            self.assertEqual(
                [(server['id'], base.vf(card['address']))
                 for card in self.HOSTS[host]['cards']],
                sorted((c.instance_uuid, c.handle.address)
                       for c in claims[host]))
            for claim in claims[host]:
                self.assertNotEqual(
                    [], self._allocations_of(claim.provider_uuid))
        guests = {host: self._guests(host) for host in self.computes}
        self.assertEqual(
            {host: {server['id']: [base.vf(card['address']) for card
                                   in self.HOSTS[host]['cards']]}
             for host in has},
            {host: found for host, found in guests.items()
             if any(found.values())})

    def _allocations_of(self, provider):
        return [*self.placement.get(
            f'/resource_providers/{provider}/allocations',
        ).body['allocations']]

    def end_move(self):
        """Delete the only server, and what Nova leaves of its move, as an
        operator does: its guest, and the allocation of the migration."""
        # not shown when the server is gone
        migrations = {m['uuid'] for m in self.admin_api.get_migrations()}
        self.delete_all()
        self.compare()
        left = {uuid: self._allocations_of(uuid)
                for compute in self.computes.values() for uuid, provider
                in compute.driver.parts.inventory.shown.providers().items()
                if 'CUSTOM_ACCELERATOR_FPGA' in provider.inventory}
        consumers = {consumer for found in left.values() for consumer in found}
        self.assertLessEqual(consumers, migrations)
        # nothing else is held
        for claim in self.claims():
            self.assertNotEqual([], left[claim.provider_uuid])
        for consumer in consumers:
            self.placement.delete(f'/allocations/{consumer}')
        for host in self.computes:
            for domain in self.guests(host):
                if domain.isActive():
                    domain.destroy()
                domain.undefine()
        self.compare()
        self.assertEqual([], self.claims())

    def enable(self, host, status='enabled'):
        service, = self.admin_api.get_services(
            binary='nova-compute', host=host)
        self.admin_api.put_service(service['id'], {'status': status})

    def seen(self):
        """What Nova, libvirt, Placement and the claim stores have."""
        tree = self.provider_tree()
        return {
            'servers': {s['id']: s['status'] for s in self.api.get_servers()},
            'guests': {server: has for host in self.computes
                       for server, has in self._guests(host).items()},
            'claims': sorted([c.instance_uuid, c.handle.address]
                             for c in self.claims()),
            'used': {name: usage for name, (_, _, usage) in tree.items()
                     if any(usage.values())},
            'fenced': sorted(
                name for name, (inventory, _, _) in tree.items()
                if inventory and all(total == reserved for total, reserved
                                     in inventory.values())),
        }


def node_of(host):
    return getattr(uuidsentinel, f'node_{host}')


def _no_conductor():
    """In place of ConductorAPI(), the last that main() does about databases."""
    nova_compute.nova.db.main.api.DISABLE_DB_ACCESS = False
    return None


def run_main(cloud, started, stopping=lambda: None):
    """Run nova-compute in this process until it ends.

    :param started: is called with the service when it has started, in the
        main thread.
    :param stopping: is called when it begins to stop.
    """
    start, stop = nova_service.Service.start, nova_service.Service.stop

    def told(service):
        start(service)
        if service.binary == 'nova-compute':
            cloud.computes[service.host] = types.SimpleNamespace(
                manager=service.manager, driver=service.manager.driver,
                host=service.host)
            started(service)

    def told_stop(service, *args, **kwargs):
        if service.binary == 'nova-compute':
            stopping()
        return stop(service, *args, **kwargs)
    with contextlib.ExitStack() as stack:
        for owner, name, value in (
                (nova_service.Service, 'start', told),
                (nova_service.Service, 'stop', told_stop),
                (nova_compute.config, 'parse_args', lambda argv: None),
                (nova_compute.logging, 'setup', lambda *args: None),
                (nova_compute.conductor_rpcapi, 'ConductorAPI',
                 _no_conductor),
                (objects_base.NovaObject, 'indirection_api', None),
                # Nova's harness has no file of it
                (node, 'get_local_node_uuid',
                 lambda: node_of(nova.conf.CONF.host))):
            stack.enter_context(mock.patch.object(owner, name, value))
        nova_compute.main()


class Point:
    """Kills the process after the n-th call of a method."""

    def __init__(self, kill, tell):
        self._tell = tell
        self.counts = False
        if not kill:
            return
        owner, self._name, self._left = kill
        target = OWNERS[owner]
        method = getattr(target, self._name)

        def call(*args, **kwargs):
            try:
                return method(*args, **kwargs)
            finally:
                if self.counts:
                    self._left -= 1
                    if not self._left:
                        self._tell({'killed': f'after {self._name}'})
                        os.kill(os.getpid(), signal.SIGKILL)
        setattr(target, self._name, call)


def _work(cloud, job, tell):
    for name, value in job['options'].items():
        cloud.flags(**{name: value}, group='accel')
    cloud.start_others(job['hosts'])
    point = Point(job['kill'], tell)

    def drive():
        try:
            results = []
            for number, (name, *args) in enumerate(job['steps'], 1):
                point.counts = number == len(job['steps'])
                results.append(getattr(cloud, name)(*args))
            if job['kill']:
                time.sleep(REACHED)
                raise AssertionError(f'{job["kill"]} was not reached')
            tell({'results': results})
        except BaseException:
            tell({'error': '\n'.join(
                text for _, text in cloud.logs())[-20000:]
                + traceback.format_exc()})
        os._exit(0)
    run_main(cloud, lambda service: threading.Thread(
        target=drive, name='driver', daemon=True).start())


def close_databases():
    """No process inherits a connection to SQLite, which is not allowed."""
    for one in gc.get_objects():
        if isinstance(one, sqlalchemy.engine.Engine):
            one.dispose()


def build() -> Cloud:
    cloud = Cloud('runTest')
    cloud._ends = contextlib.ExitStack()
    cloud.stopped = set()
    base.cloud.CloudOfClass._running = cloud
    cloud.build()
    logging.getLogger(None).logger.setLevel(logging.WARNING)
    close_databases()
    # a forked process would give work to threads of theirs, which it has not
    thread_pool_factory.reset_all_executors()
    gc.freeze()
    return cloud


def main() -> None:
    """Do jobs until standard input ends."""
    cloud = build()
    for line in sys.stdin:
        job = json.loads(line)
        reader, writer = os.pipe()
        if not os.fork():
            telling = threading.Lock()

            def tell(answer):
                # once: nothing comes after it
                telling.acquire()
                os.write(writer, json.dumps(answer).encode())
            try:
                _work(cloud, job, tell)
                tell({'error': 'nova-compute ended'})
            except BaseException:
                tell({'error': traceback.format_exc()})
            os._exit(0)
        os.close(writer)
        with open(reader) as file:
            said = file.read()
        with contextlib.suppress(ChildProcessError):
            os.wait()
        print(said, flush=True)
    cloud._ends.close()
