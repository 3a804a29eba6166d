# Licensed under the Apache License, Version 2.0. See LICENSE.
"""Random operations on several servers, with faults, and what always holds.

One cloud for many sequences of hypothesis: each begins with a cloud as at its
start, and ends with every server deleted and nothing left of any. Without
anything in the environment one sequence is played, the same each day and
on each machine. In the environment:

NOVA_ACCEL_SOAK_MINUTES
    play sequences for so long, other ones each time. This is ``make soak``.
NOVA_ACCEL_SEED
    the number by which a series of sequences is played, or the first of them.
NOVA_ACCEL_SHRINK
    look for a shorter sequence that fails, which takes long.
NOVA_ACCEL_VERBOSE
    show also the operations of sequences that go well.
"""

import collections
import contextlib
import faulthandler
import itertools
import os
import random
import re
import shutil
import sqlite3
import sys
import threading
import time
from unittest import mock

import fixtures
import hypothesis
from hypothesis import stateful
from keystoneauth1 import exceptions as ks_exc
from nova.compute import claims as nova_claims
from nova import context as nova_context
from nova import exception as nova_exception
from nova.scheduler.client import report
from nova.tests.fixtures import libvirt as fakelibvirt
from nova.tests.functional.api import client as api_client
from oslo_limit import fixture as limit_fixture
from testtools import content

from nova_accel import conf
from nova_accel.drivers import contract
from nova_accel.drivers import dfl
from nova_accel.host import pci
from nova_accel import model
from nova_accel import naming
from nova_accel import sim
from nova_accel.store import claim_store
from nova_accel.virt import guest
from tests.functional import base
from tests.functional import lock_order
from tests.functional import operations
from tests.functional import process
from tests.functional import random_steps
from tests import limits

#: what asks Placement and has no way on without an answer: the one leaves the
#: allocations of a server that comes back with its migration, the other, in
#: nova-api, answers 500
NOVAS_OWN = ('_revert_allocation', '_allow_resize_to_same_host')
#: Nova's fault where Placement did not take an allocation back: its ten tries
#: are in one transaction, see docs/source/contributor/testing.rst
LEAKED = re.compile('Failed to delete allocations for consumer ([0-9a-f-]+)')
#: that where another request was faster, and together they are over a limit
OVER = re.compile('Project [a-z]+ is over a limit for ')
#: sequences of a series
SEQUENCES = 5
#: the number of the series of each day, of which so many are played
EVERYDAY, EVERYDAYS_SEQUENCES = 0, 1
STEPS = 20
SERVERS = 5
#: project -> how many accelerators Keystone lets it have
LIMITS = {'first': 3, 'second': 2}
#: within which the last event of an operation ends
LAST_EVENT = 2
#: seconds that a slow driver takes longer, and that a hanging one is given
SLOW, HANGS = 1, 3
PATIENCES = 'programming_timeout', 'device_timeout', 'discovery_timeout'
#: after which a step stands still; its longest waits last process.PATIENCE
STANDSTILL = 900

CONF = conf.CONF
HOSTS, CARDS = random_steps.HOSTS, random_steps.CARDS
FPGA, NET = 'CUSTOM_ACCELERATOR_FPGA', 'CUSTOM_ACCELERATOR_NET'
#: a network card, whose VFs guests take along when they migrate live
NIC = '0000:03:00.0'
#: what each project has a private image of
OWN = '0e5e0000-0000-4000-8000-000000000001'
#: the function of the operator's clearing image
CLEARING = 'c1ea5000-0000-4000-8000-000000000001'
#: in which nova-compute is not killed: Nova has no way on from the middle of
#: a move, and of two servers only one would be killed
MOVES = ('resize', 'migrate', 'live migrate', 'revert', 'confirm',
         'create two')


class Sequence(stateful.RuleBasedStateMachine):
    """Of one rule: of several hypothesis leaves some out of most sequences."""

    #: the RandomOperationsTest
    cloud = None

    def __init__(self):
        super().__init__()
        self.cloud.begin_sequence()

    @stateful.rule(step=random_steps.steps())
    def step(self, step):
        if not self.cloud.begun:
            # hypothesis begins each series with the simplest sequence, which
            # is always the same one
            self.cloud.begun = True
            hypothesis.reject()
        self.cloud.step(step)

    @stateful.invariant()
    def holds(self):
        self.cloud.holds()

    def teardown(self):
        self.cloud.end_sequence()


class RandomOperationsTest(operations.OperationsTestBase):

    HOSTS = {host: {**described, 'others': [{
        'address': NIC, 'vendor': '15b3', 'device': '101d',
        'vf_device': '101e', 'driver': 'mlx5_core', 'total_vfs': 4, 'vfs': 4,
        'vfio_driver': 'mlx5_vfio_pci', 'firmware': '28.39.1002'}]}
        for host, described in operations.OperationsTestBase.HOSTS.items()}
    #: tests.limits: a series; the last sequence begins in the last minute
    LIMIT = 1800 + 60 * float(os.environ.get('NOVA_ACCEL_SOAK_MINUTES', 0))

    def setUp(self):
        super().setUp()
        self.useFixture(lock_order.LockOrder())
        self.flags(allow_resize_to_same_host=True,
                   running_deleted_instance_timeout=0)
        self.useFixture(fixtures.MonkeyPatch(
            'nova.tests.fixtures.libvirt.Domain.migrateToURI3',
            self.migrate))
        # a guest that is off already, as after a failed shelve, is waited for
        self.flags(wait_soft_reboot_seconds=1, group='libvirt')
        image = self.upload_bitstream(base.NLB3, properties={})
        # for regions whose content is not known after a fault
        self.upload_bitstream(CLEARING, clears_memory=True, properties={
            'accel:clears': 'memory',
            'accel:region_type_id': base.SHELL_11})
        nlb0 = base.fpga_flavor(function_id=base.NLB0)
        #: name of the flavor -> functions that its servers' regions carry
        self.flavors = {}
        for name, functions, specs in (
                ('programmed', [base.CRYPTO],
                 base.fpga_flavor(function_id=base.CRYPTO)),
                ('loaded', [base.NLB0], nlb0),
                ('any', [None], base.fpga_flavor()),
                ('none', [], {}),
                ('image', [base.NLB3], base.fpga_flavor(bitstream_id=image)),
                ('own', [OWN], base.fpga_flavor(
                    function_id=OWN, runtime_programming='true')),
                ('two', [base.NLB0, base.CRYPTO], {
                    **nlb0, 'group_policy': 'isolate',
                    **base.fpga_flavor('2', function_id=base.CRYPTO)}),
                ('moves', [None], {
                    f'resources1:{NET}': '1',
                    'accel:live_migration': 'transparent'})):
            if functions and name != 'moves':
                specs['accel:live_migration'] = 'detach'
            self._create_flavor(id=name, name=name, extra_spec=specs, disk=5)
            self.flavors[name] = [f and f.replace('-', '') for f in functions]
        self.images = [self.glance.guest_image, self.glance.service.upload(
            self.glance.client, 'other', b'another', visibility='public')[
                'id']]
        #: project -> nova-api, as its members ask it
        self.projects = {}
        for project in LIMITS:
            self.projects[project] = api_client.TestOpenStackClient(
                project, self.api_fixture.base_url, project_id=project,
                roles=['reader', 'member'])
            self.projects[project].microversion = self.microversion
            self.upload_bitstream(
                OWN, client=self.glance.service.client(project, project),
                properties={'visibility': 'private', 'accel:function_id': OWN})
        self.limit()
        #: as what jobs of libvirt end that migrate guests; None: they succeed
        self.migration_ends = None
        self.counted = collections.Counter()
        #: (the exception that ended the test, the step, where in it)
        self.failure = None

    def start_compute(self, hostname, *args, **kwargs):
        self.flags(enabled_drivers=['dfl', 'pci'], group='accel',
                   pci_devices=['vendor=15b3 type=NET'],
                   virtual_functions=[
                       f'{NIC}=4', *(f'{card}=1' for card in CARDS)])
        # a restart keeps what it had
        if not args:
            kwargs.update(libvirt_version=10000000, qemu_version=8002002)
        return super().start_compute(hostname, *args, **kwargs)

    def migrate(self, domain, destination, params, flags):
        """In place of libvirt's: the guest is on the other host."""
        if self.migration_ends:
            self.counted[f'migrations that end as {self.migration_ends}'] += 1
            # from Nova 32 on the server is in ERROR where it has failed, and
            # nothing says why
            self.unexplained.add(domain.UUIDString())
            self.failed.add(domain.UUIDString())
            domain._job_type = self.migration_ends
            raise fakelibvirt.libvirtError('it ends')
        self.counted['migrated live'] += 1
        host, = [host for host in HOSTS if host in destination]
        self.computes[host].driver._host.get_connection().defineXML(
            params['destination_xml']).create()
        domain.complete_job()
        domain.destroy()
        domain.undefine()

    def limit(self):
        """Keystone has limits of each project, which Nova enforces by what
        Placement counts."""
        self.flags(driver='nova.quota.UnifiedLimitsDriver', group='quota')
        self.useFixture(limit_fixture.LimitFixture(
            {**operations.WITHOUT_LIMIT, f'class:{FPGA}': 0,
             f'class:{NET}': 10 ** 6},
            {project: {f'class:{FPGA}': limit}
             for project, limit in LIMITS.items()}))

    def test_random_operations(self):
        """Any sequence of operations, with faults: promises 1 to 3 hold."""
        class OfThisCloud(Sequence):
            cloud = self

        given = os.environ.get
        minutes = float(given('NOVA_ACCEL_SOAK_MINUTES', 0))
        first = int(given('NOVA_ACCEL_SEED', (
            random.SystemRandom().randrange(10 ** 6) if minutes
            else EVERYDAY)))
        self.sequences = (SEQUENCES if minutes or given('NOVA_ACCEL_SEED')
                          else EVERYDAYS_SEQUENCES)
        self.shrinks = bool(given('NOVA_ACCEL_SHRINK'))
        start = time.monotonic()
        try:
            for self.seed in itertools.count(first):
                self.play(type('Series', (OfThisCloud,), {}), self.seed)
                if time.monotonic() >= start + 60 * minutes:
                    break
        except Exception:
            self.say(f'To play this again: NOVA_ACCEL_SEED={self.seed} '
                     f'make functional TEST={self.id()}')
            if self.seed != first:
                took = (time.monotonic() - start) / 60
                self.say(f'If that passes, with all that was before: '
                         f'NOVA_ACCEL_SEED={first} make soak '
                         f'SOAK_MINUTES={2 * took:.0f}')
            raise
        finally:
            self.say(
                f'{self.counted["sequences"]} sequences from seed {first} on '
                f'in {time.monotonic() - start:.0f} s: ' + ', '.join(
                    f'{n} {what}' for what, n in sorted(
                        self.counted.items())))
        self.assertGreater(self.counted['sequences'], 0)

    def play(self, series, seed):
        """Play the sequences of a seed.

        Not one of them alone: where it failed because of what the cloud had
        seen before, hypothesis would find that it ends otherwise.
        """
        self.begun = False
        hypothesis.seed(seed)(series)
        stateful.run_state_machine_as_test(
            series, settings=hypothesis.settings(
                max_examples=self.sequences, stateful_step_count=STEPS,
                database=None, deadline=None,
                report_multiple_bugs=False,
                suppress_health_check=list(hypothesis.HealthCheck),
                phases=[hypothesis.Phase.generate,
                        *[hypothesis.Phase.shrink] * self.shrinks]))

    @staticmethod
    def say(text):
        """On the screen, which neither Nova's fixtures nor stestr keep."""
        print(text, file=sys.__stderr__, flush=True)

    # A sequence

    def begin_sequence(self):
        #: server uuid -> the name by which the log of a failure calls it
        self.names = {}
        #: uuids of servers whose devices need not be as their flavor says
        self.failed = set()
        #: uuids of servers of whose ERROR Nova does not say why
        self.unexplained = set()
        #: uuids of servers whose nova-compute was killed over their devices,
        #: or could not write down how that ended
        self.killed = set()
        #: uuids of servers whose host lost its power since they ran
        self.cold = set()
        #: (host, card) -> the fault that it has until it is mended
        self.broken = {}
        #: uuid -> server, as it was after the last step
        self.known = {}
        self.log = []
        self.steps = 0
        self.failed_now = False
        for host in self.computes:
            # of projects, whose bitstreams may be tried again
            with self.parts(host).store._transaction() as db:
                db.execute('DELETE FROM attempts')

    def stands_still(self, where):
        """Whether nothing is done any more.

        After a failure hypothesis plays the sequence again, to be sure of it,
        in a cloud that is damaged: it sees the same failure again.
        """
        if self.failure and self.failure[1:] == (self.steps, where):
            raise self.failure[0]
        return self.failure

    @contextlib.contextmanager
    def told(self, where):
        """A failure is told with what was done before."""
        watch = threading.Timer(STANDSTILL, self.end_of_patience)
        watch.daemon = True
        watch.start()
        try:
            yield
        except Exception as error:
            self.failed_now = True
            if not self.shrinks:
                self.failure = error, self.steps, where
            text = '\n'.join(self.log)
            self.addDetail('operations', content.text_content(text))
            # of what was waited for in vain
            self.addDetail('stacks', content.text_content(limits.stacks()))
            self.say(f'{text}\n{type(error).__name__}: {error}')
            raise
        finally:
            watch.cancel()

    def end_of_patience(self):
        """Threads that wait for each other cannot be ended but with their
        process; what each of them waits for is told first."""
        self.say('\n'.join(self.log))
        self.say(f'This has not ended within {STANDSTILL} s, in the series '
                 f'NOVA_ACCEL_SEED={self.seed}. The threads:')
        faulthandler.dump_traceback(file=sys.__stderr__)
        os._exit(1)

    def holds(self):
        """After each step."""
        if self.stands_still('holds'):
            return
        with self.told('holds'):
            servers = process.until(self.check)
        for uuid, server in servers.items():
            if server != self.known.get(uuid):
                self.log.append(
                    f'    {self.names[uuid]} {server["status"]} '
                    f'{server["OS-EXT-SRV-ATTR:host"]} '
                    f'{server["flavor"]["original_name"]} '
                    f'{server.get("fault", {}).get("message", "")}')
        self.known = servers

    def end_sequence(self):
        if self.stands_still('end'):
            return
        if self.failed_now:
            # a shorter one is looked for
            return self.wipe()
        with self.told('end'):
            self.end()
        if self.steps == STEPS:
            self.counted['sequences'] += 1
        if os.environ.get('NOVA_ACCEL_VERBOSE'):
            self.say('\n'.join(self.log))
        # what Nova's test fixtures keep of a sequence that went well
        self.stdlog.delete_stored_logs()
        self.notifier.reset()

    # Steps

    def step(self, step):
        """One or two operations on servers, or what happens on a host."""
        self.steps += 1
        if self.stands_still('step'):
            return
        with self.told('step'):
            self.counted['steps'] += 1
            if isinstance(step, random_steps.OnHost):
                self.on_a_host(step)
            else:
                self.on_servers(step)

    def on_servers(self, step):
        chosen = []
        for operation in step.operations:
            found = self.choose(operation, chosen, step.fault)
            if found and not self.both_count(found, chosen):
                chosen.append(found)
        with contextlib.ExitStack() as faults:
            killed = []
            note = self.fault(step.fault, faults, chosen, killed)
            begun = []
            for name, server, request in chosen:
                of = (f' {self.names[server["id"]]} {server["status"]}'
                      if server else '')
                self.log.append(f'{name}{of} {request or ""}{note}')
                begun += self.begin(name, server, request)
            for server in begun:
                self.settle(*server, killed)
            if step.fault and step.fault.kind == 'store':
                self.killed.update(uuid for uuid, *_ in begun)
            if killed:
                self.rise_again(killed[0], begun[0][0])

    @staticmethod
    def both_count(found, chosen):
        """Whether a project asks for more by two requests at a time.

        Nova looks at limits before it schedules, and once more after a
        creation alone: two others together may go beyond them.
        """
        asked = [(name, (server or {}).get('tenant_id') or request['project'])
                 for name, server, request in [*chosen, found]
                 if name.startswith('create') or name in (
                     'unshelve', 'resize')]
        return len(asked) > len({project for _, project in asked}) and not all(
            name.startswith('create') for name, _ in asked)

    def choose(self, operation, chosen, fault):
        """(operation, server or None, request or None), or nothing.

        The request of a creation has its project.
        """
        create, two = operation.create, operation.which % 5 == 4
        flavors = [*self.flavors, 'loaded', 'programmed', 'image']
        kill = bool(fault and fault.kind == 'kill')
        if kill:
            # what comes to where nova-compute is to be killed
            create, two = fault.what.split()[1] != 'remove', False
            flavors = ['programmed', 'image']
        taken = {server['id'] for _, server, _ in chosen if server}
        free = [s for uuid, s in self.known.items() if uuid not in taken]

        def one_of(items):
            return items[(operation.what + self.steps) % len(items)]
        if len(self.known) + len(chosen) < SERVERS and (
                not free or create) and not (
                    fault and fault.kind == 'libvirt'):
            return 'create two' if two else 'create', None, {
                'project': one_of([*LIMITS]),
                'flavorRef': one_of(flavors), 'max_count': 1 + two}
        if not free:
            return None
        possible = random_steps.possible(free)
        if kill:
            possible = [(name, server) for name, server in possible
                        if name in ('delete', 'shelve', 'unshelve')]
        elif fault and fault.kind == 'libvirt':
            # what fails of others is not for this
            possible = [(name, server) for name, server in possible
                        if name == 'live migrate']
            if not possible:
                return None
        # other than the step before also where hypothesis draws the least
        name, server = possible[
            (operation.which + self.steps) % len(possible)]
        request = random_steps.ACTIONS[name][0]
        if name == 'rebuild':
            request = {name: {'imageRef': one_of(self.images)}}
        elif name == 'resize':
            request = {name: {'flavorRef': one_of([
                f for f in self.flavors
                if f != server['flavor']['original_name']])}}
        return name, server, request

    def begin(self, name, server, request):
        """Ask for an operation; (uuid, operation, state before) of each
        server concerned."""
        self.counted[name] += 1
        if not server:
            request = dict(request)
            project = self.projects[request.pop('project')]
            with self.may_be_refused():
                project.post_server({'server': {
                    'name': 'random', 'imageRef': self.images[0],
                    'networks': 'none', **request}})
            made = sorted({s['id'] for s in project.get_servers(
                detail=False)} - self.names.keys())
            for uuid in made:
                self.names[uuid] = f's{len(self.names) + 1}'
                self.counted['servers'] += 1
            return [(uuid, name, None) for uuid in made]
        api = (self.admin_api if name in ('migrate', 'live migrate', 'evacuate')
               else self.projects[server['tenant_id']])
        # Nova's own files of the guest, where the test has no file system
        os.makedirs(os.path.join(self.instances_path, server['id']),
                    exist_ok=True)

        def ask():
            if name == 'delete':
                api.delete_server(server['id'])
            else:
                api.post_server_action(server['id'], request)
        with self.may_be_refused():
            try:
                ask()
            except api_client.OpenStackApiException as refusal:
                if 'Please retry your update' not in str(refusal):
                    raise
                self.take_leaked(str(refusal))
                ask()
        return [(server['id'], name, server['status'])]

    @contextlib.contextmanager
    def may_be_refused(self):
        try:
            yield
        except api_client.OpenStackApiException as refusal:
            status = refusal.response.status_code
            if status not in (400, 403, 409):
                raise
            over = status == 403
            if over:
                self.assertIn(FPGA, str(refusal))
            self.counted['over a limit' if over else 'refused'] += 1
            self.log.append(f'    refused: {refusal}')

    def settle(self, uuid, name, before, killed=()):
        """Wait until an operation that was begun has ended, or nova-compute
        was killed."""
        at_rest = []

        def ended():
            if killed:
                return
            try:
                server = self.api.get_server(uuid)
            except api_client.OpenStackApiNotFoundException:
                return
            self.assertNotEqual('delete', name, 'it is not deleted')
            self.assertIsNone(server['OS-EXT-STS:task_state'])
            self.assertIn(server['status'], random_steps.AT_REST)
            if name == 'confirm':
                # of which the state of the server says nothing
                self.assertNotEqual(before, server['status'])
            if server['status'] == 'ERROR' and uuid not in self.unexplained:
                self.assertIn('fault', server)
            at_rest.append(time.monotonic())
            if time.monotonic() - at_rest[0] < LAST_EVENT:
                # Nova loses the end of some, as after a rescheduling
                self.check_events(uuid)
        process.until(ended)

    def check_events(self, uuid):
        """All of the last action have ended."""
        actions = self.api.get_instance_actions(uuid)
        if not actions:
            # over a limit, which the conductor found; it has no host
            return
        action = actions[0]
        events = self.api.api_get(
            f'/servers/{uuid}/os-instance-actions/{action["request_id"]}',
        ).body['instanceAction']['events']
        self.assertNotIn(None, [e['finish_time'] for e in events])

    # Faults

    def fault(self, fault, stack, chosen, killed):
        """A fault for as long as operations take; what the log says of it.

        :param killed: the host goes in there whose nova-compute is killed.
        """
        if fault is None or not chosen:
            return ''
        if fault.kind == 'kill':
            name, server, _ = chosen[0]
            if len(chosen) > 1 or name in MOVES or (
                    # in its deletion nova-api waits for a confirm
                    server and server['status'] == 'VERIFY_RESIZE'):
                return ''
            stack.enter_context(self.dies(fault.what, killed))
        self.counted[f'faults of {fault.kind}'] += 1
        if fault.kind == 'programming':
            cards = [fault.where] if fault.where else [
                (h, c) for h in HOSTS for c in CARDS]
            for host, card in cards:
                if (host, card) in self.broken:
                    continue
                self.simulated(host).set_fault(
                    card, pr_error=fault.what, pr_error_count=fault.number)
                stack.callback(self.simulated(host).set_fault, card,
                               pr_error=None, pr_error_count=None)
        elif fault.kind == 'glance':
            self.forget_bitstreams()
            stack.enter_context(self.glance.service.fault(fault.what))
        elif fault.kind == 'placement':
            stack.enter_context(
                self.placement_fails(fault.what, fault.number))
        elif fault.kind == 'store':
            stack.enter_context(self.stores_are_read_only(fault.number))
        elif fault.kind == 'driver':
            stack.enter_context(self.driver(fault.what, fault.number))
        elif fault.kind == 'libvirt':
            stack.enter_context(self.migrations_fail(fault.what))
        return (f' [{fault.kind}: {fault.what} at {fault.where or "all"} '
                f'number {fault.number}]')

    @contextlib.contextmanager
    def placement_fails(self, method, number):
        """The call of that number is not answered."""
        client = report.report_client_singleton()
        original = getattr(client, method)
        raising = client.get_allocs_for_consumer
        calls = itertools.count(1)

        def raises(*args, **kwargs):
            # what Nova asks in its own ways is none of ours
            by = sys._getframe(1).f_globals['__name__']
            if not by.startswith('nova_accel.') or next(calls) != number:
                return raising(*args, **kwargs)
            raise ks_exc.ConnectFailure('Placement cannot be reached')

        def failing(*args, **kwargs):
            by = sys._getframe(1).f_code.co_name
            if by in NOVAS_OWN or next(calls) != number:
                return original(*args, **kwargs)
            if method == 'get_allocations_for_consumer':
                return None
            if method == 'get_allocations_for_resource_provider':
                raise nova_exception.ResourceProviderAllocationRetrievalFailed(
                    rp_uuid=args[1], error='out of service')
            raise ks_exc.ConnectFailure('Placement cannot be reached')
        with mock.patch.object(client, method, failing), mock.patch.object(
                client, 'get_allocs_for_consumer',
                raises if method == 'get_allocations_for_consumer'
                else raising):
            yield

    @contextlib.contextmanager
    def driver(self, what, number):
        """A method of the driver takes longer, raises, or does not end as
        long as the operations take.

        :param number: how often; None for each call.
        """
        method, _, how = what.partition(' ')
        original = getattr(dfl.DflDriver, method)
        calls, over = itertools.count(1), threading.Event()

        def call(driver, *args, **kwargs):
            if number is None or next(calls) <= number:
                if how == 'fails':
                    raise RuntimeError(f'{method} of the driver does not work')
                if how == 'hangs':
                    over.wait()
                else:
                    time.sleep(SLOW)
            return original(driver, *args, **kwargs)
        if how == 'hangs':
            self.flags(**dict.fromkeys(PATIENCES, HANGS), group='accel')
        try:
            with mock.patch.object(dfl.DflDriver, method, call):
                yield
        finally:
            over.set()
            for option in PATIENCES:
                CONF.clear_override(option, 'accel')
        process.until(self.check_nothing_hangs)

    def check_nothing_hangs(self):
        for host in self.computes:
            for card in CARDS:
                self.assertEqual('', self.parts(
                    host).inventory.cards.hanging(card))

    @contextlib.contextmanager
    def migrations_fail(self, what):
        """What does not work in live migrations."""
        domain = fakelibvirt.Domain
        if what == 'the guest keeps its devices':
            with mock.patch.object(guest, '_DETACH_SECONDS', 1), \
                    mock.patch.object(domain, 'detachDeviceFlags',
                                      lambda domain, xml, flags: None):
                yield
        elif what == 'devices do not go in':
            with mock.patch.object(
                    domain, 'attachDeviceFlags',
                    side_effect=fakelibvirt.libvirtError('it is full')):
                yield
            for compute in self.computes.values():
                # sooner than after its pause
                pauses = compute.driver.parts.reconciler._pauses
                pauses.update({uuid: (float('-inf'), pause)
                               for uuid, (_, pause) in pauses.items()})
            # gives it up, and tries again
            self.compare()
            self.compare()
        else:
            self.migration_ends = (
                fakelibvirt.VIR_DOMAIN_JOB_CANCELLED if 'aborted' in what
                else fakelibvirt.VIR_DOMAIN_JOB_FAILED)
            try:
                yield
            finally:
                self.migration_ends = None

    @contextlib.contextmanager
    def stores_are_read_only(self, number):
        """SQLite refuses to write, from the change of that number on."""
        original = claim_store.ClaimStore._transaction
        calls, refusing = itertools.count(1), set()

        def transaction(store, write=True):
            if write and next(calls) >= number and (
                    store.path != claim_store.MEMORY):
                store._db.execute('PRAGMA query_only = ON')
                refusing.add(store)
            return original(store, write)
        with mock.patch.object(claim_store.ClaimStore, '_transaction',
                               transaction):
            yield
        for store in refusing:
            # the one of a host that was restarted meanwhile is closed
            with contextlib.suppress(sqlite3.ProgrammingError):
                store._db.execute('PRAGMA query_only = OFF')
        # sooner than its period
        self.compare()

    @contextlib.contextmanager
    def dies(self, point, killed):
        """nova-compute is killed.

        :param point: before or after which call, of those that change a card
            or a claim.
        :param killed: its host is added.
        """
        when, name = point.split()
        of = (sim.SimulatedKernel if name == 'program_dfl_port'
              else claim_store.ClaimStore)
        original, abort = getattr(of, name), nova_claims.Claim.abort
        usual = contract.usual

        def call(mine, *args, **kwargs):
            if killed:
                return original(mine, *args, **kwargs)
            if when == 'after':
                original(mine, *args, **kwargs)
            killed.extend(
                h for h in HOSTS if mine is self.parts(h).store
                or getattr(mine, 'path', '') == self.simulated(h).path)
            raise operations.Killed
        with mock.patch.object(of, name, call), mock.patch.object(
                nova_claims.Claim, 'abort',
                lambda claim: None if killed else abort(claim)
        ), mock.patch.object(
                # not the error of a driver, after which Nova tries the next
                # host
                contract, 'usual', lambda error, what: error if isinstance(
                    error, operations.Killed) else usual(error, what)):
            yield

    def rise_again(self, host, uuid):
        """nova-compute of a host is started after it was killed."""
        self.counted['killed'] += 1
        # the threads of the dead one are gone when they have told their end
        with contextlib.suppress(AssertionError):
            process.until(lambda: self.check_events(uuid), LAST_EVENT)
        for known in (self.killed, self.failed, self.unexplained):
            known.add(uuid)
        self.log.append(f'    nova-compute of {host} is killed')
        self.restart_compute_service(host)
        state = next((s['OS-EXT-STS:task_state'] for s in self.servers()
                      if s['id'] == uuid), None)
        if state:
            self.log.append(f'    {self.names[uuid]} is {state} for ever')
            self.counted['reset'] += 1
            self.admin_api.post_server_action(
                uuid, {'os-resetState': {'state': 'error'}})
        self.settle(uuid, 'killed', None)

    # What happens on hosts

    def on_a_host(self, step):
        host, card = step.host, step.card
        self.counted[step.name] += 1
        self.log.append(f'{step.name} {host} {card}')
        if step.name == 'restart':
            self.restart_compute_service(host)
        elif step.name == 'reconcile':
            self.computes[host].driver.parts.reconciler.run()
        elif step.name == 'report':
            self.report()
        elif step.name == 'scan':
            self.parts(host).inventory.scanner.scan()
        elif step.name == 'break':
            self.broken[host, card] = 'crc'
            self.simulated(host).set_fault(card, pr_error='crc')
        elif step.name == 'mend':
            self.mend()
        elif step.name == 'host is lost':
            self.host_is_lost(host, step.what)
        elif step.name == 'power cut':
            self.power_cut(host, resume=step.what % 4 < 3)
        else:
            self.forget_bitstreams()

    def host_is_lost(self, host, what):
        """Its servers are evacuated, deleted or left, until it returns.

        :param what: two bits for the host, and two for each server.
        """
        compute = self.computes[host]
        compute.stop()
        power, what = what % 4 == 3, what // 4
        if power:
            self.lose_power(host)
        service = compute.service_ref.uuid
        self.admin_api.put_service(service, {'forced_down': 'true'})
        begun = []
        for server in self.known.values():
            if server['OS-EXT-SRV-ATTR:host'] != host:
                continue
            name = ('evacuate', 'evacuate', 'leave', 'delete')[what % 4]
            what //= 4
            if name == 'delete' and server['status'] == 'VERIFY_RESIZE':
                # Nova asks the source to confirm, and answers 500 if it is
                # this one
                name = 'leave'
            self.log.append(f'    {name} {self.names[server["id"]]}')
            if name != 'leave':
                # one after another, for which there may be too few devices
                begun = self.begin(name, server, {'evacuate': {}})
                self.settle(*begun[0])
        self.log.append(f'    {host} returns{" from a power cut" * power}')
        self.restart_compute_service(host)
        self.admin_api.put_service(service, {'forced_down': 'false'})
        self.computes[host].manager._cleanup_running_deleted_instances(
            nova_context.get_admin_context())
        self.stop_dead_guests(host)

    def power_cut(self, host, resume):
        """Guests are gone, and cards have the functions of their flash."""
        self.log[-1] += f' resume={resume}'
        self.computes[host].stop()
        self.lose_power(host)
        self.flags(resume_guests_state_on_host_boot=resume)
        self.restart_compute_service(host)
        self.flags(resume_guests_state_on_host_boot=False)
        for server in self.servers():
            if (server['OS-EXT-SRV-ATTR:host'] == host
                    and server['status'] == 'ERROR'
                    and 'fault' not in server):
                # one that does not start again with its host
                self.unexplained.add(server['id'])
        self.stop_dead_guests(host)

    def lose_power(self, host):
        for domain in self.guests(host):
            domain.destroy()
        self.simulated(host).power_cycle()
        self.cold.update(
            uuid for uuid, server in self.known.items()
            if server['OS-EXT-SRV-ATTR:host'] == host)

    def stop_dead_guests(self, host):
        """As Nova does again and again with servers whose guest is gone."""
        def stopped():
            self.computes[host].manager._sync_power_states(
                nova_context.get_admin_context())
            active = {d.UUIDString() for d in self.guests(host)
                      if d.isActive()}
            for server in self.servers():
                if (server['OS-EXT-SRV-ATTR:host'] == host
                        and server['status'] in ('ACTIVE', 'PAUSED')):
                    self.assertIn(server['id'], active)
                self.assertIsNone(server['OS-EXT-STS:task_state'])
        process.until(stopped)

    def mend(self):
        for host, card in self.broken:
            self.simulated(host).set_fault(card, pr_error=None)
        self.broken = {}

    # What always holds

    def check(self):
        """What holds whenever no operation is under way."""
        servers = {s['id']: s for s in self.servers()}
        for server in servers.values():
            self.check_fault(server)
        self.check_claims(servers)
        self.check_limits(servers)
        self.check_guests(servers)
        self.check_functions(servers)
        return servers

    def servers(self):
        return self.admin_api.get_servers(search_opts={'all_tenants': 1})

    def check_fault(self, server):
        if server['status'] == 'ERROR':
            self.failed.add(server['id'])
            if server['id'] in self.unexplained:
                return
            # a list of servers has faults of one cell only; and Nova writes
            # it after the status
            server = self.admin_api.get_server(server['id'])
            self.assertIn('fault', server)
            message = server['fault']['message'].rstrip()
            if self.take_leaked(message) or OVER.match(message):
                return
            self.assertEqual(('.', True),
                             (message[-1:], ' ' in message), message)

    def take_leaked(self, message):
        """Whether a message is LEAKED. Its allocation is deleted, as by
        openstack resource provider allocation delete."""
        leaked = LEAKED.search(message)
        if leaked:
            self.computes[HOSTS[0]].driver.virtapi.reportclient \
                .delete_allocation_for_instance(
                    nova_context.get_admin_context(), leaked[1], force=True)
        return bool(leaked)

    def check_claims(self, servers):
        """Each claim has its allocation, each allocation its claim.

        Nova takes the allocation from a server whose operation failed after
        its guest had started; then its device is reserved.
        """
        if any(c.role is model.Role.OLD and servers.get(
                c.instance_uuid, {'status': 'ERROR'})['status'] == 'ERROR'
                for c in self.claims()):
            # nobody tells the source that a resize failed
            self.compare()
        held = self.held()
        allocated = self.all_allocated()
        claimed = collections.Counter(
            (c.provider_uuid, self.consumer_of(c, allocated)) for c in held)
        if claimed - allocated:
            self.compare()
            reserved = {uuid for host in self.computes for uuid in
                        self.parts(host).inventory.table.unallocated}
            self.assertEqual({}, {
                of: n for of, n in (claimed - allocated).items()
                if of[1] not in self.failed or not reserved.issuperset(
                    c.uuid for c in held
                    if (c.provider_uuid, c.consumer_uuid) == of)}, held)
        missing = {consumer for _, consumer in allocated - claimed}
        # of a resize that failed on its destination Nova leaves the server
        # with the allocation for the one flavor, and with the other flavor;
        # a later migration takes that allocation over
        if missing - self.failed:
            servers_of = {m['uuid']: m['instance_uuid']
                          for m in self.admin_api.get_migrations()}
            missing = {servers_of.get(of, of) for of in missing}
        self.assertLessEqual(missing, self.failed)
        for claim in held:
            state, server = claim.state, servers.get(claim.instance_uuid)
            is_off = server and server['status'] in (
                'SHUTOFF', 'SUSPENDED', 'ERROR',
                *['VERIFY_RESIZE'] * (claim.role is model.Role.OLD))
            if claim.error and is_off:
                # its function could not be put back, and it did not start,
                # before a move either
                self.assertIn(state, (
                    model.ClaimState.BOUND, model.ClaimState.UNKNOWN,
                    *[model.ClaimState.PROVISIONING] * (
                        claim.instance_uuid in self.killed)))
            elif claim.instance_uuid not in self.killed:
                self.assertEqual((model.ClaimState.BOUND, ''),
                                 (state, claim.error), claim)
            if claim.role is model.Role.CURRENT:
                self.assertEqual(claim.instance_uuid, claim.consumer_uuid)

    def check_limits(self, servers):
        """No project has more than its limit, and Placement shows nothing as
        free that a server has, or that is not clean after one."""
        has = collections.Counter(
            servers[c.instance_uuid]['tenant_id'] for c in self.held()
            if c.role is model.Role.CURRENT and c.instance_uuid in servers
            and c.resource_class == FPGA)
        self.assertEqual({}, {
            of: n for of, n in has.items() if n > LIMITS[of]})
        if self.free_and_claimed():
            # what nova-compute does each minute
            self.compare()
            self.report()
            self.assertEqual([], self.free_and_claimed())

    def free_and_claimed(self):
        """The providers that have room in Placement, with a claim."""
        found = []
        for uuid in sorted({c.provider_uuid for c in self.claims()}):
            url = f'/resource_providers/{uuid}'
            inventory = self.placement.get(
                f'{url}/inventories').body['inventories'].get(FPGA)
            used = self.placement.get(f'{url}/usages').body['usages']
            if inventory and (inventory['total'] - inventory['reserved']
                              > used.get(FPGA, 0)):
                found.append(uuid)
        return found

    def consumer_of(self, claim, allocated):
        """Return the consumer in Placement that a claim stands for.

        A revert that cannot write the claim leaves the migration in it, until
        the next start of the server.
        """
        if (claim.instance_uuid in self.killed
                and not allocated[claim.provider_uuid, claim.consumer_uuid]):
            return claim.instance_uuid
        return claim.consumer_uuid

    def held(self, host=None):
        """The claims of servers. A device that could not be cleaned, as on a
        broken card, belongs to its server no more."""
        return [c for c in self.claims(host)
                if c.state is not model.ClaimState.DELETING]

    def all_allocated(self):
        """(provider uuid, consumer uuid) -> amount, of our providers."""
        allocated = collections.Counter()
        for host in self.computes:
            inventory = self.parts(host).inventory
            for uuid, provider in inventory.shown.providers().items():
                for consumer, allocation in self.placement.get(
                        f'/resource_providers/{uuid}/allocations',
                ).body['allocations'].items():
                    allocated[uuid, consumer] += sum(
                        allocation['resources'].get(name, 0)
                        for name in (FPGA, NET))
        return allocated

    def check_guests(self, servers):
        """Each guest has what its server holds, and nobody else has it."""
        for host in self.computes:
            held = collections.defaultdict(list)
            for claim in self.held(host):
                if claim.role is model.Role.CURRENT:
                    held[claim.instance_uuid].append(claim.handle.address)
            guests = {
                d.UUIDString(): (d.isActive(),
                                 base.hostdev_addresses(d.XMLDesc(0)))
                for d in self.guests(host)}
            in_guests = []
            for uuid, (active, devices) in guests.items():
                if active:
                    in_guests += devices
                    self.check_what_is_left(host, uuid, devices)
                    self.assertLessEqual(set(devices), set(held[uuid]))
                    self.assertEqual(
                        host, servers[uuid]['OS-EXT-SRV-ATTR:host'])
            # the source of a resize that failed on its destination is never
            # told, and keeps the guest, shut off
            self.assertLessEqual(guests.keys() - servers.keys(), self.failed)
            for uuid, server in servers.items():
                if (server['OS-EXT-SRV-ATTR:host'] == host
                        and server['status'] in random_steps.WITH_GUEST):
                    if uuid not in guests:
                        # Nova defines a guest again at each start, and this
                        # start failed as its card is broken, or as nothing
                        # could be written down
                        self.assertEqual('SHUTOFF', server['status'])
                        self.assertTrue(uuid in self.killed or [
                            claim for claim in self.held(host)
                            if claim.instance_uuid == uuid and claim.error])
                        continue
                    _, devices = guests[uuid]
                    self.assertEqual(
                        [] if server['status'] == 'SUSPENDED'
                        else sorted(held[uuid]), devices, server)
            self.assertEqual(sorted(in_guests), self.bound_to_vfio(host))

    def check_what_is_left(self, host, uuid, devices):
        """A guest finds in its devices nothing but what it has written."""
        kernel, mine = self.simulated(host), {'registers': uuid,
                                              'memory': uuid}
        for device in set(devices) - set(self.vfs(host)):
            found = kernel.guest_reads(device)
            self.assertLessEqual(found.items(), mine.items())
            if found != mine:
                kernel.guest_writes(device, **mine)

    def bound_to_vfio(self, host):
        kernel = self.simulated(host)
        return [vf for vf in (*self.vfs(host), *map(base.vf, CARDS))
                if pci.is_for_vfio(kernel, vf)]

    def vfs(self, host):
        """Of the network card."""
        return sorted(
            handle.address for handle in self.parts(
                host).inventory.devices[NIC].handles)

    def check_functions(self, servers):
        """The regions of a server carry what its flavor asks for."""
        self.cold -= {d.UUIDString() for host in self.computes
                      for d in self.guests(host) if d.isActive()}
        for uuid, server in servers.items():
            if (uuid in self.failed | self.cold
                    or server['status'] not in random_steps.WITH_GUEST):
                continue
            held = [c for c in self.held() if c.instance_uuid == uuid
                    and c.role is model.Role.CURRENT]
            wanted = self.flavors[server['flavor']['original_name']]
            self.assertEqual(len(wanted), len(held), server)
            for claim, function in zip(held, wanted):
                if function:
                    self.assertEqual(function, self.carried(
                        server['OS-EXT-SRV-ATTR:host'], claim))

    def carried(self, host, claim):
        """Also by a card that a guest has, whose sysfs the host has not."""
        _, state = self.simulated(host)._look()
        return state['cards'][claim.device_address]['functions'][
            claim.region_index]

    # The end of a sequence

    def end(self):
        """Delete every server; nothing is left but broken cards."""
        self.log.append('end')
        for server in self.known.values():
            self.settle(*self.begin('delete', server, None)[0])
        # what could not be cleaned is tried again
        for host, card in self.broken:
            self.simulated(host).set_fault(card, pr_error=None)
        self.compare()
        process.until(self.check_nothing_left)
        self.as_at_the_start()

    def as_at_the_start(self):
        self.mend()
        for host, compute in self.computes.items():
            compute.driver._host.get_connection()._vms.clear()
            self.forget_functions(host)
        self.forget_bitstreams()
        shutil.rmtree(os.path.join(self.instances_path, ''))
        os.makedirs(self.instances_path, exist_ok=True)
        self.report()

    def wipe(self):
        """Whatever a sequence that failed has left."""
        for server in self.servers():
            self.admin_api.post_server_action(
                server['id'], {'os-resetState': {'state': 'error'}})
            self.api.delete_server(server['id'])
            self.settle(server['id'], 'delete', None)
        for host in self.computes:
            store = self.parts(host).store
            store.remove(store.claims())
        for _, consumer in self.all_allocated():
            self.placement.delete(f'/allocations/{consumer}')
        self.as_at_the_start()

    def check_nothing_left(self):
        self.check()
        self.assertEqual([], self.claims())
        self.assertFalse(self.all_allocated())
        for host in self.computes:
            self.parts(host).inventory.scanner.scan()
        self.report()
        tree = self.provider_tree()
        for host in self.HOSTS:
            self.assertEqual([], self.bound_to_vfio(host))
            for card in CARDS:
                name = naming.region_provider_name(host, card, 0)
                inventory, traits, used = tree[name]
                self.assertFalse(any(used.values()))
                if (host, card) not in self.broken:
                    self.assertNotIn(naming.FENCED, traits)
                    self.assertEqual(base.REGION, inventory)
